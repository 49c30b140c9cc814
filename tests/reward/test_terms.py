"""The reward functions that come with the package."""

import pytest
import reasoning_gym

from headrace.errors import RewardError
from headrace.reward.alignment import as_reward
from headrace.reward.terms import BUILTIN
from headrace.types import Episode, Reward
from support.reward_episodes import episode


def _score(name: str, played: Episode) -> Reward:
    return as_reward(BUILTIN[name](played), played)


def test_env_adds_up_what_the_environment_gave() -> None:
    reward = _score("env", episode("a", "b", "c", rewards=(0.25, -1.0, 2.0)))
    assert reward == Reward(total=1.25, steps=(0.25, -1.0, 2.0))


@pytest.mark.parametrize(
    ("answers", "answer", "right"),
    [
        (("4 6",), "4 6", True),
        ((" 46\n",), 46, True),
        (("46", "47"), "46", False),  # the last answer counts
        (("four six",), "4 6", False),
        (("",), "4 6", False),
    ],
)
def test_exact_match_compares_the_last_answer(answers: tuple[str, ...], answer: object, right: bool) -> None:
    assert _score("exact_match", episode(*answers, answer=answer)) == Reward(total=float(right), success=right)


def test_exact_match_without_an_answer_to_compare_with_is_unknown() -> None:
    with pytest.raises(RewardError, match='task t has no "answer" in its data'):
        _score("exact_match", episode("46"))


def test_reasoning_gym_scores_by_the_dataset_that_asked() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    right = episode(f" {entry['answer']} ", entry=entry, dataset="chain_sum")
    assert _score("reasoning_gym", right) == Reward(total=1.0, success=True)
    by_metadata = _score("reasoning_gym", episode("no number at all", entry=entry))
    assert by_metadata.total < 1.0
    assert by_metadata.success is False


def test_reasoning_gym_without_entry_or_dataset_is_unknown() -> None:
    with pytest.raises(RewardError, match='no "entry"'):
        _score("reasoning_gym", episode("1"))
    with pytest.raises(RewardError, match="which reasoning-gym dataset"):
        _score("reasoning_gym", episode("1", entry={"answer": "1"}))
