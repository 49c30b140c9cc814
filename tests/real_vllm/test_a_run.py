"""Whole runs that start vLLM themselves: one of two servers is killed, and the run is killed.

The file goes first by its name: the servers that the other tests share are not up yet, and memory is for these.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import alive, descendants
from support.real_vllm import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="HEADRACE_VLLM_PYTHON names no interpreter with vLLM"),
]

RUN = """
[run]
name = "t"
folder = "runs"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 64
layers = 2
heads = 2
kv_heads = 1
context = 256
[engine]
type = "vllm"
launch = {{ python = "{python}", replicas = {replicas} }}
[rl]
steps = {steps}
groups = 2
group_size = 4
max_turns = 3
max_prompt_tokens = 96
max_episode_tokens = 192
tasks = {{ type = "env", name = "key_door", size = 9, seed = 1 }}
[rl.sampling]
max_tokens = 8
[rl.optimizer]
learning_rate = 1e-2
"""


def start_run(folder: Path, *, replicas: int, steps: int) -> "subprocess.Popen[bytes]":
    (folder / "run.toml").write_text(RUN.format(python=PYTHON, replicas=replicas, steps=steps))
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.start", "train", "run.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "out.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )


def wait_for_steps(folder: Path, run: "subprocess.Popen[bytes]", count: int) -> None:
    end = time.monotonic() + 900
    while time.monotonic() < end:
        lines = [line for file in folder.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
        if any(json.loads(line)["step"] >= count for line in lines if line.endswith("}")):
            return
        assert run.poll() is None, (folder / "out.txt").read_text()[-3000:]
        time.sleep(0.2)
    raise AssertionError((folder / "out.txt").read_text()[-3000:])


def test_a_run_survives_the_death_of_one_of_its_servers(tmp_path: Path) -> None:
    run = start_run(tmp_path, replicas=2, steps=12)
    try:
        wait_for_steps(tmp_path, run, 2)
        processes = descendants(run.pid)
        api = [pid for pid in processes if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        api = [pid for pid in api if b"guardian" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(api[0], signal.SIGKILL)
        assert run.wait(900) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    finally:
        run.kill()
    text = (tmp_path / "out.txt").read_text()
    assert "is taken out, 1 are left" in text
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    mismatches = [value for record in records for name, value in _values(record) if name == "rollout/mismatch_k3"]
    assert len(mismatches) == 12
    assert max(mismatches) < 1e-8
    assert not any(alive(pid) for pid in processes)


def _values(record: dict[str, object]) -> list[tuple[str, float]]:
    values = record.get("values", record)
    assert isinstance(values, dict)
    return list(values.items())


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    run = start_run(tmp_path, replicas=1, steps=1000)
    try:
        wait_for_steps(tmp_path, run, 1)
        processes = descendants(run.pid)
        assert len(processes) >= 4  # guardian, API, engine core, worker
        weights = list(Path("/dev/shm").glob(f"headrace-weights-{run.pid}-*"))
        assert weights
    finally:
        run.kill()
        run.wait(60)
    end = time.monotonic() + 60
    while any(alive(pid) for pid in processes) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in processes)
    assert not any(folder.exists() for folder in weights)
