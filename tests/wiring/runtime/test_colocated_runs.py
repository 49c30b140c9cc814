"""Trainer and servers in turns: whole runs with a fake that answers as vLLM does, and each hand-over by itself."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace import wiring
from headrace.errors import ConfigError, HeadraceError, SamplerError
from headrace.infer.servers.colocation import VllmMemory
from headrace.infer.servers.replicas import ReplicaSampler
from headrace.model.memory import ModelDims, choose_placement
from headrace.train.torch_backend import TorchBackend
from headrace.types import SampleRequest, SamplingParams, int_array
from headrace.wiring.build import servers
from headrace.wiring.checked_config import load_checked
from headrace.wiring.runtime import colocated
from headrace.wiring.runtime.colocated import GpuTurns, engine_share
from support.fake_vllm import FakeVllm, fake_vllm
from support.implementations import tiny_model
from support.paths import ROOT
from support.server_samplers import QUICK, Fleet, open_fleet

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
type = "vllm"
urls = []
[rl]
steps = 2
groups = 1
group_size = 3
max_turns = 1
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
every = 1
[checkpoint]
every = 1
keep_last = 9
"""
REWARD = """
def score(episode):
    return sum(int(token) * (place + 1) for place, token in enumerate(episode.steps[0].completion.tokens)) % 97 / 97
"""
SFT = """
[sft]
steps = 2
batch_size = 2
max_tokens = 200
sources = [{ type = "env", name = "key_door", size = 9, seed = 1 }]
"""
COLOCATE = "cluster.colocate=true"


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str], *overrides: str, more: str = "") -> Path:
    """Run to the end; return the run folder."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(RUN.replace("urls = []", f"urls = {json.dumps(urls)}") + more)
    (folder / "reward.py").write_text(REWARD)
    config = load_checked(folder / "run.toml", list(overrides), command="train")
    wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    (run,) = folder.glob("runs/*")
    return run


def trained(run: Path, step: int) -> dict[str, bytes]:
    files = sorted((run / "checkpoints" / "rl" / f"step_{step:06d}").glob("*.safetensors"))
    assert len(files) > 1
    return {
        f"{file.name}/{name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()
    }


def watched(monkeypatch: pytest.MonkeyPatch, state: FakeVllm) -> list[str]:
    """Record what trainer and server do, and whether the other one is out of the way."""
    seen: list[str] = []
    real_step, real_generate, real_close = TorchBackend._step, state.generate, TorchBackend.close
    backends: list[TorchBackend] = []

    def step(self: TorchBackend, update: Any) -> Any:
        backends[:] = [self]
        assert state.asleep == {"weights", "kv_cache"}, "the server sleeps while the trainer trains"
        seen.append("update")
        return real_step(self, update)

    def close(self: TorchBackend) -> None:
        backends.clear()
        real_close(self)

    async def generate(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if backends:
            assert backends[0]._optimizer.is_offloaded, "moments are in host memory while the server samples"
            seen.append("sample")
        async for choice in real_generate(body):
            yield choice

    monkeypatch.setattr(TorchBackend, "_step", step)
    monkeypatch.setattr(TorchBackend, "close", close)
    state.generate = generate  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("overrides", "level"),
    [((), 2), (("rl.sync_every=2", "rl.steps=4", "eval.every=2", "checkpoint.every=2"), 1)],
    ids=["every step", "every second step"],
)
def test_a_run_in_turns_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], level: int
) -> None:
    steps = 4 if overrides else 2
    with fake_vllm() as (url, _):
        alone = train(tmp_path / "alone", monkeypatch, [url], *overrides)
    with fake_vllm() as (url, state):
        seen = watched(monkeypatch, state)
        together = train(tmp_path / "together", monkeypatch, [url], COLOCATE, *overrides)
    assert trained(alone, steps) == trained(together, steps)
    assert not state.misuses
    turns = [route for route in state.log if route.startswith(("/sleep", "/wake_up"))]
    one = [f"/sleep?level={level}&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert turns == one * steps
    assert seen.count("update") == steps
    assert "sample" in seen


def train_on_ranks(folder: Path, url: str, *overrides: str) -> Path:
    """Run on two ranks, in processes of their own; return the run folder."""
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.replace("urls = []", f'urls = ["{url}"]'))
    (folder / "reward.py").write_text(REWARD)
    sets = [word for text in ("cluster.ranks=2", *overrides) for word in ("--set", text)]
    subprocess.run(
        [sys.executable, "-m", "headrace.start", "train", "run.toml", *sets],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=280,
    )
    (run,) = folder.glob("runs/*")
    return run


@pytest.mark.slow
def test_ranks_in_turns_with_servers_train_the_same_weights(tmp_path: Path) -> None:
    with fake_vllm() as (url, _):
        alone = train_on_ranks(tmp_path / "alone", url)
    with fake_vllm() as (url, state):
        together = train_on_ranks(tmp_path / "together", url, COLOCATE)
    last = Path("checkpoints") / "rl" / "step_000002"
    shards = sorted(path.relative_to(alone / last) for path in (alone / last).rglob("*.safetensors"))
    assert len(shards) >= 3
    for shard in shards:
        mine, its = load_file(together / last / shard), load_file(alone / last / shard)
        assert mine.keys() == its.keys()
        assert all(mine[name].equal(its[name]) for name in its), shard
    assert not state.misuses
    turns = [route for route in state.log if route.startswith(("/sleep", "/wake_up"))]
    assert turns == ["/sleep?level=2&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"] * 2


@pytest.mark.slow
def test_servers_sleep_in_supervised_training_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vllm() as (url, state):
        watched(monkeypatch, state)
        train(tmp_path, monkeypatch, [url], COLOCATE, more=SFT)
    assert not state.misuses


def test_a_server_that_keeps_its_memory_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ReplicaSampler", partial(ReplicaSampler, limits=QUICK))
    with fake_vllm() as (url, state):
        state.faults.never_sleeps = True
        with pytest.raises(HeadraceError, match="cannot be put to sleep"):
            train(tmp_path, monkeypatch, [url], COLOCATE)


# --- one hand-over ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_turns(
    count: int = 1, *, keep_weights: bool = False, **options: Any
) -> AsyncIterator[tuple[GpuTurns, Fleet, TorchBackend]]:
    backend = TorchBackend(tiny_model())
    async with open_fleet(count) as fleet:
        memories = [VllmMemory(replica.url) for replica in fleet.sampler.replicas]
        turns = GpuTurns(backend, fleet.sampler, memories, keep_weights=keep_weights, **options)
        await turns.to_sampling()
        yield turns, fleet, backend
    backend.close()


def request_of(max_tokens: int) -> SampleRequest:
    return SampleRequest(prompt=int_array([3, 7]), params=SamplingParams(max_tokens=max_tokens, stop_tokens=()))


async def test_a_turn_that_one_has_is_not_taken_again() -> None:
    async with open_turns(keep_weights=True) as (turns, fleet, _):
        await turns.to_sampling()
        await turns.to_training()
        await turns.to_training()
        await turns.to_sampling()
        await turns.to_sampling()
        assert len((await fleet.sampler.sample(request_of(3))).tokens) == 3
        calls = [route.partition("?")[0] for route in fleet.servers[0].log]
        assert (calls.count("/sleep"), calls.count("/wake_up")) == (1, 2)
        assert not fleet.servers[0].misuses


async def test_a_server_that_dies_in_its_sleep_is_repaired_before_it_samples() -> None:
    async with open_turns(2) as (turns, fleet, _):
        await turns.to_training()
        dead = fleet.servers[0]
        dead.faults.dead = True
        fleet.trainer.update()
        await turns.to_sampling()
        assert len(fleet.sampler.usable) == 1
        await fleet.sampler.pause(interrupt=True)
        await fleet.sampler.load(fleet.handle, 1)
        await fleet.sampler.resume()
        assert (await fleet.sampler.sample(request_of(4))).versions.tolist() == [1] * 4


async def test_servers_that_free_nothing_are_told() -> None:
    async with open_turns(free_bytes=lambda: 2**30) as (turns, _, _):
        with pytest.raises(SamplerError, match="no more free memory than before"):
            await turns.to_training()


async def test_memory_is_measured_before_the_trainer_takes_it() -> None:
    free = iter([2**30, 9 * 2**30])
    async with open_turns(free_bytes=lambda: next(free)) as (turns, _, backend):
        await turns.to_training()
        assert not backend._optimizer.is_offloaded


# --- sizes -----------------------------------------------------------------------------------------------------------

SHAPE = ModelDims(
    model_type="llama", width=4, layers=2, heads=2, kv_heads=1, head_width=2, mlp_width=8, vocabulary=10, tied=False,
    context=16, norm_sizes=(4, 4),
)  # fmt: skip


def test_a_server_gets_what_the_trainer_leaves(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("urls = []", 'urls = ["http://localhost:1"]'))
    (tmp_path / "reward.py").write_text(REWARD)
    config = load_checked(tmp_path / "run.toml", [COLOCATE], command="train")
    placement = choose_placement(device="cuda", dtype="auto", gpus=("H",), mps=False)
    # 0.92 of the memory less 1 GiB for the process; 388 parameters are next to nothing
    assert engine_share(config, SHAPE, placement, gpu_bytes=100 * 2**30) == 0.90
    with pytest.raises(ConfigError, match="leave a server no room"):
        engine_share(config, SHAPE, placement, gpu_bytes=2**30)


def test_every_kind_of_server_has_a_memory() -> None:
    assert set(colocated.MEMORIES) == set(servers.APIS)
