"""Engines behind sockets: weights proven by fingerprint, lost engines replaced, and nothing left of a killed run.

What every sampler promises is in `tests/contracts/test_sampler.py`, which runs against these too.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.errors import SamplerError
from headrace.infer.engine_processes.engine_host import EngineHost
from headrace.infer.engine_processes.engine_process import EngineProcess
from headrace.infer.engine_processes.parameter_folders import ParameterWriter
from headrace.infer.servers.weight_sync import SyncedWeights
from headrace.model.load import copy_folder, fingerprint, load_model
from headrace.types import SampleRequest, SamplingParams, StopReason, int_array
from support.engine_replicas import EngineReplicas, ThreadedEngine, open_engines, tiny_engine
from support.implementations import tiny_model
from support.processes import alive, descendants

LONG = 200


def request_of(max_tokens: int, *, seed: int = 0) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=seed)
    return SampleRequest(prompt=int_array([3, 7, 4]), params=params)


def update(opened: EngineReplicas) -> None:
    """Change every weight of the trainer's."""
    with torch.no_grad():
        for parameter in opened.trainer.model.parameters():
            parameter.mul_(1.25)


async def publish(opened: EngineReplicas, version: int) -> None:
    await opened.sampler.pause(interrupt=True)
    assert await opened.sampler.load(opened.handle, version) == opened.handle.fingerprint
    await opened.sampler.resume()


async def repaired(opened: EngineReplicas) -> None:
    await opened.sampler.settle()
    assert len(opened.sampler.usable) == len(opened.engines)


def lose(engine: ThreadedEngine) -> None:
    """Break the connection, as the end of a process does."""
    assert engine._writer is not None
    engine._writer.transport.abort()


async def test_samples_follow_the_weights_that_were_published() -> None:
    async with open_engines(tiny_model) as opened:
        before = await opened.sampler.sample(request_of(12))
        update(opened)
        await publish(opened, 3)
        after = [await opened.sampler.sample(request_of(12, seed=seed)) for seed in (0, 0)]
        assert after[0].versions.tolist() == [3] * 12
        assert after[0].tokens.tolist() == after[1].tokens.tolist()
        assert not (after[0].sampler_logprobs == before.sampler_logprobs).all()
        assert [replica.sampler.version for replica in opened.sampler.replicas] == [3, 3]


async def test_requests_go_to_the_engine_with_the_fewest() -> None:
    async with open_engines(tiny_model) as opened:
        tasks = [asyncio.create_task(opened.sampler.sample(request_of(LONG, seed=seed))) for seed in range(6)]
        await asyncio.sleep(0)
        assert [replica.sampler.load_now for replica in opened.sampler.replicas] == [3, 3]
        await opened.sampler.pause(interrupt=True)
        assert {(await task).stop for task in tasks} == {StopReason.INTERRUPTED}


async def test_an_engine_that_holds_other_weights_is_taken_out_and_started_again() -> None:
    async with open_engines(tiny_model) as opened:
        update(opened)
        first = opened.sampler.replicas[0]
        real = first.sampler.install
        starts: list[str] = []

        async def restart() -> None:
            starts.append("again")
            first.sampler.install = real  # type: ignore[method-assign]
            await opened.engines[0].restart()

        async def altered(weights: SyncedWeights, *, fresh: bool = False) -> None:
            await real(replace(weights, fingerprint="of others"), fresh=fresh)

        first.restart, first.sampler.install = restart, altered  # type: ignore[method-assign]
        await publish(opened, 1)
        assert opened.sampler.taken_out == 1
        assert "altered or mixed up on the way" in first.failure
        await repaired(opened)
        assert starts == ["again"]
        assert first.sampler.version == 1


async def test_requests_of_a_lost_engine_are_sampled_elsewhere_with_the_same_tokens() -> None:
    async with open_engines(tiny_model) as opened:
        update(opened)
        await publish(opened, 2)
        alone = [await opened.sampler.sample(request_of(LONG, seed=seed)) for seed in range(4)]
        tasks = [asyncio.create_task(opened.sampler.sample(request_of(LONG, seed=seed))) for seed in range(4)]
        await asyncio.sleep(0)
        lost = opened.engines[0]
        assert isinstance(lost, ThreadedEngine)
        lose(lost)
        among = [await task for task in tasks]
        assert [one.tokens.tolist() for one in among] == [one.tokens.tolist() for one in alone]
        assert opened.sampler.retried > 0
        await repaired(opened)
        assert opened.sampler.replicas[0].sampler.version == 2
        [score] = await opened.sampler.replicas[0].sampler.score([int_array([3, 7, 4])], 0.5)
        [wanted] = await opened.sampler.replicas[1].sampler.score([int_array([3, 7, 4])], 0.5)
        assert score[1:].tolist() == wanted[1:].tolist()


async def test_an_engine_lost_while_paused_comes_back_paused() -> None:
    async with open_engines(tiny_model, 1) as opened:
        await opened.sampler.sample(request_of(2))
        await opened.sampler.pause(interrupt=True)
        lost = opened.engines[0]
        assert isinstance(lost, ThreadedEngine)
        lose(lost)
        update(opened)
        await opened.sampler.load(opened.handle, 1)
        task = asyncio.create_task(opened.sampler.sample(request_of(5)))
        await repaired(opened)
        await asyncio.sleep(0.05)
        assert not task.done()
        await opened.sampler.resume()
        assert (await task).versions.tolist() == [1] * 5


async def test_adapters_are_published_alone(tmp_path: Path) -> None:
    """An engine that was built over the base folder holds, after a partial load, the bits of the trainer's model."""
    trainer = tiny_model(lora_rank=2)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name.endswith(".up"):
                parameter.add_(0.1)
    writer = ParameterWriter(trainer, tmp_path)
    for name in ("base", "adapters"):
        (tmp_path / name).mkdir()
    writer.write_base(tmp_path / "base")
    whole = writer.write_adapters(tmp_path / "adapters")
    base = load_model(tmp_path / "base")
    plain = tiny_model()
    assert fingerprint(base.model.named_parameters()) == fingerprint(plain.model.named_parameters())
    host = EngineHost()
    with pytest.raises(SamplerError, match="call start first"):
        await host.sample(request_of(1))
    await host.start(partial(tiny_engine, partial(tiny_model, lora_rank=2), hold=False))
    assert await host.publish(tmp_path / "adapters", 1, partial=True) == whole
    assert await host.publish(tmp_path / "adapters", 1, partial=True) == whole, "the same version again"
    with pytest.raises(SamplerError, match="lack"):
        await host.publish(tmp_path / "adapters", 2)
    assert (await host.sample(request_of(3))).versions.tolist() == [1] * 3
    await host.close()
    with pytest.raises(SamplerError, match="another model's"):
        copy_folder(tmp_path / "adapters", plain.model, partial=True)


OWNER = """
import asyncio
from headrace.types import SampleRequest, SamplingParams, int_array
from support.engine_replicas import open_engines
from support.implementations import tiny_model

async def main():
    async with open_engines(tiny_model, processes=True) as opened:
        print("\\n".join(str(engine.pid) for engine in opened.engines), flush=True)
        params = SamplingParams(max_tokens=200, stop_tokens=())
        while True:
            await opened.sampler.sample(SampleRequest(prompt=int_array([3]), params=params))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_process_is_replaced_by_one_with_the_version_of_then() -> None:
    async with open_engines(tiny_model, processes=True) as opened:
        update(opened)
        await publish(opened, 4)
        wanted = await opened.sampler.sample(request_of(LONG, seed=1))
        tasks = [asyncio.create_task(opened.sampler.sample(request_of(LONG, seed=1))) for _ in range(4)]
        await asyncio.sleep(0.05)
        victim = opened.engines[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert all([(await task).tokens.tolist() == wanted.tokens.tolist() for task in tasks])
        await repaired(opened)
        assert opened.engines[0].pid not in (None, victim)
        again = await opened.sampler.replicas[0].sampler.sample(request_of(LONG, seed=1))
        assert again.tokens.tolist() == wanted.tokens.tolist()
        assert again.versions.tolist() == [4] * LONG


def test_a_process_that_is_killed_as_it_starts_is_told_by_its_signal(tmp_path: Path) -> None:
    engine = EngineProcess(lambda: None, name="engine replica 1", log=tmp_path / "log", folder=tmp_path)  # type: ignore[arg-type, return-value]
    engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(SamplerError, match=r"^engine replica 1 ended before it was ready \(SIGKILL\)$"):
        engine.wait_ready()


@pytest.mark.slow
def test_processes_end_with_the_run_that_is_killed() -> None:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert owner.stdout is not None
    hosts = [int(owner.stdout.readline()) for _ in range(2)]
    assert set(hosts) <= set(descendants(owner.pid))
    owner.kill()
    owner.wait()
    end = time.monotonic() + 60
    while any(alive(pid) for pid in hosts) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in hosts)
