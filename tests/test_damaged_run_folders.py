"""Commands that read run folders, on damaged ones: each succeeds or ends with one sentence, never with a traceback."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli import app
from headrace.errors import HeadraceError
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import JsonlSink
from headrace.train.checkpoint import CheckpointStore
from headrace.types import CreditedEpisode
from support.made_up_run import made_up_episode
from support.ordinary_user import ordinary_user

CONFIG = """
[run]
name = "t"
[rl]
steps = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "env", name = "add", size = 2 }
rewards = [{ fn = "exact_match" }]
sampling.max_tokens = 4
[eval]
tasks = 1
source = { type = "env", name = "add", size = 2 }
"""
FILES = ("config.toml", "environment.json", "inputs.json", "metrics.jsonl", "rollouts/step_000002.jsonl")
FOLDERS = ("rollouts", "checkpoints")
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "manifest.json",
    "state.json",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunFolder.create(tmp_path_factory.mktemp("runs"), "t", datetime(2026, 1, 1, tzinfo=UTC))
    run.write_config(CONFIG)
    run.write_environment()
    run.inputs.write_text('{"run_folder": "/gone", "keys": {}}')
    sink = JsonlSink(run.metrics, stage="rl")
    for step in range(3):
        sink.log(step, {"reward/mean": 0.25 * step, "eval/pass@1": 0.5, "time/train_s": 1.0})
    sink.close()
    for step in (1, 2):
        scored = [made_up_episode(f"mill-{k}", success=k > 0, actions=["north", "east"]) for k in range(2)]
        save_trajectories(
            run.step_rollouts(step),
            [CreditedEpisode(scored=episode, group_id=0, advantages=(0.5, -0.5)) for episode in scored],
        )
    save_trajectories(run.eval_rollouts("rl"), scored, lean=True)

    def write(folder: Path) -> None:
        words = (*"0123456789", "+", "=")
        save_tiny(folder, words=words, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)

    CheckpointStore(run.checkpoints / "rl", keep_last=1).save(2, write, {"metrics_records": 3})
    return run.path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that makes a fresh copy of the run folder, in which an ordinary user may write."""

    def make() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "other").mkdir(exist_ok=True)  # to be compared with
        (tmp_path / "other" / "config.toml").write_text("[run]\nname = 'other'\n")
        run = Path(shutil.copytree(sound, tmp_path / "run"))
        for folder in (run, *(path for path in run.rglob("*") if path.is_dir())):
            folder.chmod(0o777)
        return run

    return make


def ends_well(*arguments: object) -> str:
    """Run a command in this process; return its sentence, or "" if it succeeded. Any other exception is a failure."""
    try:
        app([str(argument) for argument in arguments], standalone_mode=False)
    except HeadraceError as exc:
        return str(exc)
    return ""


def read(run: Path, *, sound: bool = False) -> None:
    """Run the commands that only read a run folder."""
    commands = [
        ("report", run),
        ("view", run),
        ("view", run, "--group", "--task", "mill-0", "--html", run / "page.html"),
        ("recredit", run, "--reward", "env", "--credit", "grpo"),
        ("compare", run, run.parent / "other", "--html", run / "compare.html"),
    ]
    for command in commands:
        sentence = ends_well(*command)
        assert not (sentence and sound), sentence


def test_a_sound_run_folder_is_read(copy: Callable[[], Path], tmp_path: Path) -> None:
    run = copy()
    read(run, sound=True)
    assert "Left out" not in (run / "report.html").read_text()
    (tmp_path / "run.toml").write_text(CONFIG)
    checkpoint = run / "checkpoints" / "rl" / "step_000002"
    assert ends_well("eval", checkpoint, tmp_path / "run.toml", "--out", tmp_path / "evaluated") == ""


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("damage", ["missing", "empty", "folder", "unreadable"])
def test_a_file_that_is_gone_or_no_file_is_one_sentence(copy: Callable[[], Path], name: str, damage: str) -> None:
    run = copy()
    place = run / name
    if damage == "unreadable":
        place.chmod(0)
        with ordinary_user(run):
            read(run)
        place.chmod(0o777)
        return
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    if damage == "folder" and name in FOLDERS:
        place.write_text("a file")
    elif damage == "folder":
        place.mkdir()
    elif damage == "empty":
        place.mkdir() if name in FOLDERS else place.touch()
    read(run)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    name=st.sampled_from(FILES),
    at=st.floats(0, 1),
    removed=st.integers(0, 200) | st.just(10**6),
    added=st.binary(max_size=12) | st.sampled_from([b"[]\n", b"{}\n", b"null", b'"', b"1e999", b"\n\n", b"\xff\xfe"]),
)
def test_bytes_that_were_removed_or_added_anywhere_are_no_traceback(
    copy: Callable[[], Path], name: str, at: float, removed: int, added: bytes
) -> None:
    run = copy()
    content = (run / name).read_bytes()
    start = int(at * len(content))
    (run / name).write_bytes(content[:start] + added + content[start + removed :])
    read(run)


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "folder"])
@pytest.mark.parametrize("listed", [True, False], ids=["checkpoint", "model folder"])
def test_a_damaged_checkpoint_is_one_sentence_in_eval(
    copy: Callable[[], Path], tmp_path: Path, name: str, damage: str, listed: bool
) -> None:
    checkpoint = copy() / "checkpoints" / "rl" / "step_000002"
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    if not listed:
        (checkpoint / "manifest.json").unlink()
    place = checkpoint / name
    place.unlink(missing_ok=True)
    if damage == "folder":
        place.mkdir()
    elif damage != "missing":
        place.write_bytes(b"" if damage == "empty" else b'\x00{"a": [')
    sentence = ends_well("eval", checkpoint, file, "--out", tmp_path / "evaluated")
    harmless = name in ("manifest.json", "state.json", "tokenizer_config.json")  # without them it is a model folder
    assert sentence or harmless
