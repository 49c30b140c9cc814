"""A run folder from a stranger: looking at it, explaining it and crediting it again runs no code that it names."""

import json
import pickle
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.printable import visible
from headrace.user_code import load_function
from headrace.wiring.commands.recredit import RecreditRequest, recredit
from support import rollout_files

CONFIG = r"""
[run]
name = "theirs"
[model]
path = "tiny"
[rl]
steps = 4
credit = "gigpo"
loss = "evil.py:f"
anchor = "evil.py:f"
generate_fn = "evil.py:f"
max_prompt_tokens = 64
max_episode_tokens = 256
tasks = { type = "env", name = "key_door" }
[[rl.rewards]]
fn = "evil.py:f"
name = "right\u001b]0;owned\u0007\u202e"
[rl.reward_runner]
type = "inprocess"
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """It appears when the stranger's code has run."""
    return tmp_path / "owned"


@pytest.fixture
def run(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "theirs"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\ndef f(*args, **kwargs): return 1.0\n")
    bomb = b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR."
    for name in ("metrics.pkl", "checkpoints.pt", "rollouts/step_000003.pkl"):
        (folder / name).write_bytes(bomb)
    rollout_files.save(folder / "rollouts" / "step_000004.jsonl", note=rollout_files.ATTACK)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "config.toml"],
        ["report", "."],
        ["view", "."],
        ["view", ".", "--episode", "7/0"],
        ["view", ".", "--html", "page.html"],
        ["recredit", "."],
        ["recredit", ".", "--credit", "dr_grpo"],
    ],
    ids=" ".join,
)
def test_no_command_that_looks_at_a_run_runs_what_it_names(
    run: Path, mark: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    assert not caught.value.code, shown.err
    assert not mark.exists()
    assert shown.out == visible(shown.out)
    for page in run.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert text.count("<script") == 1
        assert text == visible(text)


def test_a_credit_method_in_a_strangers_file_is_a_name_and_no_code(run: Path, mark: Path) -> None:
    file = run / "rollouts" / "step_000004.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["credit"] = {"method": "evil.py:f", "params": {}}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"evil\.py:f"):
        recredit(RecreditRequest(path=run))
    assert not mark.exists()


def test_the_code_and_the_pickles_would_leave_their_mark(run: Path, mark: Path) -> None:
    load_function("evil.py:f", base=run)
    assert mark.exists()
    mark.rmdir()
    pickle.loads((run / "metrics.pkl").read_bytes())
    assert mark.exists()
