"""The executor tells a curriculum what was trained on and rejected; at eta = 0 the order of endings does not count."""

import asyncio
import json
from collections.abc import Callable

import pytest

from headrace.data.curriculum import Curriculum
from headrace.rollout.executor import AsyncSettings, RolloutExecutor
from headrace.rollout.filters import named_filter
from headrace.rollout.publisher import Publisher
from headrace.testing import FakeSampler
from headrace.types import Group, SharedWeights, Task
from support.rollout_groups import scored

TASKS = [Task(id=str(number)) for number in range(12)]


def rewards(task: Task, group_id: int) -> tuple[float, float]:
    """The first tasks are always solved, the last never, those between now and then."""
    number = int(task.id)
    return (1.0, 1.0) if number < 4 else (0.0, 0.0) if number > 8 else (1.0, float(group_id % 2))


def executor_of(
    source: Curriculum, turns: Callable[[int], int], *, played: list[str], max_staleness: int = 0
) -> RolloutExecutor:
    """`turns` of the event loop pass until a group has ended."""
    sampler = FakeSampler()

    async def play(task: Task, group_id: int) -> Group:
        played.append(task.id)
        for _ in range(turns(group_id)):
            await asyncio.sleep(0)
        version = sampler.version
        episodes = tuple(
            scored(task, reward, versions=(version, version), id=f"{group_id}/{number}")
            for number, reward in enumerate(rewards(task, group_id))
        )
        return Group(id=group_id, task=task, episodes=episodes)

    return RolloutExecutor(
        play=play,
        next_task=source.next,
        batch_groups=3,
        settings=AsyncSettings(max_staleness=max_staleness, max_consecutive_drops=100),
        publisher=Publisher([sampler]),
        filters=[named_filter("reward_spread", {})],
        cursor=source.state_dict,
        outcomes=source,
    )


async def train(source: Curriculum, turns: Callable[[int], int], *, steps: int, max_staleness: int = 0) -> list[str]:
    played: list[str] = []
    executor = executor_of(source, turns, played=played, max_staleness=max_staleness)
    async with executor:
        for step in range(steps):
            groups = await executor.take_batch()
            executor.done(groups)
            await executor.publish(SharedWeights(fingerprint=str(step)))
            assert executor.metrics()["curriculum/tried"] > 0
    return played


async def test_which_tasks_are_drawn_does_not_depend_on_who_ends_first() -> None:
    orders = (lambda id: 0, lambda id: id % 5, lambda id: 40 - id % 7)
    runs = []
    for turns in orders:
        source = Curriculum(TASKS, seed=1)
        runs.append((sorted(await train(source, turns, steps=6)), source.position()))
    assert runs[0] == runs[1] == runs[2]


async def test_rejected_groups_count_and_their_tasks_are_drawn_less() -> None:
    source = Curriculum(TASKS, seed=2)
    await train(source, lambda id: 0, steps=12)
    weights = {task.id: source.weight(task.id) for task in TASKS}
    assert {weights[str(number)] for number in (0, 1, 2, 3, 9, 10, 11)} <= {0.01, 0.25}
    assert sum(weights[str(number)] == 0.01 for number in (0, 1, 2, 3, 9, 10, 11)) >= 5
    assert all(weights[str(number)] > 0.1 for number in range(4, 9))


async def test_it_works_while_sampling_runs_ahead_and_its_state_is_json() -> None:
    source = Curriculum(TASKS, seed=3)
    await train(source, lambda id: id % 3, steps=5, max_staleness=2)
    restored = Curriculum(TASKS, seed=3)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert restored.state_dict() == source.state_dict()
    assert source.metrics()["curriculum/tried"] == pytest.approx(1.0, abs=0.5)
