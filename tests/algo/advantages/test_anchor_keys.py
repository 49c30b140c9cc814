"""In which state a step was taken: the environment's word, or what was shown last, or what a user's function says."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.algo.advantages.anchor_keys import KEYS, default_keys, key_of, keys_by, observation_keys, state_keys
from headrace.algo.advantages.credit import credit
from headrace.algo.datum import observations, step_positions
from headrace.errors import RolloutError
from headrace.types import Message, Task
from support.credit_examples import group, walk


def test_the_same_sight_is_the_same_state_wherever_it_comes() -> None:
    """Also the start, which the task's own messages stand before."""
    hall, yard, again = observation_keys(walk("hall", "yard", "hall"))
    assert hall == again
    assert hall != yard
    assert observation_keys(walk("yard"))[0] == yard


def test_a_task_that_says_it_all_is_its_own_sight() -> None:
    task = Task(id="t", messages=(Message(role="user", content="2 + 2"),))
    messages = (*task.messages, Message(role="assistant", content="4"))
    alone = replace(walk("x"), task=task, messages=messages)
    assert observations(alone) == [task.messages]
    assert observation_keys(alone)[0] is not None


def test_tool_messages_are_part_of_what_was_shown() -> None:
    told = [Message(role="tool", content=text, name="look") for text in ("a door", "a key")]
    played = walk("hall", "yard")
    seen = replace(played, messages=(*played.messages[:3], *told, *played.messages[3:]))
    assert [message.content for message in observations(seen)[1]] == ["a door", "a key", "yard"]
    assert observation_keys(seen)[1] != observation_keys(played)[1]


def test_without_a_conversation_there_is_no_key() -> None:
    silent = replace(walk("hall", "yard"), messages=())
    assert step_positions(silent) == [None, None]
    assert list(observation_keys(silent)) == [None, None]


def test_the_environments_key_comes_first() -> None:
    played = walk("hall", "yard", states=("h", None))
    assert list(default_keys(played)) == ["h", observation_keys(played)[1]]
    assert list(state_keys(played)) == ["h", None]
    assert set(KEYS) == {"auto", "state", "observation"}


def test_a_users_anchor_decides_who_are_peers() -> None:
    # By the environment's states nothing is shared after the start; by the first letter, both second steps are.
    one, two = walk("s", "x1", states=("s", "x1")), walk("s", "x2", states=("s", "x2"), id="0/1")
    groups = [group(one, two, rewards=(1.0, 0.0))]
    params: dict[str, float | str] = {"gamma": 1.0, "norm": "none"}
    by_state = credit(groups, method="gigpo", params=params)
    by_letter = credit(groups, method="gigpo", params=params, keys=keys_by(lambda step, episode: step.state[0]))
    assert by_state.episodes[0].advantages == (1.0, 0.5)  # A_E 0.5, A_S 0.5 and 0
    assert by_letter.episodes[0].advantages == (1.0, 1.0)
    assert by_letter.episodes[1].parts is not None
    assert [part.anchor for part in by_letter.episodes[1].parts] == ["s", "x"]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (1, "1", False),
        ((1, 2), [1, 2], True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        (np.zeros((2, 3)), np.zeros((3, 2)), False),
        (np.zeros(2, dtype=np.float32), np.zeros(2), False),
        (np.arange(4), np.arange(4), True),
        (np.arange(8)[::2], np.array([0, 2, 4, 6]), True),
        ([None, "x"], [None, "x"], True),
    ],
)
def test_keys_are_equal_where_values_are(one: object, other: object, equal: bool) -> None:
    assert (key_of(one) == key_of(other)) is equal


def test_what_has_no_key() -> None:
    assert key_of(None) is None
    with pytest.raises(RolloutError, match=r"an anchor is a object: return text, a number"):
        key_of(object())
    with pytest.raises(RolloutError, match="the anchor function failed on episode 0/0: ZeroDivisionError"):
        keys_by(lambda step, episode: 1 / 0)(walk("hall"))
