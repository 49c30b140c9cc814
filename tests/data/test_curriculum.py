"""Tasks are drawn by p(1 - p) of their last episodes, from a state that a checkpoint can hold."""

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from headrace.data.curriculum import LEAST_WEIGHT, UNTRIED_WEIGHT, Curriculum
from headrace.errors import CheckpointError, DataError
from headrace.types import Group, Task
from support.rollout_groups import scored

TASKS = [Task(id=name) for name in "abcd"]


def played(id: int, task: Task, rewards: Sequence[float]) -> Group:
    return Group(id=id, task=task, episodes=tuple(scored(task, reward) for reward in rewards))


def test_a_task_weighs_p_times_one_minus_p_of_its_last_16_episodes() -> None:
    source = Curriculum(TASKS)
    source.add(played(0, TASKS[0], [1.0, 0.0, 0.0, 0.0]))
    source.add(played(1, TASKS[1], [1.0] * 4))
    source.add(played(2, TASKS[2], [0.0] * 12 + [0.5] * 4))  # no verdict on success: the reward itself
    assert source.weight("a") == UNTRIED_WEIGHT, "not before the step is done"
    source.apply()
    assert [source.weight(name) for name in "abcd"] == [
        pytest.approx(0.25 * 0.75),
        LEAST_WEIGHT,
        pytest.approx(0.125 * 0.875),
        UNTRIED_WEIGHT,
    ]
    source.add(played(3, TASKS[0], [1.0] * 16))
    source.apply()
    assert source.weight("a") == LEAST_WEIGHT, "the first four are forgotten"
    assert source.metrics() == {
        "curriculum/tried": 0.75,
        "curriculum/success": pytest.approx((1 + 1 + 0.125) / 3),
        "curriculum/solved": pytest.approx(2 / 3),
        "curriculum/failed": 0.0,
    }


def test_draws_follow_the_weights_and_no_task_twice_in_a_step() -> None:
    source, drawn = Curriculum(TASKS, seed=3), Counter[str]()
    source.add(played(0, TASKS[0], [1.0] * 8))
    for _ in range(4000):
        source.apply()
        drawn[source.next().id] += 1
    assert drawn["a"] / 4000 == pytest.approx(LEAST_WEIGHT / (LEAST_WEIGHT + 3 * UNTRIED_WEIGHT), abs=0.008)
    assert drawn["b"] / 4000 == pytest.approx(UNTRIED_WEIGHT / (LEAST_WEIGHT + 3 * UNTRIED_WEIGHT), abs=0.04)
    source.apply()
    assert sorted(task.id for task in source.get_prompts(4)) == ["a", "b", "c", "d"]
    assert source.next() in TASKS, "after all of them, any of them"


def test_the_order_in_which_groups_end_does_not_matter() -> None:
    groups = [played(id, TASKS[id % 2], [id % 3 / 2, 1.0]) for id in range(12)]
    one, other = Curriculum(TASKS, seed=1), Curriculum(TASKS, seed=1)
    for group in groups:
        one.add(group)
    for group in reversed(groups):
        other.add(group)
    one.apply()
    other.apply()
    assert one.position() == other.position()
    assert one.get_prompts(9) == other.get_prompts(9)


def test_a_restored_curriculum_goes_on_as_if_never_stopped() -> None:
    source = Curriculum(TASKS, seed=5)
    for step in range(3):
        for place, task in enumerate(source.get_prompts(3)):
            source.add(played(3 * step + place, task, [float(place == step), 1.0]))
        if step < 2:
            source.apply()
    source.next()
    state = json.loads(json.dumps(source.state_dict()))  # with outcomes that are not applied yet
    restored = Curriculum(TASKS, seed=5)
    restored.load_state_dict(state)
    for one in (source, restored):
        one.apply()
    assert source.get_prompts(20) == restored.get_prompts(20)
    assert source.state_dict() == restored.state_dict()


def test_a_state_of_other_tasks_seed_or_order_is_refused() -> None:
    state = Curriculum(TASKS).state_dict()
    with pytest.raises(CheckpointError, match="the tasks are not those of the checkpoint"):
        Curriculum(TASKS[:3]).load_state_dict(state)
    with pytest.raises(CheckpointError, match="drawn with seed 0, not 1"):
        Curriculum(TASKS, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="without a curriculum"):
        Curriculum(TASKS).load_state_dict({"epoch": 0, "offset": 0})
    with pytest.raises(DataError, match="the same id"):
        Curriculum([TASKS[0], TASKS[0]])
