"""Sampler utilisation adds up the groups that run, on a clock that the test moves."""

import asyncio

import pytest

from headrace.rollout.executor.stats import SamplerUtilization


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_idle_share_and_mean_number_in_play() -> None:
    clock = Clock()
    utilization = SamplerUtilization(clock)
    gates = [asyncio.Event(), asyncio.Event()]

    async def play(id: int) -> int:
        with utilization.running_group():
            await gates[id].wait()
            if id:
                raise ValueError("an ending like any other")
            return id

    clock.now += 2  # nothing is played for 2 s
    first = asyncio.create_task(play(0))
    await asyncio.sleep(0)
    clock.now += 1  # one for 1 s
    second = asyncio.create_task(play(1))
    await asyncio.sleep(0)
    clock.now += 4  # two for 4 s
    gates[1].set()
    with pytest.raises(ValueError, match="like any other"):
        await second
    clock.now += 1  # one for 1 s
    assert utilization.lap() == {"perf/sampler_idle": 2 / 8, "perf/running_mean": (1 + 8 + 1) / 8}
    clock.now += 1
    gates[0].set()
    assert await first == 0
    clock.now += 3
    assert utilization.lap() == {"perf/sampler_idle": 3 / 4, "perf/running_mean": 1 / 4}
    assert utilization.lap() == {"perf/sampler_idle": 0.0, "perf/running_mean": 0.0}


async def test_a_cancelled_group_is_not_in_play_any_more() -> None:
    clock = Clock()
    utilization = SamplerUtilization(clock)

    async def play() -> None:
        with utilization.running_group():
            await asyncio.Event().wait()

    running = asyncio.create_task(play())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    utilization.lap()
    clock.now += 5
    assert utilization.lap()["perf/sampler_idle"] == 1.0
