"""A task that is always slow is trained on all the same: after two stale drops the next publish waits for it."""

import asyncio

import pytest

from headrace.errors import DataError
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.drops import SlowTasks
from headrace.rollout.executor.selection import TakeBest
from headrace.rollout.executor.settings import StaleAction
from headrace.testing import FakeSampler, run_virtual
from headrace.types import Task
from support.async_rollouts import HANDLE, HandSampler, executor_of, ids, turns


def test_two_drops_make_a_task_slow_and_a_third_sends_it_to_the_back() -> None:
    slow = SlowTasks()
    assert (slow.dropped("a"), "a" in slow) == (True, False)
    assert (slow.dropped("a"), "a" in slow) == (True, True)
    assert slow.state_dict() == {"a": 2}
    assert (slow.dropped("a"), "a" in slow) == (False, False)
    slow.dropped("b")
    slow.ended("b")
    assert (slow.dropped("b"), "b" in slow) == (True, False)


NAMES = ["slow", *[f"fast{n}" for n in range(40)]]


def lengths(task: Task) -> tuple[int, ...]:
    return (30,) if task.id == "slow" else (2,)


async def train(executor: RolloutExecutor, sampler: HandSampler, steps: int, *, beats: int) -> list[str]:
    """Tasks trained in `steps` steps; between two of them the sampler makes `beats` tokens."""
    trained: list[str] = []

    async def beat() -> None:
        while True:
            await sampler.step()

    for _ in range(steps):
        taking = asyncio.create_task(executor.take_batch())
        while not taking.done():
            await sampler.step()
        groups = taking.result()
        trained += [group.task.id for group in groups]
        await sampler.step(beats)
        executor.done(groups)
        beating = asyncio.create_task(beat())  # time goes on while a publish waits
        await executor.publish(HANDLE)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    return trained


async def test_an_always_slow_task_is_trained_on() -> None:
    """eta = 1: of 30 tokens at most a dozen are sampled before the bound; without the wait it would never end."""
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=1, names=NAMES, tokens=lengths, slow_wait_s=600.0)
    async with executor:
        trained = await train(executor, sampler, 14, beats=3)
        counts, drops_in_a_row = executor.metrics(), executor.state_dict()["slow"]
    assert "slow" in trained
    assert "slow" not in drops_in_a_row, "its count starts anew when it has ended in time"
    assert counts["rollout/slow_waits"] >= 1
    assert counts["rollout/slow_missed"] == 0
    assert counts["rollout/dropped_stale"] >= 2
    assert counts["rollout/stale_share_to_64_tokens"] > 0


async def test_without_the_wait_it_never_is() -> None:
    """The same run, with a wait that ends at once: what the test above shows comes from waiting."""
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=1, names=NAMES, tokens=lengths, slow_wait_s=1e-6)
    async with executor:
        trained = await train(executor, sampler, 14, beats=3)
        counts = executor.metrics()
    assert "slow" not in trained
    assert counts["rollout/slow_missed"] == counts["rollout/slow_waits"] >= 1


async def test_what_was_waited_for_is_trained_although_others_score_higher() -> None:
    """It is at the bound: the next publish would make it stale, and the wait would have been in vain."""
    sampler = HandSampler()
    selection = TakeBest(lambda group: 0.0 if group.task.id == "slow" else 1.0)
    options = {"names": NAMES, "tokens": lengths, "slow_wait_s": 600.0, "oversampling": 2.0}
    async with executor_of(sampler, max_staleness=1, selection=selection, **options) as executor:
        assert "slow" in await train(executor, sampler, 14, beats=3)


async def test_with_masks_its_fresh_tail_is_trained_without_waiting() -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=1, names=NAMES, tokens=lengths, stale_action=StaleAction.MASK)
    async with executor:
        trained = await train(executor, sampler, 14, beats=3)
        counts = executor.metrics()
    assert "slow" in trained
    assert counts["rollout/slow_waits"] == 0
    assert counts["rollout/masked_tokens"] > 0
    assert counts["rollout/lag_max"] <= 1


@pytest.mark.parametrize("wait_s", [600.0, 1e-6], ids=["waited for", "not waited for"])
@pytest.mark.parametrize("action", list(StaleAction))
def test_a_task_whose_world_is_slow_after_its_last_token_is_trained_on(action: StaleAction, wait_s: float) -> None:
    """Two tokens in the first seconds, then 40 s of a score, at 5 s a training step and eta = 1: nothing of it is young
    when it ends, so masks alone would drop it for ever."""

    async def main() -> tuple[list[str], dict[str, float]]:
        sampler = FakeSampler(tick=lambda: asyncio.ensure_future(asyncio.sleep(1.0)))
        executor = executor_of(
            sampler,
            max_staleness=1,
            names=NAMES,
            tokens=lambda task: (2,),
            after_s=lambda task: 40.0 if task.id == "slow" else 0.0,
            stale_action=action,
            slow_wait_s=wait_s,
        )
        trained: list[str] = []
        async with executor:
            for _ in range(30):
                groups = await executor.take_batch()
                trained += [group.task.id for group in groups]
                await asyncio.sleep(5.0)
                executor.done(groups)
                await executor.publish(HANDLE)
            return trained, executor.metrics()

    trained, counts = run_virtual(main())
    assert ("slow" in trained) == (wait_s > 1.0), "what trains it is the wait"
    assert counts["rollout/slow_waits"] >= 1
    assert counts["rollout/lag_max"] <= 1
    assert counts["rollout/masked_tokens"] == 0


async def test_a_running_group_that_is_too_old_is_cancelled_and_its_task_comes_again() -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=1, max_running=1, names=["a", "b"], tokens=lambda task: (50,))
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(2)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        for _ in range(2):
            await executor.publish(HANDLE)
            await turns()
        counts = executor.metrics()
        assert (counts["rollout/dropped_stale"], counts["rollout/started"]) == (1, 2)
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert [entry["task"]["id"] for entry in executor.state_dict()["running"]] == ["a"]  # again, and not yet b
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


@pytest.mark.parametrize("action", list(StaleAction))
async def test_a_token_past_the_bound_is_never_handed_out_for_training(action: StaleAction) -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, batch=1, max_staleness=2, names=["slow", "a"], tokens=lengths, stale_action=action)
    async with executor:
        for _ in range(12):
            taking = asyncio.create_task(executor.take_batch())
            while not taking.done():
                await sampler.step()
            for group in taking.result():
                for scored in group.episodes:
                    versions = scored.episode.steps[0].completion.versions
                    young = versions >= executor.oldest
                    assert young.all() if action is StaleAction.DROP else young.any()
            executor.done(taking.result())
            await sampler.step(4)
            publishing = asyncio.create_task(executor.publish(HANDLE))
            while not publishing.done():
                await sampler.step()
            await publishing


@pytest.mark.parametrize("eta", [1, 2])
async def test_by_the_virtual_clock_the_wait_does_not_depend_on_the_real_one(eta: int) -> None:
    async def batches(slow_wait_s: float) -> tuple[list[list[int]], float]:
        taken, waits = [], 0.0
        options = {"names": NAMES, "tokens": lengths, "lockstep": 2, "slow_wait_s": slow_wait_s}
        async with executor_of(FakeSampler(), max_staleness=eta, **options) as executor:
            for _ in range(14):
                groups = await executor.take_batch()
                executor.done(groups)
                await executor.publish(HANDLE)
                taken.append(ids(groups))
                waits += executor.metrics()["rollout/slow_waits"]
        return taken, waits

    patient, hasty = await batches(60.0), await batches(1e-6)
    assert patient[1] > 0, "nobody was waited for"
    assert hasty == patient


async def test_a_task_that_was_dropped_is_tried_again_also_when_the_source_is_at_its_end() -> None:
    sampler = HandSampler()
    given = iter([Task(id=name) for name in ("slow", "a", "b", "c", "d")])
    executor = executor_of(
        sampler, max_staleness=1, source=lambda: next(given), tokens=lengths, slow_wait_s=1e-6, names=None
    )
    trained: list[str] = []
    async with executor:
        for _ in range(5):
            trained += await train(executor, sampler, 1, beats=0)
        with pytest.raises(DataError, match="no further task"):
            await train(executor, sampler, 1, beats=0)
    assert sorted(trained) == ["a", "b", "c", "d", "slow"]
