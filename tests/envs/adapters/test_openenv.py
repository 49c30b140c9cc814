"""Environments of the real package OpenEnv, in this process."""

from typing import Any

import pytest

pytest.importorskip("openenv", reason="pip install openenv")

from headrace.envs import environment_tasks
from headrace.envs.adapters.openenv import OpenEnvEnv
from headrace.errors import ConfigError, EpisodeError
from headrace.types import Observation, Task
from support.paths import FOREIGN

FILE = FOREIGN / "games_of_openenv.py"


def tasks(name: str, size: int = 1, seed: int = 0, **options: Any) -> list[Task]:
    return environment_tasks("openenv", size, seed, {"env": f"{FILE}:{name}", **options})


def text(observation: Observation) -> str:
    [message] = observation.messages
    return message.content


def to_goal(goal: int, **options: Any) -> Task:
    """A line whose goal, which the task's seed decides, is there."""
    env = OpenEnvEnv()
    return next(
        task for task in tasks("Line", 60, **options) if f'"goal": {goal}' in text(env.reset(_shown_whole(task), 0))
    )


def _shown_whole(task: Task) -> Task:
    return Task(id=task.id, data={**task.data, "show": ""})


def test_actions_are_json_objects_of_the_fields_and_observations_too() -> None:
    env = OpenEnvEnv()
    first = env.reset(to_goal(3), 0)
    assert text(first) == '{"place": 0, "goal": 3}'
    one = env.step('{"direction": "right"}')
    assert (text(one.observation), one.reward, one.done, one.valid) == ('{"place": 1, "goal": 3}', -0.1, False, True)
    back = env.step('{"direction": "left", "steps": 1}')
    assert back.observation.state == first.state != one.observation.state, "the counters are no part of the state"
    last = env.step('{"direction": "right", "steps": 3}')
    assert (last.done, last.reward, last.success) == (True, 1.0, True)
    env.close()


def test_what_is_no_action_costs_a_turn_and_the_environment_does_not_see_it() -> None:
    env = OpenEnvEnv()
    first = env.reset(to_goal(3, max_turns=5), 0)
    results = [
        env.step(said)
        for said in ("right", "[1]", '{"direction": "up"}', '{"direction": "left", "speed": 1}', '{"steps": "many"}')
    ]
    assert [text(result.observation) for result in results] == [
        "write an action as a JSON object with the fields direction, steps",
        "write an action as a JSON object with the fields direction, steps",
        "direction: Input should be 'left' or 'right'",
        "speed: Extra inputs are not permitted",
        "direction: Field required",
    ]
    assert [(r.valid, r.reward, r.done) for r in results] == [(False, 0.0, False)] * 5
    assert [result.truncated for result in results] == [False] * 4 + [True]
    assert {result.observation.state for result in results} == {first.state}
    env.close()


def test_one_field_may_be_the_whole_action() -> None:
    env = OpenEnvEnv()
    first = env.reset(to_goal(2, field="direction", show="goal"), 0)
    assert (text(first), first.actions) == ("2", ("left", "right"))
    assert env.step(" right\n").valid
    assert not env.step("up").valid
    assert env.step("right").success
    [echo] = tasks("Echo", field="message")
    assert env.reset(echo, 0).actions is None
    assert text(env.step(" hi\n").observation) == "heard  hi\n", "a text is taken as it is"
    assert env.step("bye").done
    env.close()


def test_a_state_of_counters_only_is_no_state() -> None:
    [task] = tasks("Echo")
    env = OpenEnvEnv()
    first = env.reset(task, 0)
    assert (text(first), first.state) == ("say something", None)
    result = env.step('{"message": "bye"}')
    assert (result.done, result.reward, result.success) == (True, 0.0, False)
    env.close()


def test_the_moves_that_an_environment_lists_are_its_actions() -> None:
    env = OpenEnvEnv()
    [task] = tasks("Listed")
    assert env.reset(task, 0).actions == ('{"direction": "right", "steps": 1}', '{"direction": "right", "steps": 2}')
    [task] = tasks("Listed", field="steps")
    assert env.reset(task, 0).actions == ("1", "2")
    env.close()


def test_the_task_decides_the_start_and_reset_takes_arguments() -> None:
    env = OpenEnvEnv()
    shown = [text(env.reset(task, 0)) for task in tasks("Line", 30)]
    assert shown == [text(env.reset(task, 1)) for task in tasks("Line", 30)]
    assert len(set(shown)) == 5
    [task] = tasks("Line", settings={"length": 1}, reset={"start": 7})
    assert text(env.reset(task, 0)) == '{"place": 7, "goal": 1}'
    assert env.step('{"direction": "left"}').truncated is False
    env.close()


def test_an_environment_that_fails_fails_the_episode() -> None:
    env = OpenEnvEnv()
    env.reset(to_goal(3), 0)
    with pytest.raises(EpisodeError, match="the OpenEnv environment failed: ValueError: off the line"):
        env.step('{"direction": "left", "steps": 9}')
    env.close()
    [task] = tasks("Line", reset={"start": "here"})
    with pytest.raises(EpisodeError, match="cannot be reset: ValidationError"):
        env.reset(task, 0)
    [task] = tasks("Echo", show="sound")
    with pytest.raises(EpisodeError, match="an observation has no field sound: it has text"):
        env.reset(task, 0)


def test_it_is_closed() -> None:
    env = OpenEnvEnv()
    env.reset(to_goal(3), 0)
    inner = env._env
    env.close()
    env.close()
    assert inner.closed


def test_splits_never_meet() -> None:
    train, held_out = tasks("Line", 50), tasks("Line", 50, split="held_out", max_turns=3)
    assert not {task.data["seed"] for task in train} & {task.data["seed"] for task in held_out}
    assert train == tasks("Line", 50) != tasks("Line", 50, seed=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option env"),
        ({"env": f"{FILE}:Untyped"}, "Untyped.step does not say which Action it takes"),
        ({"env": f"{FILE}:OneThread"}, "has to stay on one thread"),
        ({"env": f"{FILE}:Heard", "settings": {"text": "a"}}, "makes a Heard, not an OpenEnv Environment"),
        ({"env": f"{FILE}:Line", "field": "speed"}, "have no field 'speed': they have metadata, direction, steps"),
        ({"env": f"{FILE}:Line", "settings": {"width": 2}}, "unexpected keyword argument 'width'"),
        ({"env": f"{FILE}:Circle"}, "there is no function Circle"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_reason(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks("openenv", 2, 0, options)
