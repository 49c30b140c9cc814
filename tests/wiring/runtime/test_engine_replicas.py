"""Runs that sample in engine processes: the same weights as in one process, also when one of them is killed."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace import wiring
from headrace.errors import ConfigError
from headrace.wiring.checked_config import load_checked
from headrace.wiring.runtime import engine_replicas
from support.engine_replicas import ThreadedEngine
from support.processes import alive, descendants

RUN = """
[run]
name = "t"
folder = "runs"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
max_num_seqs = 8
[rl]
steps = 2
groups = 2
group_size = 3
max_turns = 3
max_prompt_tokens = 96
max_episode_tokens = 192
tasks = { type = "env", name = "key_door", size = 5, seed = 2 }
rewards = [{ fn = "reward.py:score" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
[eval]
source = { type = "env", name = "key_door", size = 4, seed = 9 }
tasks = 2
"""
REWARD = """
def score(episode):
    tokens = [int(token) for step in episode.steps for token in step.completion.tokens]
    return sum(token * (place + 1) for place, token in enumerate(tokens)) % 97 / 97
"""
LORA = "model.lora.rank=2"
REPLICAS = "cluster.engine_replicas=2"


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, resume: Path | None = None) -> Path:
    """Run to the end; return the run folder."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(RUN)
    (folder / "reward.py").write_text(REWARD)
    config = load_checked(folder / "run.toml", list(overrides), command="train")
    wiring.train(config, config_text_path=folder / "run.toml", resume=resume)
    (run,) = folder.glob("runs/*")
    return run


def weights_of(run: Path, step: int = 2) -> dict[str, bytes]:
    """The bytes of everything that was trained: weights and the optimiser's state."""
    files = sorted((run / "checkpoints" / "rl" / f"step_{step:06d}").glob("*.safetensors"))
    assert files
    return {
        f"{file.name}/{name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_a_run_with_replicas_trains_the_weights_of_the_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setattr(engine_replicas, "EngineProcess", ThreadedEngine)
    alone = train(tmp_path / "alone", monkeypatch, *overrides)
    together = train(tmp_path / "together", monkeypatch, REPLICAS, *overrides)
    assert weights_of(alone) == weights_of(together)
    start = load_file(next((alone / "start").glob("*.safetensors")))
    end = load_file(alone / "checkpoints" / "rl" / "step_000002" / "model.safetensors")
    assert any(not start[name].equal(end[name]) for name in end), "something was trained"


@pytest.mark.slow
def test_a_resumed_run_may_have_other_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replicas, "EngineProcess", ThreadedEngine)
    every = ("checkpoint.every=1", "checkpoint.keep_last=9")
    alone = train(tmp_path / "alone", monkeypatch, "rl.steps=3", *every)
    resumed = train(tmp_path / "resumed", monkeypatch, "rl.steps=3", "cluster.engine_replicas=1", *every)
    for name in ("step_000002", "step_000003"):
        for file in sorted((resumed / "checkpoints" / "rl" / name).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (resumed / "checkpoints" / "rl" / name).rmdir()
    train(tmp_path / "resumed", monkeypatch, "rl.steps=3", REPLICAS, *every, resume=resumed)
    assert weights_of(alone, 3) == weights_of(resumed, 3)


@pytest.mark.parametrize("interrupt", ["abort", "inflight", pytest.param("drain", marks=pytest.mark.slow)])
def test_interrupts_of_asynchronous_training_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: str
) -> None:
    monkeypatch.setattr(engine_replicas, "EngineProcess", ThreadedEngine)
    options = ("rl.async.max_staleness=1", f"rl.async.interrupt={interrupt}", "rl.steps=3", "eval.tasks=1")
    run = train(tmp_path, monkeypatch, REPLICAS, *options)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mismatches = [record["rollout/mismatch_k3"] for record in records if "rollout/mismatch_k3" in record]
    assert mismatches
    # tokens after an update follow keys and values of the weights before it, if these are kept
    assert max(mismatches) < (0.1 if interrupt == "inflight" else 1e-6)


def test_replicas_need_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "reward.py").write_text(REWARD)
    config = load_checked(tmp_path / "run.toml", [REPLICAS], command="train")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert engine_replicas.replica_gpus(config, "cuda") == ("5", "7")
    assert engine_replicas.replica_gpus(config, "cpu") is None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="training takes 1 of the 2 GPUs"):
        engine_replicas.replica_gpus(config, "cuda")


def hosts() -> list[int]:
    """The engine processes of this one that are alive; other tests may have left other processes."""
    found = []
    for pid in filter(alive, descendants(os.getpid())):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if b"host_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_replica_that_is_killed_is_started_again_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes of their own; one is killed while it samples. It comes back with the version of then."""
    alone = train(tmp_path / "alone", monkeypatch, "rl.steps=12")
    killed: list[int] = []
    ended = threading.Event()

    def kill_one() -> None:
        metrics = tmp_path / "together" / "runs"
        while not ended.is_set() and not any(len(file.read_bytes()) for file in metrics.glob("*/metrics.jsonl")):
            time.sleep(0.05)
        first = hosts()[0]
        os.kill(first, signal.SIGKILL)
        killed.append(first)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        with caplog.at_level(logging.INFO):
            together = train(tmp_path / "together", monkeypatch, REPLICAS, "rl.steps=12")
    finally:
        ended.set()
        killer.join()
    assert killed
    assert "is taken out, 1 are left" in caplog.text
    assert weights_of(alone, 12) == weights_of(together, 12)
    assert not hosts(), "no engine process is left"


@pytest.mark.slow
def test_ranks_sample_in_replicas_too(tmp_path: Path) -> None:
    """Training on two ranks; what it trains does not depend on who samples."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "reward.py").write_text(REWARD)
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    runs = []
    for count in (0, 1):
        options = [f"cluster.engine_replicas={count}", f"run.folder=runs_{count}", "cluster.ranks=2"]
        command = [sys.executable, "-m", "headrace.cli", "train", "run.toml"]
        command += [part for option in options for part in ("--set", option)]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            timeout=600,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        runs.append(next((tmp_path / f"runs_{count}").iterdir()))
    assert (runs[1] / "servers" / "engine_0.log").is_file()
    files = [run / "checkpoints" / "rl" / "step_000002" / "model.safetensors" for run in runs]
    assert files[0].read_bytes() == files[1].read_bytes()
