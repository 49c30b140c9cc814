"""Whole runs on several ranks: started here or by torchrun, killed, resumed, and refused when they cannot work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.wiring.runtime import ranks as ranks_runtime

CONFIG = """
[run]
name = "ranks"
tensorboard = false

[model]
path = "tiny"
tiny = { width = 32, layers = 2, heads = 2, kv_heads = 1, context = 512 }

[engine]
max_num_seqs = 8

[sft]
steps = 2
batch_size = 4
max_tokens = 480
sources = [{ type = "env", name = "key_door", size = 50, seed = 1 }]

[rl]
steps = 3
groups = 2
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 300
credit = "token_gae"
loss = "own.py:loss + reference_kl_k3"
tasks = { type = "env", name = "key_door", size = 50, seed = 2 }
sampling = { max_tokens = 4 }
loss_params = { kl_coef = 0.1 }

[rl.critic]
trunk = "own"

[checkpoint]
every = 1
keep_last = 9

[cluster]
ranks = 2
deadline_s = 200
"""
OWN_LOSS = """
from headrace.algo.loss_signature import LossOut

def loss(policy_logprobs_T, sampler_logprobs_T, advantages_T, weights_T):
    ratio = (policy_logprobs_T - sampler_logprobs_T).exp()
    return LossOut(loss=-(weights_T * ratio * advantages_T).sum(), metrics={})
"""
LIMIT_S = 300


def config_file(folder: Path, text: str = CONFIG) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    (folder / "own.py").write_text(OWN_LOSS)
    return file


def start(file: Path, *more: str, launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [sys.executable, *launcher, "-m", "headrace.cli", "train", str(file), *more]
    return subprocess.Popen(
        command, cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def weights(folder: Path, stage: str, step: int, part: str = ".") -> bytes:
    return (run_folder(folder) / "checkpoints" / stage / f"step_{step:06d}" / part / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_run_whose_rank_was_killed_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    finished = start(config_file(whole))
    text, _ = finished.communicate(timeout=LIMIT_S)
    assert finished.returncode == 0, text

    killed = start(config_file(broken))
    end = time.monotonic() + LIMIT_S
    while not list((broken / "runs").glob("*/checkpoints/rl/step_000001/manifest.json")):
        assert time.monotonic() < end
        assert killed.poll() is None
        time.sleep(0.02)
    (rank,) = children(killed.pid)
    os.kill(rank, signal.SIGKILL)
    text, _ = killed.communicate(timeout=LIMIT_S)
    assert killed.returncode == 75, text
    assert not Path(f"/proc/{rank}").exists()
    told = [line for line in text.splitlines() if line.startswith("headrace:")]
    assert len(told) == 1
    assert "rank 1 was killed (SIGKILL)" in told[0]
    assert "--resume" in told[0]
    assert "Traceback" not in text

    resumed = start(config_file(broken), "--resume")
    text, _ = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, text
    for part in (".", "critic"):
        assert weights(broken, "rl", 3, part) == weights(whole, "rl", 3, part)

    in_one_process = start(config_file(whole), "--resume", "--set", "cluster.ranks=1")
    text, _ = in_one_process.communicate(timeout=LIMIT_S)
    assert in_one_process.returncode == 0, text
    assert "finished already" in text


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_ranks_of_torchrun_are_recognised(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    process = start(config_file(tmp_path, CONFIG.partition("[rl]")[0] + "[cluster]\nranks = 2\n"), launcher=launcher)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    assert len(weights(tmp_path, "sft", 2)) > 0
    state = (run_folder(tmp_path) / "checkpoints" / "sft" / "step_000002" / "trainer.json").read_text()
    assert '"ranks": 2' in state


def config_of(**model: Any) -> Any:
    return load_config(f'[cluster]\nranks = 2\n[model]\ndevice = "{model.get("device", "cpu")}"\n', file="run.toml")


def test_another_number_of_ranks_than_the_launcher_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"has started 4 ranks and 'cluster.ranks' is 2"):
        ranks_runtime.find_place(config_of())
    with pytest.raises(ConfigError, match=r"has started 4 ranks and 'cluster.ranks' is 1"):
        ranks_runtime.find_place(load_config("", file="run.toml"))


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks_runtime, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"'cluster.ranks' is 2 and this machine has 1 GPUs"):
        ranks_runtime.find_place(config_of())


def test_the_same_bits_on_several_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    config = load_config("[cluster]\nranks = 2\n[run]\ndeterministic = true\n", file="run.toml")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks_runtime.find_place(config) is None  # on a CPU they are the same anyway
    monkeypatch.setattr(ranks_runtime, "choose_device", lambda device: "cuda")
    with pytest.raises(ConfigError, match=r"'run.deterministic' is true and 'cluster.ranks' is 2"):
        ranks_runtime.find_place(config)
