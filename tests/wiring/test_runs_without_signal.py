"""A run that learns nothing ends with the cause, a checkpoint and a report, and can be resumed."""

import json
import sys
from pathlib import Path

import pytest

from headrace import cli
from headrace.model.tiny import save_tiny
from headrace.observe.sinks.jsonl import read_metrics

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
tensorboard = false
stop_without_signal = 3
[model]
path = "model"
[engine]
max_num_seqs = 8
[rl]
steps = 12
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl" }
rewards = [{ fn = "mine.py:score" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
"""
CONSTANT = "def score(text, truth):\n    return 0.5\n"
RANDOM = "def score(text, truth):\n    return float(sum(map(ord, text)) % 97)\n"

STOPPING = """\
import signal


def score(text, truth):
    score.calls += 1
    if score.calls == 9:
        signal.raise_signal(signal.SIGTERM)
    return score.calls


score.calls = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tiny(tmp_path / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(CONSTANT)
    rows = [{"prompt": f"add {a} + {b} =", "answer": "1"} for a in range(4) for b in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def headrace(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def test_a_run_of_equal_rewards_ends_with_the_cause_and_is_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("train", "run.toml") == 1
    said = capsys.readouterr().err
    assert "all advantages were 0 in 3 training steps in a row, so nothing was learned: all 12 episodes had the" in said
    assert "same reward, 0.5" in said
    [run] = (folder / "runs").iterdir()
    assert f"when it is mended, go on with  headrace train {Path('runs') / run.name / 'config.toml'}" in said
    assert "dead groups 100 %  steps without signal 1" in said
    records = read_metrics(run / "metrics.jsonl")
    assert [record.values["credit/dead_groups"] for record in records] == [1.0, 1.0, 1.0]
    assert (run / "checkpoints/rl/step_000003/state.json").exists()
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index("all episodes had the same reward in 3 of 3 training steps") < page.index("The result")

    (folder / "mine.py").write_text(RANDOM)
    assert headrace("train", "run.toml", str(run), "--resume", "--accept-changed-files") == 0
    records = read_metrics(run / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, 13))
    assert records[-1].values["credit/dead_groups"] < 1


def test_the_steps_are_counted_over_a_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint after two such steps, and the third in another process."""
    config = CONFIG.replace("stop_without_signal = 3", "stop_without_signal = 0").replace("steps = 12", "steps = 4")
    (folder / "run.toml").write_text(config + "[checkpoint]\nevery = 2\nkeep_last = 9\n")
    assert headrace("train", "run.toml") == 0, "0: never"
    [run] = (folder / "runs").iterdir()
    state = json.loads((run / "checkpoints/rl/step_000002/state.json").read_text())["state"]
    assert state["without_signal"]["steps"] == 2
    for name in ("step_000004", "latest"):
        (run / "checkpoints/rl" / name).rename(folder / name)
    capsys.readouterr()
    assert headrace("train", "run.toml", str(run), "--resume", "--set", "run.stop_without_signal=3") == 1
    assert "all advantages were 0 in 3 training steps in a row" in capsys.readouterr().err
    assert [record.step for record in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]


def test_groups_that_are_all_rejected_end_the_run_with_a_checkpoint_of_its_last_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switched = (
        "def score(text, truth):\n    score.calls += 1\n    return float(score.calls if score.calls < 9 else 0)\n"
    )
    (folder / "mine.py").write_text(switched + "score.calls = 0\n")
    filters = '[[rl.filters]]\nfn = "reward_spread"\n[rl.async]\nmax_consecutive_drops = 6\n'
    (folder / "run.toml").write_text(CONFIG + filters)
    assert headrace("train", "run.toml") == 1
    assert "6 groups in a row were of no use (filtered_reward_spread 6 times)" in capsys.readouterr().err
    [run] = (folder / "runs").iterdir()
    steps = [record.step for record in read_metrics(run / "metrics.jsonl")]
    assert steps
    assert (run / f"checkpoints/rl/step_{steps[-1]:06d}/state.json").exists()
    assert "tasks.jsonl; reward score" in (run / "report.html").read_text(encoding="utf-8"), "a failed run has one too"


def test_a_run_that_is_stopped_has_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(STOPPING)
    assert headrace("train", "run.toml") == 75
    [run] = (folder / "runs").iterdir()
    assert "stopped on request after step 2 of 12" in capsys.readouterr().err
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "tasks.jsonl; reward score" in page


def test_warnings_of_the_start_stay_on_the_line_and_in_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three conversations are cut, and a column is dropped."""
    (folder / "run.toml").write_text(
        '[run]\ntensorboard = false\n[model]\npath = "model"\n'
        '[sft]\nsteps = 2\nbatch_size = 2\nmax_tokens = 12\nsources = [{ type = "jsonl", path = "talks.jsonl" }]\n'
    )
    rows = [{"prompt": f"add {n} + 1 =", "answer": "1 " * length, "hint": "sum"} for n, length in enumerate((1, 9, 20))]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert headrace("train", "run.toml") == 0
    said = capsys.readouterr().err
    [run] = (folder / "runs").iterdir()
    kept = json.loads((run / "warnings.json").read_text())
    assert [entry["name"] for entry in kept] == [f"columns: {folder / 'talks.jsonl'}", "cut conversations"]
    assert kept[1]["text"] == (
        "2 of 3 conversations are longer than sft.max_tokens = 12 and are cut at the end; the longest has 30 tokens"
    )
    lines = [line for line in said.splitlines() if line.startswith("sft ")]
    assert lines
    assert all("  warnings 2  " in line for line in lines)
    page = (run / "report.html").read_text(encoding="utf-8")
    for entry in kept:
        assert page.index(entry["text"].partition("`")[0]) < page.index("The result")
