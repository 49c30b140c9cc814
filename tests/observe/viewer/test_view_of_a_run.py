"""A real run: its log, its rollouts as they are looked at, and its advantages computed again from what it saved."""

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from headrace import cli
from headrace.observe.rollouts.records import iter_lines
from headrace.observe.viewer.query import ViewQuery, view, write_page
from headrace.observe.viewer.tokens import ColorBy
from headrace.wiring.commands.recredit import RecreditRequest, recredit

RUN = """
[run]
name = "small"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 128
[rl]
steps = 1
groups = 2
group_size = 3
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 128
credit = "grpo"
tasks = { type = "env", name = "key_door", size = 20, seed = 2 }
[rl.sampling]
max_tokens = 4
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one training step, logged at DEBUG."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(RUN)
    before = logging.getLogger("headrace").level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("HEADRACE_DEBUG", raising=False)
        patch.setattr(sys, "argv", ["headrace", "train", "run.toml", "--log-level", "debug"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    logging.getLogger("headrace").setLevel(before)
    (made,) = (folder / "runs").iterdir()
    return made


def test_the_log_has_groups_at_info_and_steps_at_debug(run: Path) -> None:
    lines = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    groups = [line for line in lines if " INFO headrace.loops.credit_log: group " in line]
    steps = [line for line in lines if " DEBUG headrace.rollout.episode_log: episode " in line]
    told = [line for line in lines if " DEBUG headrace.loops.credit_log: episode " in line]
    credit, ends = ([line for line in told if (", step " in line) is of_step] for of_step in (True, False))
    episodes = list(iter_lines(run / "rollouts" / "step_000001.jsonl"))
    assert len(groups) == 2
    assert all("R " in line and "lengths " in line and "A_E " in line for line in groups)
    assert len(steps) == len(credit) == sum(len(episode.steps) for episode in episodes) > 6
    assert all("log-prob" in line and "reward" in line and "answer" in line for line in steps)
    assert all(word in line for line in credit for word in ("A_E", "A_S", "G ", "anchor"))
    assert len(ends) == len(episodes)
    assert all(word in line for line in ends for word in ("steps", "ended by ", "final score "))


def test_the_run_can_be_looked_at_with_the_texts_of_its_tokens(run: Path, tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    for part in view(ViewQuery(path=run, episode="0/0", tokens=ColorBy.LOGPROB), width=200, colour=False):
        console.print(part)
    text = console.export_text()
    assert "<|user|>" in text
    assert "key" in text
    assert write_page(ViewQuery(path=run), tmp_path / "page.html") == 6


def test_advantages_are_computed_again_from_the_file_to_the_last_bit(run: Path, tmp_path: Path) -> None:
    result = recredit(RecreditRequest(path=run, out=tmp_path / "again.jsonl"))
    file = run / "rollouts" / "step_000001.jsonl"
    for before, after in zip(iter_lines(file), iter_lines(tmp_path / "again.jsonl"), strict=True):
        assert before == after
    assert result.method.method == "grpo"


def test_the_terminal_is_spared_what_is_said_of_every_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = logging.getLogger("headrace").level
    cli.configure()
    logging.getLogger("headrace").setLevel(logging.DEBUG)  # as --log-level debug does
    logging.getLogger("headrace.loops.credit_log").info("group 1")
    logging.getLogger("headrace.rollout.episode_log").debug("step 1")
    logging.getLogger("headrace.wiring.commands.train").info("run folder")
    logging.getLogger("headrace").setLevel(before)
    said = capsys.readouterr().err
    assert "run folder" in said
    assert "group 1" not in said
    assert "step 1" not in said
