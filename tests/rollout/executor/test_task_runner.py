"""Every spawned group yields exactly one outcome, however it ends."""

import asyncio

from headrace.errors import SamplerError
from headrace.rollout.executor.ledger import Drop
from headrace.rollout.executor.task_runner import GroupDone, GroupFailed, Outcome, TaskRunner
from headrace.types import Group
from support.rollout_groups import group


async def collect(runner: TaskRunner, n: int) -> list[Outcome]:
    got: list[Outcome] = []
    async with asyncio.timeout(5):
        while len(got) < n:
            got += await runner.outcomes()
    return got


async def test_values_and_errors_arrive_in_order_of_ending() -> None:
    runner = TaskRunner(timeout_s=5)
    gate = asyncio.Event()

    async def late() -> Group:
        await gate.wait()
        return group(0)

    async def broken() -> Group:
        raise ValueError("no such room")

    async def refused() -> Group:
        gate.set()
        raise SamplerError("too long")

    for id, play in enumerate((late, broken, refused)):
        runner.spawn(id, play)
    first, second, third = await collect(runner, 3)
    assert first == GroupFailed(id=1, reason=Drop.FAILED, text="group 1: ValueError: no such room")
    assert second == GroupFailed(id=2, reason=Drop.FAILED, text="too long")
    assert isinstance(third, GroupDone)
    assert third.group.id == 0


async def test_timeout_is_told_from_a_timeout_error_of_the_game() -> None:
    runner = TaskRunner(timeout_s=0.01)

    async def hangs() -> Group:
        await asyncio.Event().wait()
        return group(0)

    async def its_own() -> Group:
        raise TimeoutError("socket")

    runner.spawn(0, hangs)
    runner.spawn(1, its_own)
    outcomes = {outcome.id: outcome for outcome in await collect(runner, 2)}
    assert outcomes[0] == GroupFailed(id=0, reason=Drop.TIMEOUT, text="group 0 was not played and scored in 0.01 s")
    assert outcomes[1] == GroupFailed(id=1, reason=Drop.FAILED, text="group 1: TimeoutError: socket")


async def test_cancelled_before_and_after_its_first_step_is_an_outcome() -> None:
    runner = TaskRunner(timeout_s=5)

    async def hangs() -> Group:
        await asyncio.Event().wait()
        return group(0)

    runner.spawn(0, hangs)
    await asyncio.sleep(0)
    runner.spawn(1, hangs)  # never gets a step
    assert await runner.close(timeout_s=1) == ()
    outcomes = await collect(runner, 2)
    assert {(outcome.id, outcome.reason) for outcome in outcomes if isinstance(outcome, GroupFailed)} == {
        (0, Drop.CANCELLED),
        (1, Drop.CANCELLED),
    }


async def test_close_names_what_does_not_react() -> None:
    runner = TaskRunner(timeout_s=5)
    release = asyncio.Event()

    async def stubborn() -> Group:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return group(3)

    runner.spawn(3, stubborn)
    await asyncio.sleep(0)
    assert await runner.close(timeout_s=0.01) == (3,)
    release.set()
    (outcome,) = await collect(runner, 1)
    assert outcome.id == 3
