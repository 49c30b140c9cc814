"""What reward functions may return, and the built-in ones."""

import numpy as np
import pytest
import reasoning_gym
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, dictionaries, floats, sampled_from
from reward_episodes import episode

from headrace.errors import RewardError
from headrace.reward.terms import BUILTIN, as_reward
from headrace.types import Episode, Reward


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (0.5, Reward(total=0.5)),
        (2, Reward(total=2.0)),
        (True, Reward(total=1.0, success=True)),
        (False, Reward(total=0.0, success=False)),
        (np.float32(0.25), Reward(total=0.25)),
        (np.bool_(True), Reward(total=1.0, success=True)),
        (torch.tensor(0.75), Reward(total=0.75)),
        ({"score": 1, "format": 0.5}, Reward(total=1.0, parts={"format": 0.5})),
        ({"total": 0.5, "success": True, "steps": [0, 0.5]}, Reward(total=0.5, steps=(0.0, 0.5), success=True)),
        (Reward(total=3.0, steps=(1.0, 2.0)), Reward(total=3.0, steps=(1.0, 2.0))),
    ],
)
def test_every_way_to_say_a_reward_is_understood(verdict: object, reward: Reward) -> None:
    assert as_reward(verdict, num_steps=2) == reward


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (None, "must be a number, not a NoneType"),
        ("1.0", "must be a number, not a str"),
        (1j, "must be a number, not a complex"),
        (np.ones(2), "must be a number, not a ndarray"),
        (float("nan"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        (Reward(total=float("nan")), "not a finite number"),
        ({"score": 1.0, "format": float("inf")}, "not a finite number"),
        ({"format": 1.0}, 'needs "score"; this one has format'),
        ({}, 'needs "score"; this one has nothing'),
        ({"score": None}, '"score" must be a number'),
        ({"score": 1.0, "success": 1}, '"success" of a reward is 1'),
        ({"score": 1.0, "steps": [1.0]}, "1 step rewards for 2 steps"),
        (Reward(total=1.0, steps=(0.0, 0.0, 1.0)), "3 step rewards for 2 steps"),
    ],
)
def test_what_is_no_reward_is_refused_with_a_reason(verdict: object, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        as_reward(verdict, num_steps=2)


@settings(deadline=None)
@given(
    floats(-10, 10),
    dictionaries(sampled_from(["format", "length"]), floats(-10, 10)),
    sampled_from([None, True, False]),
)
def test_a_dict_and_a_reward_say_the_same(total: float, parts: dict[str, float], success: bool | None) -> None:
    said = as_reward({"score": total, "success": success, **parts}, num_steps=1)
    assert said == as_reward(Reward(total=total, parts=parts, success=success), num_steps=1)


@settings(deadline=None)
@given(booleans())
def test_only_a_bool_is_a_verdict_by_itself(right: bool) -> None:
    assert as_reward(right, num_steps=1).success is right
    assert as_reward(float(right), num_steps=1).success is None


def _score(name: str, played: Episode) -> Reward:
    return as_reward(BUILTIN[name](played), num_steps=len(played.steps))


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
