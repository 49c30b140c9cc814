import doctest
import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest

from headrace.observe.outcome import write_outcome
from headrace.observe.report import subject
from headrace.observe.report.charts import charts, other_names
from headrace.observe.report.episodes import compare, conversation, sample_file
from headrace.observe.report.run_report import (
    headline,
    held_out_losses,
    held_out_rewards,
    render,
    reward_findings,
    write_report,
)
from headrace.observe.report.subject import subjects
from headrace.observe.rollouts.records import EpisodeRecord, read_lines
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import JsonlSink, MetricRecord, read_metrics
from headrace.printable import visible

ATTACK = "<script>document.title='owned'</script><img src=http://evil.invalid/x onerror=alert(1)>"


class Page(HTMLParser):
    """Which elements and attributes a page really has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def record(step: int, stage: str, **values: float) -> MetricRecord:
    return MetricRecord(step=step, stage=stage, values={name.replace("__", "/"): v for name, v in values.items()})


def test_the_headline_is_the_last_evaluation_of_each_stage() -> None:
    def evaluated(step: int, stage: str, value: float) -> MetricRecord:
        return MetricRecord(step=step, stage=stage, values={"eval/pass@1": value})

    records = [
        evaluated(0, "sft", 0.1),
        evaluated(50, "sft", 0.2),
        evaluated(100, "sft", 0.4),
        record(1, "rl", reward__mean=1.0),
        evaluated(0, "rl", 0.41),
        evaluated(10, "rl", 0.75),
    ]
    shown = [(bar.label, bar.text, bar.change) for bar in headline(records, {})]
    assert shown == [
        ("Before training", "10%", ""),
        ("After SFT", "40%", "+30.0 points"),
        ("After RL", "75%", "+35.0 points"),
    ]
    told = headline([], {"success_sft": 0.5, "success_rl": 0.25, "seconds": 3.0})
    assert [(bar.label, bar.text, bar.change) for bar in told] == [
        ("After SFT", "50%", ""),
        ("After RL", "25%", "-25.0 points"),
    ]


def test_charts_without_data_are_left_out_and_stages_do_not_mix() -> None:
    records = [record(step, stage, loss__total=value) for step, stage, value in ((1, "sft", 3.0), (1, "rl", 0.1))]
    assert [(chart.title, chart.change) for chart in charts(records)] == [
        ("Loss, supervised", "3"),
        ("Loss, reinforcement", "0.1"),
    ]
    assert charts([]) == ()


def test_the_terms_of_a_reward_have_a_chart_behind_their_sum() -> None:
    values = {"reward__mean": 1.0, "reward__env": 0.5, "reward__length": -0.25, "reward__env/part": 0.1}
    several = [record(1, "rl", **values)]
    assert [chart.title for chart in charts(several)] == ["Reward", "Rewards by term"]
    assert [label for _, label in charts(several)[1].legend] == ["env", "length"]
    assert other_names(several) == ["reward/env/part"]
    many = [record(1, "rl", reward__mean=1.0, **{f"reward__{letter}": 1.0 for letter in "abcdef"})]
    assert len(charts(many)[1].legend) == 4
    assert other_names(many) == ["reward/e", "reward/f"]  # each in a chart of its own
    assert [chart.title for chart in charts([record(1, "rl", reward__mean=1.0, reward__env=1.0)])] == ["Reward"]


def test_every_chart_explains_itself_in_a_sentence(synthetic_run: Callable[..., Path]) -> None:
    records = read_metrics(synthetic_run() / "metrics.jsonl")
    drawn = charts(records)
    assert [chart.title for chart in drawn] == [
        "Held-out success",
        "Reward",
        "Success in training",
        "Length",
        "Loss, supervised",
        "Loss, reinforcement",
        "KL from the sampling policy",
        "Entropy",
        "Sampler and trainer mismatch",
        "Gradient norm",
        "Learning rate",
        "Throughput",
        "Where the time went",
    ]
    assert all(chart.explanation.endswith(".") for chart in drawn)
    assert other_names(records) == ["reward/format"]


def test_importance_ratios_are_drawn_in_one_chart() -> None:
    records = [
        MetricRecord(step=step, stage="rl", values={f"loss/ratio_{name}": value for name, value in ratios.items()})
        for step, ratios in enumerate(({"min": 0.5, "mean": 1.0, "max": 2.0}, {"min": 0.9, "mean": 1.0, "max": 1.1}))
    ]
    [chart] = charts(records)
    assert chart.title == "Importance ratios"
    assert [label for _, label in chart.legend] == ["largest", "mean", "smallest"]


def test_the_tasks_are_sorted_by_what_changed(synthetic_run: Callable[..., Path]) -> None:
    rollouts = synthetic_run() / "rollouts"
    before, after = read_lines(rollouts / "eval_sft.jsonl"), read_lines(rollouts / "eval_rl.jsonl")
    made = compare("Before", before, "After", after)
    # before 0 0 1 0 1 0, after 1 1 1 0 0 1
    assert made.tally == (
        ("Newly solved", 3),
        ("Solved both times", 1),
        ("Not solved either time", 1),
        ("No longer solved", 1),
    )
    assert [(row.heading, [talk.task for talk in row.conversations]) for row in made.rows] == [
        ("Newly solved", ["mill-0", "mill-0"]),
        ("Solved both times", ["mill-2", "mill-2"]),
        ("Not solved either time", ["mill-3", "mill-3"]),
        ("No longer solved", ["mill-4", "mill-4"]),
    ]
    disjoint = compare("Before", before[:1], "After", after[1:2])
    assert disjoint.tally == ()
    assert [row.heading for row in disjoint.rows] == ["Before", "After"]


def test_a_conversation_shows_what_each_turn_earned(synthetic_run: Callable[..., Path]) -> None:
    lines = read_lines(synthetic_run() / "rollouts" / "step_000001.jsonl")
    talk = conversation("Then", lines[1])
    assert talk.badges == (("good", "solved"), ("plain", "reward 1"))
    assert [turn.badges for turn in talk.turns if turn.role == "assistant"] == [
        (("good", "advantage +0.50"),),
        (("bad", "advantage -0.50"),),
        (("plain", "reward 1"), ("good", "advantage +1.00")),
    ]
    assert [talk.badges[1][1] for talk in sample_file("Then", lines).conversations] == [
        "reward 1",
        "reward 1",
        "reward 0",
    ]


def test_everything_a_model_or_user_wrote_is_escaped(synthetic_run: Callable[..., Path]) -> None:
    folder = synthetic_run(ATTACK)
    (folder / "config.toml").write_text(f'[run]\nname = "{ATTACK}"\n')
    sink = JsonlSink(folder / "metrics.jsonl", stage="rl")
    sink.log(61, {ATTACK: 1.0})
    sink.close()
    page = Page(write_report(folder, {ATTACK: ATTACK}).read_text())
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert any(ATTACK in words for words in page.words)


def test_control_characters_and_changes_of_direction_are_visible_everywhere(synthetic_run: Callable[..., Path]) -> None:
    unseen = "\x1b[31m\x07\u202e\u2066"
    folder = synthetic_run(unseen)
    (folder / "config.toml").write_text('[run]\nname = "x\\u202e"\n# \u202e\n')
    sink = JsonlSink(folder / "metrics.jsonl", stage="rl")
    sink.log(61, {f"reward/{unseen}": 1.0, f"other/{unseen}": 1.0})
    sink.close()
    page = write_report(folder, {unseen: unseen}).read_text()
    assert page == visible(page)
    assert page.count(r"\x1b[31m\x07\u202e\u2066") > 5
    assert r"<h1>x\u202e</h1>" in page


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.toml", "run = 3"),
        ("config.toml", "model = []"),
        ("environment.json", '{"packages": 3, "git": [1]}'),
        ("rollouts/step_abc.jsonl", ""),
        ("rollouts/eval_zzz.jsonl", "[" * 100_000),
        ("metrics.jsonl", '{"step": 1, "stage": 3, "a": 1}\n'),
    ],
)
def test_odd_files_of_a_strangers_run_do_not_keep_the_report_from_being_written(
    synthetic_run: Callable[..., Path], file: str, text: str
) -> None:
    folder = synthetic_run()
    for evaluated in folder.glob("rollouts/eval_*"):
        evaluated.unlink()
    (folder / file).write_text(text)
    assert "Headrace report" in write_report(folder).read_text()


@pytest.mark.parametrize(
    ("file", "text"),
    [("config.toml", "\x00"), ("environment.json", "[]"), ("metrics.jsonl", "[" * 100_000 + "\n")],
)
def test_files_that_cannot_be_read_are_named(
    synthetic_run: Callable[..., Path], caplog: pytest.LogCaptureFixture, file: str, text: str
) -> None:
    folder = synthetic_run()
    (folder / file).write_text(text)
    page = write_report(folder).read_text()
    assert "Left out" in page
    assert file in page
    assert f"the report leaves out {file}" in caplog.text or f"a line of {file}" in caplog.text


@pytest.mark.parametrize(
    ("state", "sentence"), [("failed", "the run failed: out of memory"), ("stopped", "the run ended early: out of")]
)
def test_the_page_says_why_a_run_ended_before_its_last_step(
    synthetic_run: Callable[..., Path], state: Literal["failed", "stopped"], sentence: str
) -> None:
    folder = synthetic_run()
    outcome = RunFolder(path=folder).outcome
    write_outcome(outcome, "started", seconds=1.0)
    assert "the run failed" not in write_report(folder).read_text()
    write_outcome(outcome, state, seconds=1.0, reason="out of memory")
    page = write_report(folder).read_text()
    assert page.index("Warnings") < page.index(sentence) < page.index("The result")


def test_links_in_a_strangers_run_are_replaced_and_not_followed(
    synthetic_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder, victim = synthetic_run(), tmp_path / "victim"
    victim.write_text("mine")
    for name in ("report.html", "report.html.tmp"):
        (folder / name).symlink_to(victim)
    assert not write_report(folder).is_symlink()
    assert victim.read_text() == "mine"


def test_the_page_asks_for_nothing_outside_itself(synthetic_run: Callable[..., Path]) -> None:
    page = Page(write_report(synthetic_run()).read_text())
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in page.attributes}
    assert any("default-src 'none'" in value for name, value in page.attributes if name == "content")


def test_a_run_folder_with_little_in_it_still_has_a_report(tmp_path: Path) -> None:
    assert "No metrics have been written yet" in write_report(tmp_path).read_text()


def test_training_episodes_are_shown_when_nothing_was_evaluated(synthetic_run: Callable[..., Path]) -> None:
    folder = synthetic_run()
    for path in (folder / "rollouts").glob("eval_*"):
        path.unlink()
    text = write_report(folder).read_text()
    assert "Training step 1</h3>" in text
    assert "Training step 60</h3>" in text


def said(page: Path) -> list[str]:
    return [words for words in Page(page.read_text()).words if words.strip()]


@pytest.mark.parametrize("junk", ["{}", "no JSON", '{"schema_version":1}'])
def test_a_line_that_is_no_episode_is_left_out_and_named(
    synthetic_run: Callable[..., Path], junk: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = synthetic_run()
    whole = said(write_report(folder))
    path = folder / "rollouts" / "eval_rl.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + junk + "\n" + "".join(rest))
    spoilt = said(write_report(folder))
    (note,) = [words for words in spoilt if "eval_rl.jsonl" in words]
    assert note.startswith("a line of eval_rl.jsonl; ")
    assert "eval_rl.jsonl, line 2" in note
    assert note in caplog.text
    assert [words for words in spoilt if words not in ("Left out", note)] == whole


def test_a_rollout_file_without_any_episode_is_no_reason_for_no_report(synthetic_run: Callable[..., Path]) -> None:
    folder = synthetic_run()
    (folder / "rollouts" / "eval_rl.jsonl").write_text("{}\n{}\n")
    text = write_report(folder).read_text()
    assert "2 lines of eval_rl.jsonl; " in text
    assert "Held-out success" in text


def test_long_texts_and_long_conversations_are_cut_and_say_so(synthetic_run: Callable[..., Path]) -> None:
    path = synthetic_run() / "rollouts" / "eval_rl.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["messages"] = [{"role": "user", "content": "x" * 5000}] * 50
    path.write_text(json.dumps(line) + "\n")
    (long,) = read_lines(path)
    assert isinstance(long, EpisodeRecord)
    talk = conversation("Then", long)
    assert talk.turns[0].text.endswith("… (1000 more characters)")
    assert (len(talk.turns), talk.left_out) == (40, 10)


def test_steps_whose_rewards_teach_nothing_are_told() -> None:
    def steps(*ranges: tuple[float, float]) -> list[MetricRecord]:
        return [
            MetricRecord(step=step, stage="rl", values={"reward/min": low, "reward/max": high})
            for step, (low, high) in enumerate(ranges, start=1)
        ]

    assert reward_findings(steps((0.0, 1.0), (1.0, 1.0))) == []
    assert reward_findings(steps((0.0, 0.0), (0.0, 0.0))) == [
        "all episodes had the same reward in 2 of 2 training steps: nothing was learned in those",
        "no episode of 2 training steps had a reward above 0",
    ]
    [equal] = reward_findings(steps(*[(1.0, 1.0)] * 10, (0.0, 1.0)))
    assert equal.startswith("all episodes had the same reward in 10 of 11 training steps")
    assert reward_findings([MetricRecord(step=1, stage="sft", values={"train/loss": 1.0})]) == []


def test_a_held_out_loss_is_a_result_too() -> None:
    def records(*losses: float) -> list[MetricRecord]:
        return [MetricRecord(step=n, stage="sft", values={"eval/loss": loss}) for n, loss in enumerate(losses, 1)]

    assert held_out_losses([]) == ()
    page = render(name="r", records=records(2.5, 1.0003), comparison=None, config="", facts=(("a", "b"),), summary={})
    assert "Held-out loss of supervised fine-tuning: 1, from 2.5 when it was first measured." in page
    assert "No held-out evaluation was made" not in page
    page = render(name="r", records=(), comparison=None, config="", facts=(("a", "b"),), summary={})
    assert "No held-out evaluation was made" in page


def test_tasks_without_a_verdict_are_sorted_by_reward(synthetic_run: Callable[..., Path]) -> None:
    lines = read_lines(synthetic_run() / "rollouts" / "eval_sft.jsonl")
    unjudged = [replace(line, success=None, reward=replace(line.reward, success=None, total=0.5)) for line in lines]
    after = [
        replace(line, reward=replace(line.reward, total=total))
        for line, total in zip(unjudged, (1, 0.5, 0, 0.5, 1, 0.5), strict=True)
    ]
    made = compare("Before", unjudged, "After", after)
    assert made.tally == (("Higher reward", 2), ("Equal reward", 3), ("Lower reward", 1))
    assert [row.heading for row in made.rows] == ["Higher reward", "Equal reward", "Lower reward"]


def test_a_held_out_reward_is_at_the_top_if_nothing_says_success() -> None:
    records = [record(0, "rl", eval__reward=0.25), record(10, "rl", eval__reward=0.5)]
    assert held_out_rewards(records) == (("reinforcement learning", "0.25", "0.5"),)
    judged = MetricRecord(step=1, stage="rl", values={"eval/pass@1": 0.1, "eval/reward": 0.25})
    assert held_out_rewards([judged]) == ()
    page = " ".join(
        Page(render(name="x", records=records, comparison=None, config="", facts=[("a", "b")], summary={})).words
    )
    assert "No held-out evaluation was made" not in page
    assert "Mean reward on held-out tasks, reinforcement learning: 0.5, from 0.25" in page


def test_the_top_names_data_and_rewards() -> None:
    assert doctest.testmod(subject).failed == 0
    hub = {"type": "hub", "path": "openai/gsm8k@abc", "subset": "main", "split": "train"}
    teacher = {"path": "/models/large", "tasks": {"type": "env", "name": "add"}}
    config = {
        "sft": {"sources": [{"type": "jsonl", "path": "/d/a.jsonl"}, {"type": "env", "name": "add"}]},
        "distill": {"teachers": [teacher]},
        "rl": {"tasks": [hub], "rewards": [{"fn": "math"}]},
    }
    assert subjects(config) == (
        ("SFT", "a.jsonl, add"),
        ("Distillation", "add; teacher large"),
        ("RL", "openai/gsm8k (main/train); reward math"),
    )
    assert subjects({"run": {"name": "x"}, "rl": "broken"}) == ()
    page = render(name="x", about=subjects(config), records=[], comparison=None, config="", facts=[], summary={})
    assert page.index("<b>RL</b> openai/gsm8k (main/train); reward math") < page.index("</header>")
