"""More groups are started than are trained: which are kept, and what becomes of the others."""

import asyncio
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RolloutError
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.selection import TakeBest, TakeFirst, mean_reward
from headrace.rollout.executor.selection import reward_spread as spread
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.filters import reward_spread
from headrace.rollout.publisher import Publisher
from headrace.types import Group, Task
from support.async_rollouts import HANDLE, HandSampler, executor_of, ids, tasks, turns
from support.rollout_groups import group
from support.scripted_groups import ScriptedGroups


def test_scores_by_hand() -> None:
    made = group(0, rewards=(0.25, 1.0, 0.25))
    assert (spread(made), mean_reward(made)) == (0.75, 0.5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_best_is_the_highest_and_the_older_of_two_equal_ones(scores: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(scores)))
    groups = [group(id, rewards=(0.0, float(score))) for id, score in enumerate(scores)]
    by_score = sorted(range(len(scores)), key=lambda id: (-scores[id], id))[:n]
    assert ids(TakeBest(spread).choose(groups, n)) == sorted(by_score)
    assert ids(TakeFirst().choose(groups, n)) == list(range(n))


def test_groups_that_were_waited_for_go_first() -> None:
    groups = [group(id, rewards=(0.0, float(id))) for id in range(4)]
    assert ids(TakeBest(spread).choose(groups, 2, before={0})) == [0, 3]
    assert ids(TakeFirst().choose(groups, 2, before={3})) == [0, 3]


def test_a_score_must_be_a_finite_number() -> None:
    with pytest.raises(RolloutError, match="gave nan for group 0"):
        TakeBest(lambda group: math.nan).choose([group(0)], 1)
    with pytest.raises(RolloutError, match=r"failed on group 0: ZeroDivisionError"):
        TakeBest(lambda group: 1 / 0).choose([group(0)], 1)


# --- eta = 0 ---------------------------------------------------------------------------------------------------------


def executor_over(script: ScriptedGroups, *, oversampling: float = 2.0, **extra: object) -> RolloutExecutor:
    source = tasks()
    return RolloutExecutor(
        play=script.play,
        next_task=lambda: next(source),
        batch_groups=2,
        settings=AsyncSettings(oversampling=oversampling, task_timeout_s=600.0, grace_s=60.0),
        publisher=Publisher(),
        filters=(reward_spread(),),
        **extra,  # type: ignore[arg-type]
    )


async def test_the_first_that_pass_are_kept_and_the_others_are_surplus() -> None:
    script = ScriptedGroups()
    async with executor_over(script) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2, 3]  # ceil(2.0 * 2)
        script.end(3)
        script.end(0, rewards=(1.0, 1.0))  # does not pass: one more is started
        await turns()
        assert script.started == [0, 1, 2, 3, 4]
        script.end(4)
        batch = await taking
        assert ids(batch) == [3, 4]
        counts = executor.metrics()
        assert counts["rollout/dropped_surplus"] == 2  # 1 and 2, which ran
        assert (counts["rollout/running"], counts["rollout/ready"]) == (0, 0)
        assert script.endings[1].cancelled()
        assert script.endings[2].cancelled()
        await turns()
        assert script.started == [0, 1, 2, 3, 4]  # nothing starts while the batch is trained
        executor.done(batch)
        await executor.publish(HANDLE)
        await turns()
        assert len(script.started) == 5


async def test_the_best_are_kept_when_all_have_ended() -> None:
    script = ScriptedGroups()
    async with executor_over(script, selection=TakeBest(mean_reward)) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id, high in enumerate((0.1, 0.9, 0.2)):
            script.end(id, rewards=(0.0, high))
        await turns()
        assert not taking.done()  # three of four
        script.end(3, rewards=(0.0, 0.5))
        assert ids(await taking) == [1, 3]
        assert executor.metrics()["rollout/dropped_surplus"] == 2


async def test_a_batch_given_up_while_its_surplus_ends_is_counted_and_the_next_one_comes() -> None:
    release = asyncio.Event()

    async def play(task: object, group_id: int) -> Group:
        while group_id == 1 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return group(group_id)

    source = tasks()
    executor = RolloutExecutor(
        play=play,
        next_task=lambda: next(source),
        batch_groups=1,
        settings=AsyncSettings(oversampling=2.0, task_timeout_s=600.0, grace_s=60.0),
        publisher=Publisher(),
    )
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        release.set()
        await turns()
        assert ids(await executor.take_batch()) == [2]
        counts = executor.metrics()
        assert (counts["rollout/dropped_cancelled"], counts["rollout/dropped_surplus"]) == (1, 2)


async def test_surplus_that_does_not_end_is_named() -> None:
    release = asyncio.Event()

    async def play(task: object, group_id: int) -> Group:
        while group_id == 1 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return group(group_id)

    source = tasks()
    executor = RolloutExecutor(
        play=play,
        next_task=lambda: next(source),
        batch_groups=1,
        settings=AsyncSettings(oversampling=2.0, task_timeout_s=0.01, grace_s=0.01),
        publisher=Publisher(),
    )
    async with executor:
        with pytest.raises(RolloutError, match="still running: group 1 of task t1"):
            await executor.take_batch()
    release.set()
    await turns()


# --- eta > 0 ---------------------------------------------------------------------------------------------------------


async def test_what_is_left_over_goes_into_the_next_batch_with_its_versions() -> None:
    """eta = 1, B = 1, f = 2: three start; one is trained, one waits, one runs on, across the update."""
    sampler = HandSampler()
    executor = executor_of(
        sampler,
        max_staleness=1,
        oversampling=2.0,
        names=["a", "b", "long", "x", "x"],
        tokens=lambda task: {"a": (1,), "b": (1,), "long": (6,)}.get(task.id, (99,)),
    )
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert executor.metrics()["rollout/running"] == 3
        await sampler.step(2)
        first = await taking
        assert ids(first) == [0]
        executor.done(first)
        await executor.publish(HANDLE)
        second = await executor.take_batch()
        assert ids(second) == [1]
        assert second[0].episodes[0].episode.steps[0].completion.versions.tolist() == [0]
        executor.done(second)
        await sampler.step(6)
        third = await executor.take_batch()
        versions = third[0].episodes[0].episode.steps[0].completion.versions.tolist()
        assert (ids(third), set(versions)) == ([2], {0, 1})
        assert executor.metrics()["rollout/dropped_surplus"] == 0


async def test_a_group_that_others_were_better_than_is_not_tried_again_for_its_age() -> None:
    """It ended in time and was compared: its task is not slow, and goes before no new one."""
    sampler, drawn = HandSampler(), itertools.count()
    executor = executor_of(
        sampler,
        max_staleness=1,
        oversampling=2.0,
        selection=TakeBest(lambda group: group.id % 2),
        source=lambda: Task(id=f"t{next(drawn)}"),
        tokens=lambda task: (1,),
    )
    async with executor:
        for _ in range(8):
            taking = asyncio.create_task(executor.take_batch())
            while not taking.done():
                await sampler.step()
            executor.done(taking.result())
            await executor.publish(HANDLE)
        counts = executor.metrics()
        assert counts["rollout/dropped_stale"] >= 4
        assert counts["rollout/started"] == next(drawn), "every group is of a task of its own"
        assert executor.state_dict()["slow"] == {}
