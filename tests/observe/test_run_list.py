"""`headrace runs`: where runs stand and how they ended, of any version and however damaged."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.errors import RunFolderError
from headrace.observe.outcome import write_outcome
from headrace.observe.run_folder import RunFolder, start_of
from headrace.observe.run_list import as_json, describe_run, find_run_folders, table
from headrace.storage.folder_lock import hold_folder

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CONFIG = '[run]\nname = "t"\n[sft]\nsteps = 2\n[rl]\nsteps = 4\n'
METRICS = [
    {"stage": "sft", "step": 2, "loss/total": 0.5, "eval/pass@1": 0.25},
    {"stage": "rl", "step": 1, "reward/mean": 0.125},
    {"stage": "rl", "step": 3, "reward/mean": 0.75, "eval/pass@1": 0.5},
]


def made(root: Path, name: str = "t", *, metrics: bool = True) -> RunFolder:
    run = RunFolder.create(root, name, NOON)
    run.write_config(CONFIG)
    if metrics:
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in METRICS))
        os.utime(run.metrics, (NOON.timestamp() + 90, NOON.timestamp() + 90))
    return run


def finish(run: RunFolder) -> None:
    (run.checkpoints / "rl" / "step_000004").mkdir(parents=True)


def test_a_run_is_described_by_its_last_step_and_figures(tmp_path: Path) -> None:
    run = made(tmp_path)
    write_outcome(run.outcome, "failed", seconds=83, reason="the disk is full")
    listed = describe_run(run.path)
    assert (listed.name, listed.state, listed.reason) == ("t", "failed", "the disk is full")
    assert (listed.stage, listed.step, listed.steps) == ("rl", 3, 4)
    assert listed.figures == {"reward/mean": 0.75, "eval/pass@1": 0.5}
    assert listed.started == "2026-01-01T12:00:00+00:00"
    assert listed.seconds == 83
    head, row, why = table([listed]).splitlines()
    assert head.split() == ["RUN", "STAGE", "STEP", "STATE", "FIGURES", "STARTED", "TOOK"]
    assert row == (
        "t_2026-01-01T12-00-00Z  rl     3/4   failed  reward 0.75, held-out success 50.0%  2026-01-01 12:00  1m 23s"
    )
    assert why == "t_2026-01-01T12-00-00Z failed: the disk is full"


def test_a_folder_of_an_older_version_has_no_outcome(tmp_path: Path) -> None:
    run = made(tmp_path)
    listed = describe_run(run.path)
    assert (listed.state, listed.seconds, listed.problems) == ("stopped", 90.0, ())
    finish(run)
    assert describe_run(run.path).state == "finished"


def test_a_run_that_is_held_says_by_whom_and_one_whose_holder_is_gone_was_killed(tmp_path: Path) -> None:
    run = made(tmp_path)
    write_outcome(run.outcome, "stopped", seconds=5, reason="stopped on request")
    with hold_folder(run.path):
        write_outcome(run.outcome, "started", seconds=5)
        listed = describe_run(run.path)
        assert listed.state == "running"
        assert f"process {os.getpid()} on " in str(listed.by)
        assert "is held by process" in table([listed])
        assert listed.seconds is not None
        assert listed.seconds >= 5
    assert describe_run(run.path).state == "killed", "it let go of the lock and did not say how it ended"
    kill = f"import os; from pathlib import Path; from headrace.storage.folder_lock import hold_folder\n\
with hold_folder(Path({str(run.path)!r})): os._exit(9)"
    run.outcome.unlink()
    assert subprocess.run([sys.executable, "-c", kill], check=False).returncode == 9
    assert describe_run(run.path).state == "killed"
    assert describe_run(run.path).by is None


def test_damaged_folders_are_listed_and_said_to_be_so(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.config.write_text("[[")
    run.metrics.write_text(json.dumps(METRICS[1]) + "\n{\n[]\n")
    run.outcome.write_text("{}")
    listed = describe_run(run.path)
    assert (listed.stage, listed.step, listed.steps) == ("rl", 1, None)
    assert [Path(problem.split()[0]).name for problem in listed.problems] == ["config.toml", "2", "outcome.json"]
    assert table([listed]).count("is damaged: ") == 3
    gone = made(tmp_path, "gone", metrics=False)
    gone.config.unlink()
    assert find_run_folders([tmp_path]) == [gone.path, run.path]
    listed = describe_run(gone.path)
    assert (listed.state, listed.stage, listed.name) == ("unknown", None, gone.path.name)
    assert "config.toml cannot be read" in listed.problems[0]


def test_runs_are_found_in_folders_and_by_name(tmp_path: Path) -> None:
    one = made(tmp_path / "a", "one")
    two = made(tmp_path / "b", "two")
    (tmp_path / "a" / "notes").mkdir()
    assert find_run_folders([tmp_path / "b", tmp_path / "a", two.path]) == [one.path, two.path]
    with pytest.raises(RunFolderError, match=r"there is no folder .*nowhere: give run folders"):
        find_run_folders([tmp_path / "nowhere"])
    assert start_of(tmp_path / "one_2026-02-31T00-00-00Z") is None


def test_json_has_every_field_and_no_number_that_json_lacks(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.metrics.write_text('{"stage":"rl","step":1,"reward/mean":"NaN"}\n')
    [listed] = json.loads(as_json([describe_run(run.path)]))
    assert listed["figures"] == {"reward/mean": "nan"}
    assert listed["folder"] == str(run.path)
    assert listed["problems"] == []


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    run = made(tmp_path)
    command = [sys.executable, "-m", "headrace.cli", "runs", str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[1].startswith(f"{run.path.name}  rl     3/4   stopped")
    said = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout
    assert json.loads(said)[0]["state"] == "stopped"
    missing = subprocess.run([*command[:-1], str(tmp_path / "no")], check=False, capture_output=True, text=True)
    assert missing.returncode == 1
    assert "there is no folder" in missing.stderr
