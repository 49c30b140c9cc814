"""Step outputs find their steps, or it is said why not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, composite, floats, integers, lists, sampled_from

from headrace.algo.datum import step_positions
from headrace.errors import RewardError, RolloutError
from headrace.reward.alignment import Alignment, find_steps, make_reward
from headrace.reward.episode_json import episode_from_row, episode_to_row
from headrace.reward.reward_runner import FailureRateLimit, GroupRewardRunner
from headrace.reward.terms import GroupTerm
from headrace.types import Episode, FailedEpisode, Message, Reward, ScoredEpisode
from support.reward_episodes import episode

TWO = episode("up", "down")  # user, assistant, user, assistant: places 1 and 3, turns 0 and 1


def with_prompt(played: Episode, *roles: str) -> Episode:
    """The same episode after a longer beginning."""
    return replace(played, messages=(*(Message(role=role, content="x") for role in roles), *played.messages))


# --- step indices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "steps"),
    [
        ([1, 3], [0, 1]),  # places in the conversation: 3 is no turn
        ([0, 1], [0, 1]),  # turns: 0 is no assistant's place
        ([3], [1]),
        ([0], [0]),
        ([-1], [1]),
        ([-2, -1], [0, 1]),
        (["0/0/1"], [1]),
        (["0/0/0", 3], [0, 1]),
        ([], []),
    ],
)
def test_indices_by_hand(indices: list[object], steps: list[int]) -> None:
    assert find_steps(indices, TWO) == steps


def test_a_sparse_index_that_could_be_both_must_be_declared() -> None:
    with pytest.raises(RewardError, match=r'the step indices 1 could be .* set step_index = "message" or "turn"'):
        find_steps([1], TWO)
    assert find_steps([1], TWO, "message") == [0]
    assert find_steps([1], TWO, "turn") == [1]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([2], "step_index 2 is not a step of this episode, which has 2"),
        ([7], "step_index 7 is not a step"),
        ([-3], "step_index -3 is not a step"),
        (["0/1/0"], "step_index '0/1/0' is not a step"),
        ([0, 0], "step_index 0 names a step that has an output already"),
        ([0, "0/0/0"], "names a step that has an output already"),
        ([1.0], "it must be a whole number or a step's id"),
        ([True], "it must be a whole number or a step's id"),
    ],
)
def test_an_index_that_is_no_steps_is_an_error(indices: list[object], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        find_steps(indices, TWO)


def test_assistant_messages_of_the_prompt_are_no_steps() -> None:
    played = with_prompt(TWO, "user", "assistant")  # places 3 and 5, turns 1 and 2
    assert step_positions(played) == [3, 5]
    assert find_steps([3, 5], played) == [0, 1]
    assert find_steps([1, 2], played) == [0, 1]
    with pytest.raises(RewardError, match="step_index 0 is not a step"):
        find_steps([0], played)


@composite
def conversations(draw: object) -> Episode:
    answers = draw(integers(1, 5))  # type: ignore[operator]
    prompt = draw(lists(sampled_from(["system", "user"]), max_size=3))  # type: ignore[operator]
    return with_prompt(episode(*["x"] * answers), *prompt)


@given(conversations(), booleans())
@settings(max_examples=60, deadline=None)
def test_naming_every_step_is_never_ambiguous(played: Episode, by_place: bool) -> None:
    """Whichever way the author counts; the user's message before the last answer tells the two apart."""
    places = [place for place, message in enumerate(played.messages) if message.role == "assistant"]
    indices = places if by_place else range(len(places))
    assert find_steps(list(indices), played) == list(range(len(played.steps)))


# --- step outputs -----------------------------------------------------------------------------------------------------


def outputs(*pairs: tuple[object, float]) -> dict[str, object]:
    return {"score": 10.0, "step_outputs": [{"step_index": index, "base_reward": value} for index, value in pairs]}


@pytest.mark.parametrize(
    ("alignment", "steps"),
    [
        (Alignment(), (0.0, 2.0)),
        (Alignment(default_step_reward=-0.5), (-0.5, 2.0)),
        (Alignment(terminal_score="add"), (0.0, 12.0)),
    ],
)
def test_steps_without_an_output_and_the_score_at_the_end(alignment: Alignment, steps: tuple[float, ...]) -> None:
    reward = make_reward(outputs((3, 2.0)), TWO, alignment)
    assert (reward.total, reward.steps) == (10.0, steps)


def test_without_step_outputs_the_score_is_all_there_is() -> None:
    assert make_reward({"score": 1.0}, TWO, Alignment()) == Reward(total=1.0)
    assert make_reward({"score": 1.0, "step_outputs": []}, TWO, Alignment()).steps == (0.0, 1.0)
    every_step_costs = Alignment(default_step_reward=-0.5)
    assert make_reward({"score": 1.0}, TWO, every_step_costs) == Reward(total=1.0, steps=(-0.5, 0.5))


def test_a_score_that_is_marked_as_not_valid_counts_only_if_asked_for() -> None:
    verdict = {"score": 0.0, "invalid": "the score is marked as not valid: wrong"}
    with pytest.raises(RewardError, match="marked as not valid: wrong"):
        make_reward(verdict, TWO, Alignment())
    assert make_reward(verdict, TWO, Alignment(keep_invalid=True)).total == 0.0
    with pytest.raises(RewardError, match="it returned None"):
        make_reward({"invalid": "it returned None"}, TWO, Alignment(keep_invalid=True))


def test_a_score_outside_of_its_range_is_refused() -> None:
    assert make_reward({"score": 1.0}, TWO, Alignment(score_range=(0.0, 1.0))).total == 1.0
    with pytest.raises(RewardError, match=r"the score 1\.5 is outside of 0 to 1"):
        make_reward({"score": 1.5}, TWO, Alignment(score_range=(0.0, 1.0)))


# --- rows ------------------------------------------------------------------------------------------------------------


@given(lists(floats(-2, 2), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_an_episode_survives_the_journey(rewards: list[float]) -> None:
    played = episode(*["x"] * len(rewards), rewards=tuple(rewards), answer="x")
    again = episode_from_row(episode_to_row(played, with_tokens=True))
    assert episode_to_row(again, with_tokens=True) == episode_to_row(played, with_tokens=True)
    assert again.env_reward == played.env_reward
    assert again.steps[0].completion.tokens.tolist() == [5]


def test_tokens_stay_at_home_unless_asked_for() -> None:
    assert "tokens" not in episode_to_row(TWO, with_tokens=False)["steps"][0]


# --- too many in vain ------------------------------------------------------------------------------------------------


def scored(count: int) -> list[ScoredEpisode | FailedEpisode]:
    return [ScoredEpisode(episode=TWO, reward=Reward(total=1.0))] * count


def in_vain(count: int) -> list[ScoredEpisode | FailedEpisode]:
    return [FailedEpisode(id="0/0", task=TWO.task, reason="the judge is out")] * count


def test_the_share_of_the_last_evaluations_counts() -> None:
    share = FailureRateLimit(limit=0.1, window=100, at_least=50)
    share.note(in_vain(6))
    share.check()  # six of six, but too early to tell
    share.note(scored(54))
    share.check()  # 6 of 60 is exactly a tenth
    share.note(in_vain(1))
    with pytest.raises(RolloutError, match=r"7 of the last 61 episodes have no reward.*10%.*the judge is out"):
        share.check()
    share.note(scored(100))
    share.check()


async def test_a_runner_stops_when_too_many_are_in_vain() -> None:
    async def judge(episodes: object) -> list[Reward | RewardError]:
        return [RewardError("the judge is out")] * 10

    runner = GroupRewardRunner([GroupTerm(name="mine", judge=judge)], max_invalid_share=0.1)
    for _ in range(5):
        assert all(isinstance(item, FailedEpisode) for item in await runner.score([TWO] * 10))
    with pytest.raises(RolloutError, match="50 of the last 50 episodes have no reward"):
        await runner.score([TWO] * 10)
