"""Which rollouts are saved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.names import SAVED_EPISODES
from headrace.observe.rollouts.saved_episodes import Selection, select_episodes
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)


def episode(name: str, group: int, *advantages: float, success: bool | None = False) -> CreditedEpisode:
    empty = float_array([])
    completion = Completion(
        tokens=int_array([]), sampler_logprobs=empty, raw_logprobs=empty, versions=int_array([]), stop=StopReason.STOP
    )
    step = Step(prompt=int_array([1]), completion=completion, action="a")
    played = Episode(id=name, task=Task(id="t"), seed=0, steps=(step,) * len(advantages), messages=(), temperature=1.0)
    scored = ScoredEpisode(episode=played, reward=Reward(total=0.0, success=success))
    return CreditedEpisode(scored=scored, group_id=group, advantages=advantages)


EPISODES = [
    episode("a", 0, 0.1, -2.0, success=True),
    episode("b", 0, 0.5),
    episode("c", 1, 1.5, success=True),
    episode("d", 1, -0.2, success=None),
    episode("e", 2),
]


def names(selection: Selection) -> str:
    return "".join(kept.scored.episode.id for kept in select_episodes(EPISODES, selection))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), "abcde"),
        (Selection(which="failures"), "bde"),
        (Selection(which="top_advantage", top=2), "ac"),
        (Selection(which="top_advantage", top=2, whole_groups=True), "abcd"),
        (Selection(which="top_advantage", top=99), "abcde"),
        (Selection(every_episode=2), "ace"),
        (Selection(which="failures", every_episode=2), "be"),
        (Selection(which=lambda kept: kept.group_id == 1), "cd"),
        (Selection(which=lambda kept: kept.scored.episode.id == "c", whole_groups=True), "cd"),
        (Selection(which=lambda kept: False), ""),
    ],
)
def test_which_episodes_are_kept(selection: Selection, expected: str) -> None:
    assert names(selection) == expected


def test_which_training_steps_are_kept() -> None:
    assert [step for step in range(1, 10) if Selection().takes_step(step)] == list(range(1, 10))
    assert [step for step in range(1, 10) if Selection(every=4).takes_step(step)] == [1, 4, 8]
    assert [step for step in range(1, 10) if Selection(every=0).takes_step(step)] == []


def test_failed_episodes_go_with_all_and_with_failures() -> None:
    assert [which for which in SAVED_EPISODES if Selection(which=which).takes_failed] == ["all", "failures"]
    assert not Selection(which=lambda kept: True).takes_failed


def test_a_function_that_fails_says_where() -> None:
    def broken(kept: CreditedEpisode) -> bool:
        raise KeyError("no such part")

    with pytest.raises(ConfigError, match=r"rl\.save\.which failed: KeyError.*no such part"):
        select_episodes(EPISODES, Selection(which=broken))


@given(
    st.sampled_from(SAVED_EPISODES),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_a_choice_keeps_the_order_and_whole_groups_if_asked(
    which: str, every: int, top: int, whole: bool, groups: list[int]
) -> None:
    episodes = [episode(str(k), group, 0.1 * k, success=k % 2 == 0) for k, group in enumerate(groups)]
    selection = Selection(which=which, every_episode=every, top=top, whole_groups=whole)
    kept = select_episodes(episodes, selection)
    assert [k for k in episodes if any(k is other for other in kept)] == list(kept)
    if whole:
        touched = {one.group_id for one in kept}
        assert len(kept) == sum(group in touched for group in groups)
