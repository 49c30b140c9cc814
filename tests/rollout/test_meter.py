"""The meter adds up what it saw, on a clock that the test moves."""

import asyncio

import pytest

from headrace.rollout.meter import Meter
from headrace.types import Group, Task

TASK = Task(id="t")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_idle_share_and_mean_number_in_play() -> None:
    clock = Clock()
    meter = Meter(clock)
    gates = [asyncio.Event(), asyncio.Event()]

    async def play(task: Task, id: int) -> Group:
        await gates[id].wait()
        if id:
            raise ValueError("an ending like any other")
        return Group(id=id, task=task, episodes=())

    metered = meter.around(play)
    clock.now += 2  # nothing is played for 2 s
    first = asyncio.create_task(metered(TASK, 0))
    await asyncio.sleep(0)
    clock.now += 1  # one for 1 s
    second = asyncio.create_task(metered(TASK, 1))
    await asyncio.sleep(0)
    clock.now += 4  # two for 4 s
    gates[1].set()
    with pytest.raises(ValueError, match="like any other"):
        await second
    clock.now += 1  # one for 1 s
    assert meter.lap() == {"perf/sampler_idle": 2 / 8, "perf/running_mean": (1 + 8 + 1) / 8}
    clock.now += 1
    gates[0].set()
    assert (await first).id == 0
    clock.now += 3
    assert meter.lap() == {"perf/sampler_idle": 3 / 4, "perf/running_mean": 1 / 4}
    assert meter.lap() == {"perf/sampler_idle": 0.0, "perf/running_mean": 0.0}


async def test_a_cancelled_group_is_not_in_play_any_more() -> None:
    clock = Clock()
    meter = Meter(clock)

    async def play(task: Task, id: int) -> Group:
        await asyncio.Event().wait()
        raise AssertionError("never")

    running = asyncio.create_task(meter.around(play)(TASK, 0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    meter.lap()
    clock.now += 5
    assert meter.lap()["perf/sampler_idle"] == 1.0
