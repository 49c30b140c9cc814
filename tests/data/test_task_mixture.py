"""Several sources of tasks are mixed by weight, and the mixture goes on from its state."""

import json
from collections import Counter

import pytest

from headrace.data.curriculum import Curriculum
from headrace.data.task_mixture import TaskMixture, source_name, tag_tasks
from headrace.data.task_source import TaskSource
from headrace.errors import CheckpointError
from headrace.types import Task

EASY = tag_tasks("easy", [Task(id=str(number)) for number in range(5)])
HARD = tag_tasks("hard", [Task(id=str(number)) for number in range(3)])


def mixture(weights: tuple[float, float] = (3.0, 1.0), *, curriculum: bool = False) -> TaskMixture:
    hard = Curriculum(HARD, seed=2) if curriculum else TaskSource(HARD, seed=2)
    return TaskMixture([(TaskSource(EASY, seed=1), weights[0]), (hard, weights[1])])


def test_sources_get_their_shares_and_each_keeps_its_own_order() -> None:
    drawn = mixture().get_prompts(40)
    assert Counter(map(source_name, drawn)) == {"easy": 30, "hard": 10}
    assert [task for task in drawn if source_name(task) == "hard"] == list(TaskSource(HARD, seed=2).get_prompts(10))
    assert {task.id for task in drawn} == {task.id for task in (*EASY, *HARD)}


@pytest.mark.parametrize("curriculum", [False, True])
def test_a_restored_mixture_goes_on_as_if_never_stopped(curriculum: bool) -> None:
    source = mixture(curriculum=curriculum)
    source.get_prompts(7)
    restored = mixture(curriculum=curriculum)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert source.get_prompts(30) == restored.get_prompts(30)
    assert source.position() == restored.position()


def test_a_state_of_another_mixture_is_refused() -> None:
    state = mixture().state_dict()
    for other in (mixture((1.0, 1.0)), TaskMixture([(TaskSource(EASY, seed=1), 1.0)])):
        with pytest.raises(CheckpointError, match="sources of tasks or their weights are not those of the checkpoint"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="a curriculum or a mixture of tasks"):
        TaskSource(EASY, seed=1).load_state_dict(state)
