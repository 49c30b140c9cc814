"""`headrace sweep` as jobs of a real Ray: stopped and started again, it waits for the jobs that it has submitted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.ray_runs import CONFIG, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
FAILS = "\n\ndef fails(episode):\n    raise ValueError('out of luck')\n"


def sweep(folder: Path, address: str, *arguments: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "headrace.cli", "sweep", "run.toml", "--set", f"cluster.address={address}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*program, "--set", "cluster.rollout_workers=1", *arguments],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def entries(folder: Path) -> dict[str, Any]:
    manifest = folder / "runs" / "t_sweep" / "sweep.json"
    runs: dict[str, Any] = json.loads(manifest.read_text())["runs"] if manifest.exists() else {}
    return runs


def test_a_sweep_runs_as_jobs_and_is_waited_for_again(
    job_server: Any, alone: Callable[..., Path], files: Path, tmp_path: Path
) -> None:
    from ray.job_submission import JobSubmissionClient

    (tmp_path / "run.toml").write_text(CONFIG.format(files=files, steps=STEPS))
    over = ("--over", "run.seed=0..1")
    first = sweep(tmp_path, job_server.address, *over)
    while first.poll() is None and not (
        len(entries(tmp_path)) == 2 and all(entry["job"] for entry in entries(tmp_path).values())
    ):
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)[0]
    assert first.returncode in (75, 130), said
    second = sweep(tmp_path, job_server.address, *over)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said
    client = JobSubmissionClient(job_server.url)
    jobs = [job for job in client.list_jobs() if job.submission_id is not None]
    assert len(jobs) == 2, "the second command has submitted nothing"
    assert {job.status.value for job in jobs} == {"SUCCEEDED"}
    assert {entry["status"] for entry in entries(tmp_path).values()} == {"finished"}
    assert (tmp_path / "runs" / "t_sweep" / "compare.html").is_file()
    for seed in (0, 1):
        [done] = (tmp_path / "runs" / "t_sweep").glob(f"seed-{seed}_*")
        assert_same(done, alone(STEPS, f"run.seed={seed}"))


def test_a_job_that_fails_is_told_and_the_others_go_on(job_server: Any, files: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.format(files=files, steps=1))
    good = f"{files}/reward.py:score"
    (tmp_path / "bad.py").write_text(FAILS)
    bad = f"{tmp_path}/bad.py:fails"
    command = sweep(tmp_path, job_server.address, "--over", f'rl.rewards=[{{fn="{good}"}}],[{{fn="{bad}"}}]')
    said = command.communicate(timeout=600)[0]
    assert command.returncode == 1, said
    assert sorted(entry["status"] for entry in entries(tmp_path).values()) == ["failed", "finished"]
    assert "is failed" in said
    assert "Traceback" not in said


def test_an_address_without_a_job_server_is_one_sentence(files: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.dashboard.optional_deps", reason="the job client needs ray[default]", exc_type=ImportError)
    (tmp_path / "run.toml").write_text(CONFIG.format(files=files, steps=1))
    command = sweep(tmp_path, "127.0.0.1:1", "--over", "run.seed=0..1")
    said = command.communicate(timeout=600)[0]
    assert command.returncode == 2, said
    assert "the sweep cannot be submitted to cluster.address = '127.0.0.1:1'" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()
