import asyncio

import pytest

from headrace.errors import RolloutError
from headrace.loops.evaluate import MAX_TASKS_AT_ONCE, evaluate
from headrace.types import Group, Task
from support.loop_fakes import group, scored


async def test_groups_come_back_in_task_order_with_fixed_ids_whatever_ends_first() -> None:
    async def play(task: Task, id: int) -> Group:
        for _ in range(10 - id):  # later tasks end earlier
            await asyncio.sleep(0)
        return group(id, scored(float(id), task=task.id, success=id % 2 == 0))

    out = await evaluate([Task(id=f"t{n}") for n in range(5)], play)
    assert [played.id for played in out.groups] == [0, 1, 2, 3, 4]
    assert [played.episodes[0].episode.task.id for played in out.groups] == ["t0", "t1", "t2", "t3", "t4"]
    assert out.score == pytest.approx(3 / 5)


async def test_the_score_is_the_mean_reward_where_nothing_says_what_success_is() -> None:
    async def play(task: Task, id: int) -> Group:
        return group(id, scored(0.25 * id))

    assert (await evaluate([Task(id="a"), Task(id="b")], play)).score == pytest.approx(0.125)


async def test_no_more_tasks_than_the_limit_are_played_at_once() -> None:
    playing, most = 0, 0

    async def play(task: Task, id: int) -> Group:
        nonlocal playing, most
        playing += 1
        most = max(most, playing)
        await asyncio.sleep(0)
        playing -= 1
        return group(id, scored(1.0))

    await evaluate([Task(id=str(n)) for n in range(MAX_TASKS_AT_ONCE + 50)], play)
    assert most == MAX_TASKS_AT_ONCE


async def test_when_nothing_could_be_scored_the_first_reason_is_the_error() -> None:
    async def play(task: Task, id: int) -> Group:
        return group(id, num_failed=2)

    with pytest.raises(RolloutError, match=r"none of the 2 held-out tasks could be .*: the engine died"):
        await evaluate([Task(id="a"), Task(id="b")], play)
