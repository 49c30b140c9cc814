"""Comparisons of made-up runs: figures, differences, tasks and the page, with numbers worked out by hand."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.algo.estimates.intervals import t_interval
from headrace.observe.comparison.arms import Arm, ComparedRun, read_runs
from headrace.observe.comparison.compare_page import comparison_page, write_comparison
from headrace.observe.comparison.compared import compare_arms, config_differences, final_figures, side_by_side
from headrace.observe.comparison.comparison_tables import as_json, figure_cells, sentences, tables
from headrace.observe.comparison.held_out import compare_held_out, episodes_by_task
from headrace.observe.comparison.overlay import overlaid_charts, values_by_step
from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.rollouts.records import EpisodeRecord, read_lines
from headrace.observe.sinks.jsonl import MetricRecord
from headrace.types import Task
from support.made_up_run import made_up_episode, make_run

ATTACK = "<script>document.title='owned'</script>\u202e"


def no_answer(text: str, data: object) -> str | None:
    return None


def episodes(folder: Path, solved: list[bool], *, samples: int = 1, prompt: str = "") -> tuple[EpisodeRecord, ...]:
    """`samples` episodes of each task, of which all or none succeed."""
    made = []
    for number, success in enumerate(solved):
        for sample in range(samples):
            scored = made_up_episode(f"task {number}", success=success, actions=["go"])
            task = Task(id=f"task {number}", data={"prompt": prompt})
            episode = replace(scored.episode, id=f"{number}/{sample}", task=task, seed=100 * number + sample)
            made.append(replace(scored, episode=episode))
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    save_trajectories(path, made, lean=True)
    return read_lines(path)


def arm(
    label: str, lines: tuple[EpisodeRecord, ...] = (), records: tuple[MetricRecord, ...] = (), **config: object
) -> Arm:
    run = ComparedRun(name=label, records=records, config=config, evaluation="rl", episodes=lines)
    return Arm(label=label, runs=(run,))


def record(step: int, values: dict[str, float], stage: str = "rl") -> MetricRecord:
    return MetricRecord(step=step, stage=stage, values=values)


def test_the_same_tasks_are_paired(tmp_path: Path) -> None:
    arms = [
        arm("old", episodes(tmp_path, [True, False, False, False])),
        arm("new", episodes(tmp_path, [True, True, True, False, True])),
    ]
    found = compare_held_out(arms, no_answer)
    assert (found.tasks, found.common, found.same_seeds, found.same_id_only) == ((4, 5), 4, True, 0)
    success, reward = found.rows
    assert [row.value for row in success.arms if row is not None] == [0.25, 0.8]
    paired = success.paired[1]
    assert paired is not None
    assert (paired.difference.value, paired.difference.count) == (0.5, 4), "the fifth task is not in both"
    assert (paired.better, paired.worse, paired.p_value) == (2, 0, 0.5)
    assert reward.name == "reward"


def test_tasks_of_the_same_id_and_other_contents_are_not_paired(tmp_path: Path) -> None:
    arms = [arm("old", episodes(tmp_path, [True])), arm("new", episodes(tmp_path, [False], prompt="another"))]
    comparison = compare_arms(arms, no_answer)
    assert (comparison.held_out.common, comparison.held_out.same_id_only) == (0, 1)
    assert comparison.held_out.rows[0].paired == (None, None)
    assert sentences(comparison) == [
        "The arms have no held-out task in common, so nothing is paired.",
        "1 tasks have the same id but other contents, and are not paired.",
    ]


def test_a_task_that_a_source_has_twice_is_two_tasks(tmp_path: Path) -> None:
    once, twice = episodes(tmp_path, [True]), episodes(tmp_path, [False])
    lines = (*once, *(replace(line, id="1/0") for line in twice))
    assert [[line.verdict for line in group] for group in episodes_by_task(lines).values()] == [[True], [False]]


def test_other_seeds_are_told(tmp_path: Path) -> None:
    lines = episodes(tmp_path, [True, False])
    others = tuple(replace(line, seed=line.seed + 1) for line in lines)
    comparison = compare_arms([arm("a", lines), arm("b", others)], no_answer)
    assert sentences(comparison) == [
        "The tasks are the same and the seeds of their episodes differ (eval.seed or eval.samples)."
    ]


def test_evaluations_of_different_stages_are_told(tmp_path: Path) -> None:
    lines = episodes(tmp_path, [True, False])
    (run,) = arm("under way", lines).runs
    arms = [arm("done", lines), Arm(label="under way", runs=(replace(run, evaluation="base"),))]
    assert sentences(compare_arms(arms, no_answer)) == [
        "The last evaluations are of different stages (base: before training): done: rl, under way: base."
    ]


def test_differences_of_configurations_are_keys_and_values() -> None:
    one = {"rl": {"steps": 4, "rewards": [{"fn": "math"}], "stop": ["a"]}, "run": {"name": "x", "seed": 0}}
    two = {"rl": {"steps": 4, "rewards": [{"fn": "math"}, {"fn": "length"}], "stop": ["b"]}, "run": {"name": "x"}}
    found = {row.key: row.arms for row in config_differences([[one], [two]])}
    assert found == {
        "rl.stop": ('["a"]', '["b"]'),
        "run.seed": ("0", "–"),
        "rl.rewards[1].fn": ("–", '"length"'),
    }
    seeds = [[{"run": {"seed": seed}}] for seed in (0, 0)]
    assert config_differences(seeds) == ()
    several = config_differences([[{"seed": 0, "lr": 1}, {"seed": 1, "lr": 1}]])
    assert [(row.key, row.arms) for row in several] == [("seed", ("0, 1",))]


def test_final_figures_are_the_last_evaluation_and_means_of_the_last_steps() -> None:
    records = [record(step, {"reward/mean": float(step), "time/train_s": 2.0}) for step in range(1, 21)]
    records.insert(10, record(10, {"eval/pass@1": 0.75}))
    records.append(record(20, {"eval/pass@1": 0.5}))
    assert final_figures(records) == {
        "rl steps": 20.0,
        "eval/pass@1": 0.5,
        "eval/pass@1, best": 0.75,
        "reward/mean, last 10 steps": 15.5,
        "time": 40.0,
    }
    assert final_figures(records[:2])["reward/mean, last 10 steps"] == 1.5, "one name, to be compared with longer runs"


def test_an_arm_of_several_seeds_has_means_and_intervals() -> None:
    runs = tuple(
        ComparedRun(
            name=str(value), records=(record(1, {"eval/pass@1": value}),), config={}, evaluation="", episodes=()
        )
        for value in (0.4, 0.5, 0.6)
    )
    comparison = compare_arms([Arm(label="seeds", runs=runs)], no_answer)
    (figure,) = [row.arms[0] for row in comparison.figures if row.name == "eval/pass@1"]
    assert figure is not None
    assert (figure.value, figure.count) == (pytest.approx(0.5), 3)
    assert figure.high - figure.value == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)  # t of 2 degrees of freedom
    assert figure_cells("rl steps", [t_interval([4.0, 4.0])]) == ["4"], "an interval without width is none"
    (chart,) = overlaid_charts(comparison.arms)
    assert '<polygon class="area arm0"' in chart.svg


def test_the_interval_of_a_share_over_seeds_stays_a_share() -> None:
    runs = tuple(
        ComparedRun(
            name=str(value), records=(record(1, {"eval/pass@1": value}),), config={}, evaluation="", episodes=()
        )
        for value in (0.1, 0.9)
    )
    comparison = compare_arms([Arm(label="seeds", runs=runs)], no_answer)
    (row,) = [row for row in comparison.figures if row.name == "eval/pass@1"]
    assert figure_cells(row.name, row.arms) == ["50% [0, 100]"]


def test_values_of_runs_meet_at_their_steps() -> None:
    runs = [[record(1, {"a": 1.0}), record(2, {"a": 2.0})], [record(2, {"b": 4.0}), record(3, {"a": float("nan")})]]
    assert values_by_step(runs, ["a", "b"], "rl") == {1: [1.0], 2: [2.0, 4.0]}


def test_tasks_on_which_the_arms_differ_come_first(tmp_path: Path) -> None:
    arms = [
        arm("old", episodes(tmp_path, [True, True, False, False], samples=2)),
        arm("new", episodes(tmp_path, [True, False, True, False], samples=2)),
    ]
    rows, tally = side_by_side(arms)
    assert tally == (
        ("solved by new alone", 1),
        ("solved by old alone", 1),
        ("not solved", 1),
        ("solved by all", 1),
    )
    assert [row.heading for row in rows] == ["Task task 2", "Task task 1", "Task task 3", "Task task 0"]
    assert [talk.when for talk in rows[0].conversations] == [
        "old, the first of 2 (0 solved)",
        "new, the first of 2 (2 solved)",
    ]
    chosen, _ = side_by_side(arms, ["task 3"])
    assert chosen[0].heading == "Task task 3"


# --- the page --------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_of_two_runs_is_whole_and_asks_nobody(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, note=ATTACK) for name in ("a", "b")]
    config = (paths[1] / "config.toml").read_text()
    (paths[1] / "config.toml").write_text(config.replace("seed = 0", f"seed = 1\nnote = {json.dumps(ATTACK)}"))
    runs = read_runs(paths)
    assert [run.name for run in runs] == ["a/demo_2026-03-01T12-00-00Z", "b/demo_2026-03-01T12-00-00Z"]
    assert {run.evaluation for run in runs} == {"rl"}, "the last evaluation of each"
    comparison = compare_arms([Arm(label=run.name, runs=(run,)) for run in runs], no_answer)
    page = write_comparison(tmp_path / "compare.html", ATTACK, comparison).read_text()
    tags = Tags(page).tags
    assert [tag for tag, _ in tags].count("script") == 1, "no script but ours"
    assert not [attributes for _, attributes in tags if attributes.keys() & {"src", "href", "onerror"}]
    policy = next(attributes for _, attributes in tags if "http-equiv" in attributes)["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "\u202e" not in page
    titles = re.findall(r"<figcaption><h3>([^<]*)", page)
    assert {"Reward", "Held-out success: solved at the first try", "Loss, supervised"} <= set(titles)
    assert "run.seed" in page
    assert page.count('class="card episode"') == 2 * len(comparison.rows) == 12
    assert {arguments["class"] for tag, arguments in tags if tag == "i"} == {"arm0", "arm1"}


def test_tables_and_json_say_the_same(tmp_path: Path) -> None:
    arms = [
        arm("old", episodes(tmp_path, [True, False]), seed=0),
        arm("new", episodes(tmp_path, [True, True]), seed=1),
    ]
    comparison = compare_arms(arms, no_answer)
    assert [str(table.title) for table in tables(comparison)] == [
        "Configuration",
        "Held-out tasks (2)",
        "Paired with old, on the same tasks",
    ]
    found = json.loads(json.dumps(as_json(comparison), allow_nan=False))
    assert found["differences"] == {"seed": ["0", "1"]}
    assert found["arms"][1]["paired"]["pass@1"]["value"] == 0.5
    assert found["arms"][0]["scores"]["pass@1"]["count"] == 2


def test_files_that_cannot_be_read_are_left_out_and_told(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name) for name in ("a", "b")]
    with (paths[0] / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    (paths[1] / "rollouts" / "eval_rl.jsonl").write_text('{"schema_version": 1}\n')
    comparison = compare_arms([Arm(label=run.name, runs=(run,)) for run in read_runs(paths)], no_answer)
    told = sentences(comparison)
    assert [sentence.startswith("Left out: ") for sentence in told] == [False, True, True]
    assert any("1 lines of" in sentence and "metrics.jsonl" in sentence for sentence in told)
    assert any("eval_rl.jsonl" in sentence for sentence in told)
    assert "metrics.jsonl" in comparison_page("x", comparison)
