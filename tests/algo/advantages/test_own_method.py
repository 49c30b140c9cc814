"""Credit by a user's function, and by a scalar baseline."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.algo.advantages import StepTable, credit, own_method, step_advantages
from headrace.algo.advantages.episode_level import dr_grpo, reinforce
from headrace.errors import ConfigError
from support.rollout_groups import group

GROUPS = (group(0, rewards=(0.0, 1.0)), group(1, rewards=(2.0, 2.0, 5.0)))


def by_rank(rewards: Any, groups: Any, *, scale: float = 1.0) -> list[float]:
    return [scale * sum(reward > other for other in rewards) for reward in rewards]


def by_length(rewards: Any, groups: Any, lengths: Any) -> Any:
    return rewards / lengths


def last_only(table: StepTable) -> Any:
    return np.where(table.last_S, table.reward_S, 0.0)


def test_the_baseline_is_taken_off_every_reward() -> None:
    # R - 0.5 whatever the group, also where all are equal or one is alone
    out = reinforce(np.array([1.0, 1.0, 0.0]), np.array([0, 0, 1]), baseline=0.5)
    assert out.values.tolist() == [0.5, 0.5, -0.5]
    assert out.health["credit/zero_variance_share"].value() == 1.0
    credited = credit(GROUPS, method="reinforce", params={"baseline": -1.0}).episodes
    assert [episode.advantages[0] for episode in credited] == [1.0, 2.0, 3.0, 3.0, 6.0]


def test_a_function_of_rewards_gives_every_step_of_an_episode_its_number() -> None:
    credited = credit(GROUPS, method=own_method(by_rank, "mine.py:by_rank"), params={"scale": 0.5}).episodes
    ranks = [0.0, 0.5, 1.0, 1.0, 2.0]
    assert [set(episode.advantages) for episode in credited] == [{rank} for rank in ranks]
    assert credited[1].parts is not None
    assert credited[1].parts[0].episode == 0.5


def test_a_function_of_the_table_gives_every_step_its_own() -> None:
    method = own_method(last_only, "mine.py:last_only")
    assert method.by_step
    batch = credit(GROUPS, method=method)
    for episode in batch.episodes:
        assert episode.advantages == (episode.scored.reward.total,)
        assert episode.parts is not None
        assert episode.parts[-1].step == episode.advantages[-1]
    table = StepTable(
        group_E=np.array([0, 0]),
        length_E=np.array([2, 3]),
        tokens_E=np.array([4, 6]),
        total_E=np.array([0.5, 2.0]),
        success_E=np.array([False, True]),
        reward_S=np.array([0.25, 0.25, 0.5, 0.5, 1.0]),
        state_S=np.array([0, 1, 0, 1, 2]),
        valid_S=np.ones(5, dtype=bool),
    )
    steps = step_advantages(table, method=method)
    assert steps.values.tolist() == [0.0, 0.25, 0.0, 0.0, 1.0]
    assert steps.parts is not None
    assert steps.parts.peers_S.tolist() == [2, 2, 2, 2, 1]
    assert steps.parts.returns_S.tolist() == [0.5, 0.25, 2.0, 1.5, 1.0]
    assert batch.health["credit/reward_mean"].value() == 2.0


def test_a_function_that_computes_a_method_of_ours_gives_its_numbers() -> None:
    def centred(rewards: Any, groups: Any) -> Any:
        return dr_grpo(rewards, groups)  # what ours return is taken too

    own = credit(GROUPS, method=own_method(centred, "mine.py:centred"))
    ours = credit(GROUPS, method="dr_grpo")
    assert [e.advantages for e in own.episodes] == [e.advantages for e in ours.episodes]
    assert own.episodes[0].parts == ours.episodes[0].parts
    assert {name: metric.value() for name, metric in own.health.items()} == {
        name: metric.value() for name, metric in ours.health.items()
    }


def test_lengths_are_sampled_tokens() -> None:
    batch = credit(GROUPS, method=own_method(by_length, "mine.py:by_length"))
    for episode in batch.episodes:
        assert episode.advantages[0] == episode.scored.reward.total / episode.scored.episode.num_sampled


@pytest.mark.parametrize(
    ("fn", "params", "said"),
    [
        (lambda rewards: rewards, {}, r"credit mine\.py:f takes \(rewards\): write it as function\(rewards, groups\)"),
        (lambda table, groups: table, {}, r"takes \(table, groups\)"),
        (lambda rewards, groups: rewards[1:], {}, r"returned a ndarray of 4 numbers for 5 episodes"),
        (lambda table: [1.0], {}, r"returned a list of 1 numbers for \d+ steps"),
        (lambda rewards, groups: rewards.mean(), {}, r"returned a float64 of one numbers for 5 episodes"),
        (lambda rewards, groups: rewards / 0.0, {}, r"with (nan|inf) in it: return finite numbers"),
        (lambda rewards, groups: {"a": 1}, {}, r"returned a dict: return a number for each episode"),
        (lambda rewards, groups: rewards[99], {}, r"credit mine\.py:f failed: IndexError"),
        (by_rank, {"scales": 2.0}, r"takes no parameter 'scales': did you mean 'scale'\?"),
        (by_rank, {"scale": "a"}, r"must be a finite number, not 'a'"),
        (lambda rewards, groups, *, k: rewards, {}, r"needs a number 'k'"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
def test_what_is_no_credit_method_is_refused(fn: Callable[..., Any], params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        credit(GROUPS, method=own_method(fn, "mine.py:f"), params=params)


def test_a_function_cannot_change_the_table_of_rewards() -> None:
    def zeroed(rewards: Any, groups: Any) -> Any:
        rewards[:] = 0.0
        return rewards

    batch = credit(GROUPS, method=own_method(zeroed, "mine.py:zeroed"))
    assert batch.table.total_E.tolist() == [0.0, 1.0, 2.0, 2.0, 5.0]
    assert step_advantages(batch.table, method="reinforce").values.max() == 5.0
