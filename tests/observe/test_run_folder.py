import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, RunFolderError
from headrace.observe.json_lines import json_line, write_whole
from headrace.observe.run_folder import RunFolder, environment_facts, find_latest

NOON = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)


def test_a_run_folder_is_named_after_the_run_and_the_utc_time(tmp_path: Path) -> None:
    in_berlin = NOON.astimezone(timezone(timedelta(hours=1)))
    folder = RunFolder.create(tmp_path / "runs", "demo", in_berlin)
    assert folder.path == tmp_path / "runs" / "demo_2026-03-01T12-00-05Z"
    assert folder.step_rollouts(12) == folder.path / "rollouts" / "step_000012.jsonl"
    assert folder.eval_rollouts("sft") == folder.path / "rollouts" / "eval_sft.jsonl"
    assert folder.rollouts.is_dir()
    assert folder.checkpoints.is_dir()


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "demo", NOON)
    (first.path / "mine").write_text("x")
    second = RunFolder.create(tmp_path, "demo", NOON)
    assert second.path.name == "demo_2026-03-01T12-00-05Z_2"
    assert not (second.path / "mine").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunFolder.create(tmp_path, name, NOON)
    assert list(tmp_path.iterdir()) == []


def test_latest_is_by_time_then_count_and_of_exactly_that_name(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "none", "demo") is None
    assert find_latest(tmp_path, "demo") is None
    for name, now in [("demo", NOON - timedelta(days=1))] + [("demo", NOON)] * 11 + [("demo_x", NOON + timedelta(1))]:
        RunFolder.create(tmp_path, name, now).write_config("")
    RunFolder.create(tmp_path, "demo", NOON + timedelta(days=2))  # died before it had a configuration
    latest = find_latest(tmp_path, "demo")
    assert latest is not None
    assert latest.path.name == "demo_2026-03-01T12-00-05Z_11"


def test_a_clock_that_was_set_back_changes_no_order(tmp_path: Path) -> None:
    """A resume goes on with the run that was started last, not with the one whose clock was ahead."""
    moments = [timedelta(0), -timedelta(days=900), -timedelta(hours=1), timedelta(0), timedelta(seconds=1)]
    runs = [RunFolder.create(tmp_path, "demo", NOON + moment) for moment in moments]
    assert [run.path.name.removeprefix("demo_2026-03-01T12-00-0") for run in runs] == [
        "5Z",
        "5Z_2",
        "5Z_3",
        "5Z_4",
        "6Z",
    ]
    for run in runs:
        run.write_config("")
        run.metrics.write_text("{}\n")
        assert find_latest(tmp_path, "demo") == run
    shutil.rmtree(runs[-1].path)
    shutil.rmtree(runs[0].path)
    assert RunFolder.create(tmp_path, "demo", NOON).path.name.endswith("5Z_5"), "not the name that became free"


def test_a_run_that_failed_before_its_first_step_does_not_hide_one_to_resume(tmp_path: Path) -> None:
    def made(hours: int) -> RunFolder:
        folder = RunFolder.create(tmp_path, "demo", NOON + timedelta(hours=hours))
        folder.write_config("")
        return folder

    kept, logged, _, last = made(0), made(1), made(2), made(3)
    last.metrics.touch()  # opened, and nothing written
    (last.checkpoints / "rl" / "step_000001.tmp").mkdir(parents=True)
    assert find_latest(tmp_path, "demo") == last, "none has anything to resume"
    (kept.checkpoints / "sft" / "step_000002").mkdir(parents=True)
    assert find_latest(tmp_path, "demo") == kept
    logged.metrics.write_text("{}\n")
    assert find_latest(tmp_path, "demo") == logged


def test_a_finished_run_does_not_hide_a_newer_one_that_was_killed_in_its_first_step(tmp_path: Path) -> None:
    config = "[sft]\nsteps = 9\n[rl]\nsteps = 3\n"
    old, done, new = (RunFolder.create(tmp_path, "demo", NOON + timedelta(hours=hours)) for hours in range(3))
    for run in (old, done, new):
        run.write_config(config)
    (old.checkpoints / "rl" / "step_000002").mkdir(parents=True)
    (done.checkpoints / "rl" / "step_000002").mkdir(parents=True)
    assert find_latest(tmp_path, "demo") == done, "it has a step left"
    (done.checkpoints / "rl" / "step_000003").mkdir(parents=True)
    assert find_latest(tmp_path, "demo") == new
    shutil.rmtree(new.path)
    assert find_latest(tmp_path, "demo") == done, "an older one would be another run than the user thinks of"


def test_open_wants_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no config\.toml"):
        RunFolder.open(tmp_path)
    RunFolder(path=tmp_path).write_config("[run]\n")
    assert RunFolder.open(tmp_path).config.read_text() == "[run]\n"


def test_environment_names_versions_command_and_git_revision(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    facts = environment_facts(argv=["headrace", "demo"], cwd=tmp_path)
    assert facts["git"] == {"revision": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "new").write_text("x")
    facts = environment_facts(argv=["headrace", "demo"], cwd=tmp_path)
    assert facts["git"] == {"revision": git("rev-parse", "HEAD"), "modified": True}
    assert facts["argv"] == ["headrace", "demo"]
    packages = facts["packages"]
    assert isinstance(packages, dict)
    assert {"torch", "transformers"} <= packages.keys()


def test_no_git_repository_is_no_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment_facts(argv=[], cwd=tmp_path)["git"] is None


def test_environment_is_written_as_json(tmp_path: Path) -> None:
    RunFolder(path=tmp_path).write_environment()
    assert json.loads((tmp_path / "environment.json").read_text())["packages"]["torch"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match=r"cannot write .*config\.toml.*No space left"):
            write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_half_a_surrogate_pair_can_be_written_and_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", json_line({"cut": "no \ud83d", "key \udc00": 1, "whole": "\U0001f600"}))
    read = json.loads((tmp_path / "file").read_text(encoding="utf-8"))
    assert read == {"cut": "no \ufffd", "key \ufffd": 1, "whole": "\U0001f600"}


def test_json_lines_are_strict_json() -> None:
    line = json_line({"b": [float("nan"), float("inf")], "a": {"c": float("-inf")}, "d": 0.1}, sort_keys=True)
    assert line == '{"a":{"c":"-Infinity"},"b":["NaN","Infinity"],"d":0.1}\n'


def test_two_resumes_that_look_at_a_folder_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, touch, entered = RunFolder(path=tmp_path), Path.touch, list[int]()

    def touch_and_let_the_other_look(path: Path, *args: Any, **kwargs: Any) -> None:
        touch(path, *args, **kwargs)
        if not entered:
            entered.append(1)
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", lambda: 1)
                folder.check_access()

    monkeypatch.setattr(Path, "touch", touch_and_let_the_other_look)
    folder.check_access()
    assert entered
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "rollouts"]
