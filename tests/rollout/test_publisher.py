"""Publishing: fixed phases on every sampler, versions in order, fingerprints compared, failures named."""

import asyncio

import pytest

from headrace.errors import ConfigError, RolloutError, SamplerError
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.rollout.publisher import Interrupt, Publisher
from headrace.testing import FakeSampler
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights, WeightsHandle, int_array

HANDLE = SharedWeights(fingerprint="abc")


class LoggedSampler(FakeSampler):
    """Writes down which phase reached it when."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    async def load(self, handle: WeightsHandle, version: int) -> str:
        self.log.append(f"{self.name} load {version}")
        return await super().load(handle, version)

    async def pause(self, *, interrupt: bool) -> None:
        await super().pause(interrupt=interrupt)
        self.log.append(f"{self.name} pause {interrupt}")

    async def resume(self) -> None:
        self.log.append(f"{self.name} resume")
        await super().resume()


async def test_phases_are_finished_everywhere_before_the_next_begins() -> None:
    log: list[str] = []
    publisher = Publisher([LoggedSampler("a", log), LoggedSampler("b", log)])

    async def score() -> None:
        log.append(f"score at {publisher.version}")

    async with publisher.publish(HANDLE, before_load=score) as version:
        log.append(f"sweep at {version}")
        assert publisher.version == 1
    assert log == [
        "a pause True",
        "b pause True",
        "score at 0",
        "a load 1",
        "b load 1",
        "sweep at 1",
        "a resume",
        "b resume",
    ]


async def test_versions_grow_by_one_from_where_the_samplers_are() -> None:
    sampler = FakeSampler()
    await sampler.load(HANDLE, 4)
    publisher = Publisher([sampler])
    for expected in (5, 6):
        async with publisher.publish(HANDLE):
            pass
        assert publisher.version == sampler.version == expected
    publisher.check()


async def test_other_weights_than_exported_are_refused_by_name() -> None:
    class Corrupting(FakeSampler):
        async def load(self, handle: WeightsHandle, version: int) -> str:
            await super().load(handle, version)
            return "xyz"

    publisher = Publisher([FakeSampler(), Corrupting()])
    with pytest.raises(RolloutError, match=r"sampler 1 \(Corrupting\) holds weights xyz .* exported abc"):
        async with publisher.publish(HANDLE):
            pytest.fail("nothing may be swept at a version that was not published")
    assert publisher.version == 0


async def test_failing_and_hanging_samplers_are_named() -> None:
    class Dead(FakeSampler):
        async def load(self, handle: WeightsHandle, version: int) -> str:
            raise SamplerError("out of memory")

    class Hanging(FakeSampler):
        async def pause(self, *, interrupt: bool) -> None:
            await asyncio.Event().wait()

    with pytest.raises(RolloutError, match=r"sampler 0 \(Dead\) could not load the weights: out of memory"):
        async with Publisher([Dead()]).publish(HANDLE):
            pass
    with pytest.raises(RolloutError, match=r"sampler 1 \(Hanging\) did not pause within 0.01 s"):
        async with Publisher([FakeSampler(), Hanging()], timeout_s=0.01).publish(HANDLE):
            pass


async def test_fresh_samplers_catch_up_after_a_restart() -> None:
    log: list[str] = []
    samplers = [LoggedSampler("a", log), LoggedSampler("b", log)]
    await samplers[0].load(HANDLE, 3)
    publisher = Publisher(samplers)
    with pytest.raises(RolloutError, match=r"sampler 1 \(LoggedSampler\) holds version 0 and the run is at 3"):
        publisher.check()
    log.clear()
    await publisher.load_current(HANDLE)
    publisher.check()
    assert log == ["b pause True", "b load 3", "b resume"]


# --- what becomes of open sequences ----------------------------------------------------------------------------------


def sampling(sampler: FakeSampler, max_tokens: int) -> "asyncio.Task[Completion]":
    request = SampleRequest(prompt=int_array([1]), params=SamplingParams(max_tokens=max_tokens))
    return asyncio.create_task(PartialEpisode().sample(sampler, request))


async def test_draining_lets_open_sequences_end() -> None:
    sampler = FakeSampler()
    open_sequence = sampling(sampler, 20)
    await asyncio.sleep(0)
    publisher = Publisher([sampler], interrupt=Interrupt.DRAIN, drain_s=5.0)
    async with publisher.publish(HANDLE):
        assert open_sequence.done()
    assert (await open_sequence).versions.tolist() == [0] * 20
    assert publisher.drains_cut == 0


async def test_what_does_not_end_in_time_is_cut_and_counted() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()

    class Slow(FakeSampler):
        async def pause(self, *, interrupt: bool) -> None:
            for _ in range(5 if interrupt else 0):
                ticks.put_nowait(None)
            await super().pause(interrupt=interrupt)

    sampler = Slow(tick=ticks.get)
    open_sequence = sampling(sampler, 3)
    await asyncio.sleep(0)
    publisher = Publisher([sampler], interrupt=Interrupt.DRAIN, drain_s=0.01)
    async with publisher.publish(HANDLE):
        pass
    assert (await open_sequence).versions.tolist() == [0, 1, 1]
    assert publisher.drains_cut == 1


def test_weights_are_not_changed_in_flight_by_a_sampler_that_cannot() -> None:
    class Holding(FakeSampler):
        holds_in_flight = True

    assert Publisher([Holding()], interrupt=Interrupt.INFLIGHT).version == 0
    with pytest.raises(ConfigError, match=r'sampler 1 \(FakeSampler\) cannot keep .*interrupt = "abort" or "drain"'):
        Publisher([Holding(), FakeSampler()], interrupt=Interrupt.INFLIGHT)
