"""`headrace eval` of one and of several checkpoints, with models small enough to play in a second."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import ConfigError, RolloutError
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.records import read_lines
from headrace.wiring.commands.experiments.eval_checkpoints import checkpoint_labels

RUN = """
[run]
name = "sums"
[model]
path = "first"
[rl]
steps = 1
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl" }
rewards = [{ fn = "final_number" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 3
[eval]
tasks = 6
source = { type = "jsonl", path = "tasks.jsonl" }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(2)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.toml").write_text(RUN)
    for seed, name in enumerate(("first", "second")):
        save_tiny(Path(name), words=(*"0123456789", "+", "="), width=16, layers=1, heads=2, kv_heads=1, seed=seed)
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_figures_are_those_of_the_episodes_that_were_kept(folder: Path) -> None:
    figures = json.loads(run("first", "run.toml", "--samples", "4", "--json"))
    (arm,) = figures["arms"]
    assert (arm["label"], arm["tasks"], arm["samples"], arm["paired"]) == ("first", 6, 4, {})
    lines = read_lines(Path(arm["episodes"]))
    solved = [[line.verdict for line in lines if line.task.id == task] for task in {line.task.id for line in lines}]
    assert [len(verdicts) for verdicts in solved] == [4] * 6
    assert arm["scores"]["pass@1"]["value"] == pytest.approx(sum(map(sum, solved)) / 24)
    assert arm["scores"]["pass@4"]["value"] == pytest.approx(sum(map(any, solved)) / 6)
    assert arm["scores"]["pass@4"] | {"count": 6} == arm["scores"]["pass@4"]
    assert 0.0 <= arm["scores"]["maj@4"]["low"] <= arm["scores"]["maj@4"]["value"] <= arm["scores"]["maj@4"]["high"]
    assert arm["metrics"]["eval/pass@4"] == pytest.approx(arm["scores"]["pass@4"]["value"])
    kept = Path(figures["folder"])
    assert kept.parent == Path("runs/evals")
    assert json.loads((kept / "evaluation.json").read_text()) == figures
    assert "maj@4" in (kept / "compare.html").read_text()
    for command in ("view", "report"):
        shown = CliRunner().invoke(app, [command, str(kept)], catch_exceptions=False)
        assert shown.exit_code == 0


def test_several_checkpoints_play_the_same_tasks_and_seeds_and_are_paired_with_the_first(folder: Path) -> None:
    figures = json.loads(run("first", "second", "run.toml", "--samples", "2", "--out", "here", "--json"))
    first, second = figures["arms"]
    assert (figures["common_tasks"], figures["same_seeds"], figures["folder"]) == (6, True, "here")
    assert first["paired"] == {}
    difference = second["scores"]["pass@1"]["value"] - first["scores"]["pass@1"]["value"]
    assert second["paired"]["pass@1"]["value"] == pytest.approx(difference)
    assert 0.0 < second["paired"]["pass@1"]["p_value"] <= 1.0
    assert second["paired"]["pass@1"]["count"] == 6
    names = [Path(arm["episodes"]).name for arm in (first, second)]
    assert names == ["eval_1-first.jsonl", "eval_2-second.jsonl"]
    seeds = [[line.seed for line in read_lines(Path("here/rollouts") / name)] for name in names]
    assert seeds[0] == seeds[1]
    assert figures["differences"].keys() == {"model.path"}
    with pytest.raises(ConfigError, match="here is there already: give --out the name of a new folder"):
        run("first", "run.toml", "--out", "here")


def test_the_tables_name_the_scores_and_say_when_there_is_no_vote(folder: Path) -> None:
    text = run("first", "second", "run.toml", "--samples", "2")
    assert "maj@2" in text
    assert "Paired with first, on the same tasks" in text
    rows = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    Path("tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": r["prompt"], "sum": r["answer"]}) + "\n" for r in rows)
    )
    text = run("first", "run.toml", "--samples", "2", "--set", "rl.rewards.0.kwargs.column=sum")
    assert "pass@2" in text
    assert "maj@2" not in text
    assert "The tasks have no final answer to vote on" in text
    assert "Paired" not in text


def test_a_start_that_fails_leaves_no_folder(folder: Path) -> None:
    Path("bad.py").write_text("def score(text, truth):\n    raise ValueError('no')\n")
    with pytest.raises(RolloutError):
        run("first", "run.toml", "--set", 'rl.rewards=[{fn="bad.py:score"}]')
    assert not Path("runs").exists()


def test_labels_of_checkpoints() -> None:
    paths = ["runs/a/checkpoints/rl/step_1", "runs/b/checkpoints/rl/step_1", "openai:gpt"]
    assert checkpoint_labels(paths) == ["a/checkpoints/rl/step_1", "b/checkpoints/rl/step_1", "openai:gpt"]
    with pytest.raises(ConfigError, match="x is given twice"):
        checkpoint_labels(["x", "y", "x"])
