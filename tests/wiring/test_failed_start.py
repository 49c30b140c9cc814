"""A start that fails leaves nothing behind; a run that measured something keeps its folder and says how it ended."""

import signal
from pathlib import Path

import pytest

from headrace import wiring
from headrace.config import load_config
from headrace.errors import HeadraceError, Interrupted, RolloutError
from headrace.observe.outcome import read_outcome
from headrace.observe.run_folder import RunFolder

CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 160
[rl]
steps = 1
groups = 2
group_size = 2
max_prompt_tokens = 100
max_episode_tokens = 150
max_turns = 2
tasks = { type = "env", name = "key_door", size = 4 }
[rl.reward_runner]
type = "inprocess"
[rl.sampling]
max_tokens = 4
"""


EVALUATED = ('eval.source={type="env", name="key_door", size=4}', "eval.tasks=2")


def start(folder: Path, *overrides: str, resume: Path | None = None) -> wiring.RunResult:
    config = load_config(CONFIG, file="run.toml", overrides=[f"run.folder={folder}", *overrides])
    return wiring.train(config, config_text_path=Path("run.toml"), resume=resume)


def reward(folder: Path, body: str) -> str:
    """Return the override for a reward with that body, in this process; `run` is the run folder of the moment.

    `send_once` sends this process a signal at the first call only: a second one ends it where it is.
    """
    lines = ["import os, signal", "from pathlib import Path", f"runs = Path({str(folder / 'runs')!r})", "sent = []"]
    lines += ["def send_once(number):", "    if not sent:", "        sent.append(number)"]
    lines += ["        os.kill(os.getpid(), number)"]
    lines += ["def judge(episode):", "    [run] = runs.iterdir()", f"    {body}"]
    (folder / "judge.py").write_text("\n".join(lines) + "\n")
    return f'rl.rewards=[{{fn="{folder / "judge.py"}:judge"}}]'


def test_a_stage_that_cannot_be_opened_leaves_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder was needed by then: the model that is made on the spot is in it."""
    caplog.set_level("INFO", "headrace")
    with pytest.raises(HeadraceError):
        start(tmp_path / "runs", f"rl.reference={tmp_path / 'nowhere'}", 'rl.loss="ppo + reference_kl_k3"')
    assert not (tmp_path / "runs").exists()
    assert "is removed: nothing was trained" in caplog.text


def test_runs_that_were_there_before_stay(tmp_path: Path) -> None:
    (tmp_path / "runs" / "other").mkdir(parents=True)
    with pytest.raises(HeadraceError):
        start(tmp_path / "runs", f"rl.reference={tmp_path / 'nowhere'}", 'rl.loss="ppo + reference_kl_k3"')
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_run_that_fails_after_it_has_measured_something_stays_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "calls = []\ndef late(episode):\n    calls.append(1)\n"
        "    if len(calls) > 4:\n        raise ValueError('out of luck')\n    return len(calls) % 2\n"
    )
    rewards = f'rl.rewards=[{{fn="{tmp_path / "late.py"}:late"}}]'
    with pytest.raises(HeadraceError) as failed:
        start(tmp_path / "runs", rewards, "rl.steps=9")
    (run,) = (tmp_path / "runs").iterdir()
    outcome = read_outcome(RunFolder(path=run).outcome)
    assert outcome is not None
    assert outcome.state == "failed"
    assert outcome.reason == str(failed.value)
    assert outcome.seconds > 0
    assert "out of luck" in (run / "log.txt").read_text()


def test_a_run_that_ends_says_so(tmp_path: Path) -> None:
    result = start(tmp_path / "runs")
    outcome = read_outcome(RunFolder(path=result.folder).outcome)
    assert outcome is not None
    assert (outcome.state, outcome.reason) == ("finished", "")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(['sft={steps=1, sources=[{type="jsonl", path="rows.jsonl"}]}'], id="a row of a data file"),
        pytest.param(['rl.rewards=[{fn="broken.py:judge"}]'], id="a reward that cannot be imported"),
        pytest.param(['rl.rewards=[{fn="exits.py:judge"}]'], id="a reward that ends the process at its import"),
        pytest.param(['model.path="weights"'], id="weights that cannot be read"),
        pytest.param(['rl.tasks={type="jsonl", path="long.jsonl"}'], id="no prompt that is short enough"),
        pytest.param(['rl.rewards=[{fn="raises.py:judge"}]'], id="episodes that cannot be judged"),
        pytest.param(['rl.rewards=[{fn="raises.py:judge"}]', *EVALUATED], id="the first evaluation"),
        pytest.param(
            ['rl.tasks={type="env", name="calculator", size=4, options={tools=true}}'], id="a template without tools"
        ),
    ],
)
def test_no_failed_start_leaves_a_folder(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"messages": 3}\n')
    Path("long.jsonl").write_text('{"prompt": "' + "go " * 200 + '", "answer": "1"}\\n')
    Path("broken.py").write_text("import nothing_of_that_name\n")
    Path("exits.py").write_text("raise SystemExit(3)\n")
    Path("raises.py").write_text("def judge(episode):\n    raise ValueError('no')\n")
    weights = Path("weights")
    weights.mkdir()
    (weights / "config.json").write_text("{")
    with pytest.raises((HeadraceError, SystemExit)):
        start(tmp_path / "runs", *overrides)
    assert not Path("runs").exists()


def test_neither_do_errors_that_nobody_has_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a lack of memory while the stage is opened; the traceback is on the terminal."""

    def no_memory(*arguments: object, **options: object) -> None:
        raise MemoryError("no room for the optimiser")

    monkeypatch.setattr("headrace.wiring.stage_context.LocalRuntime", no_memory)
    with pytest.raises(MemoryError):
        start(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("evaluated", [False, True])
def test_ctrl_c_before_the_first_step_leaves_no_folder(evaluated: bool, tmp_path: Path) -> None:
    judged = reward(tmp_path, "send_once(signal.SIGINT); return 0.0")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "runs", judged, "rl.steps=9", *(EVALUATED if evaluated else ()))
    assert not (tmp_path / "runs").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_before_the_first_step_leaves_a_folder_to_resume_which_no_failure_removes(tmp_path: Path) -> None:
    """A scheduler starts what ended with code 75 again with --resume."""
    judged = reward(tmp_path, "send_once(signal.SIGTERM); return 0.0")
    with pytest.raises(Interrupted, match=r"stopped on request after step 0 of 9; go on with  headrace train"):
        start(tmp_path / "runs", judged, "rl.steps=9", *EVALUATED)
    [run] = (tmp_path / "runs").iterdir()
    reward(tmp_path, "raise ValueError('out of luck')")
    with pytest.raises(HeadraceError, match=r"judge\.py"):
        start(tmp_path / "runs", judged, "rl.steps=9", *EVALUATED, resume=run)
    assert (run / "config.toml").is_file()


def test_a_file_of_somebody_else_keeps_the_folder(tmp_path: Path) -> None:
    judged = reward(tmp_path, "(run / 'notes.txt').touch(); raise ValueError('out of luck')")
    with pytest.raises(RolloutError):
        start(tmp_path / "runs", judged)
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "notes.txt").is_file()


def test_an_evaluation_that_was_made_keeps_the_folder(tmp_path: Path) -> None:
    """Its episodes and figures are worth a look, though no step was done."""
    judged = reward(tmp_path, "assert not (run / 'rollouts' / 'eval_base.jsonl').exists(); return 0.0")
    with pytest.raises(RolloutError):
        start(tmp_path / "runs", judged, *EVALUATED)
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "rollouts" / "eval_base.jsonl").is_file()
