"""Filters decide on one group; each rejection has a reason that can be a metric name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, RolloutError
from headrace.rollout.filters import (
    Filter,
    Keep,
    Reject,
    diversity,
    first_rejection,
    length,
    named_filter,
    reward_range,
    reward_spread,
    success_rate,
)
from headrace.types import Group, Task
from support.rollout_groups import group, scored

TASK = Task(id="t")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_reward_spread_rejects_exactly_the_constant_groups(rewards: list[float]) -> None:
    decision = reward_spread()(group(0, rewards=rewards))
    assert decision == (Reject("reward_spread") if len(set(rewards)) == 1 else Keep())


def test_reward_spread_with_a_floor() -> None:
    decide = reward_spread(min_spread=0.5)
    assert decide(group(0, rewards=(0.0, 0.5))) == Reject("reward_spread")
    assert decide(group(0, rewards=(0.0, 0.75))) == Keep()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 1.0), Keep()),  # mean 0.5
        ((0.0, 0.5), Keep()),  # 0.25, the lower end
        ((0.0, 0.4), Reject("reward_low")),
        ((1.0, 0.75), Reject("reward_high")),
    ],
)
def test_reward_range_holds_for_the_mean(rewards: tuple[float, float], expected: object) -> None:
    assert reward_range(low=0.25, high=0.75)(group(0, rewards=rewards)) == expected


def test_a_group_of_copies_is_rejected() -> None:
    """Episodes of 1, 1, 1 and 2 tokens 0, 1, ...: two different answers of four."""
    episodes = tuple(scored(TASK, 0.0, versions=[0] * n) for n in (1, 1, 1, 2))
    made = Group(id=0, task=TASK, episodes=episodes)
    assert diversity()(made) == Keep()
    assert diversity(min_share=0.75)(made) == Reject("diversity")
    assert diversity(min_share=0.75)(Group(id=0, task=TASK, episodes=episodes[2:])) == Keep()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((2, 4), Keep()), ((1, 4), Reject("too_short")), ((2, 5), Reject("too_long")), ((3, 3), Keep())],
)
def test_length_window_holds_for_every_episode(lengths: tuple[int, int], expected: object) -> None:
    episodes = tuple(scored(TASK, 0.0, versions=[0] * n) for n in lengths)
    assert length(min_tokens=2, max_tokens=4)(Group(id=0, task=TASK, episodes=episodes)) == expected


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((True, False, False, False), Keep()),  # 1/4, the lower end
        ((True, True, True, False), Keep()),  # 3/4, the upper end
        ((False, False, False), Reject("too_hard")),
        ((True, True, True), Reject("too_easy")),
        ((None, True, False), Keep()),  # 1/2: no verdict does not count
    ],
)
def test_success_rate_window(verdicts: tuple[bool | None, ...], expected: object) -> None:
    episodes = tuple(scored(TASK, 0.0, success=success) for success in verdicts)
    assert success_rate(low=0.25, high=0.75)(Group(id=0, task=TASK, episodes=episodes)) == expected


def test_success_rate_without_any_verdict_says_what_to_do() -> None:
    with pytest.raises(RolloutError, match="set `success`"):
        success_rate()(group(0))


def test_first_objection_wins() -> None:
    filters: list[Filter] = [lambda group: True, lambda group: Reject("my reason!"), reward_spread()]
    assert first_rejection(filters, group(0, rewards=(1.0, 1.0))) == Reject("my_reason")
    assert first_rejection(filters[:1], group(0)) is None


def test_false_rejects_in_the_functions_name() -> None:
    def is_odd(group: Group) -> bool:
        return bool(group.id % 2)

    assert first_rejection([is_odd], group(2)) == Reject("is_odd")
    assert first_rejection([is_odd], group(3)) is None
    assert first_rejection([lambda group: np.False_], group(3)) == Reject("lambda")  # type: ignore[list-item, return-value]


def test_failing_or_odd_filters_are_named() -> None:
    def divides(group: Group) -> bool:
        return 1 // group.id > 0

    def forgets(group: Group) -> bool:
        return None  # type: ignore[return-value]

    with pytest.raises(RolloutError, match="divides failed on group 0: ZeroDivisionError"):
        first_rejection([divides], group(0))
    with pytest.raises(RolloutError, match="forgets returned NoneType"):
        first_rejection([forgets], group(0))


def test_named_filters() -> None:
    decide = named_filter("length", {"max_tokens": 1})
    assert decide(group(0, versions=(0, 0))) == Reject("too_long")
    with pytest.raises(ConfigError, match="did you mean 'reward_spread'"):
        named_filter("reward_spraed", {})
    with pytest.raises(ConfigError, match="max_token"):
        named_filter("length", {"max_token": 1})
