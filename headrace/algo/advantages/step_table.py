"""Lay out the steps of a batch as columns, the input of every step-level method. E episodes, S steps.

Rows of S run episode after episode, each in time order. Task groups and states are numbers; equal numbers mean equal
states, within a group only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.advantages.anchor_keys import Keys, KeysFn, default_keys
from headrace.algo.advantages.group_stats import Bools, Floats, Ints
from headrace.types import Group, ScoredEpisode

NO_STATE = -1  # in `state_S`: the step has no anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """The steps of a batch as columns."""

    group_E: Ints
    length_E: Ints  # steps
    tokens_E: Ints  # sampled tokens
    total_E: Floats  # the episode's reward
    success_E: Bools
    reward_S: Floats  # the step's share of the episode's reward
    state_S: Ints  # number of the anchor state, or NO_STATE
    valid_S: Bools  # the environment accepted the action

    def __post_init__(self) -> None:
        assert len(self.group_E) == len(self.length_E) == len(self.tokens_E) == len(self.total_E) == len(self.success_E)
        assert int(self.length_E.sum()) == len(self.reward_S) == len(self.state_S) == len(self.valid_S)
        assert (self.state_S >= NO_STATE).all()

    @property
    def episode_S(self) -> Ints:
        return np.repeat(np.arange(len(self.length_E)), self.length_E)

    @property
    def group_S(self) -> Ints:
        return np.repeat(self.group_E, self.length_E)

    @property
    def last_S(self) -> Bools:
        """Mark the last step of each episode."""
        last_S = np.zeros(len(self.reward_S), dtype=bool)
        last_S[np.cumsum(self.length_E)[self.length_E > 0] - 1] = True
        return last_S


def anchors_of(groups: Sequence[Group], keys: KeysFn = default_keys) -> Keys:
    """Name the anchor key of every step of all scored episodes, in the order of the table's rows."""
    keyed = [(scored.episode, keys(scored.episode)) for group in groups for scored in group.episodes]
    assert all(len(episode_keys) == len(episode.steps) for episode, episode_keys in keyed)
    return [key for _, episode_keys in keyed for key in episode_keys]


def step_table(groups: Sequence[Group], anchors: Keys | None = None) -> StepTable:
    """Make the columns of all scored episodes, with these anchor keys.

    Without step rewards, an episode's total is the reward of its last step.
    """
    episodes = [scored for group in groups for scored in group.episodes]
    steps = [step for scored in episodes for step in scored.episode.steps]
    anchors = anchors_of(groups) if anchors is None else anchors
    assert len(anchors) == len(steps)
    numbers: dict[str, int] = {}
    return StepTable(
        group_E=np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups]),
        length_E=np.array([len(scored.episode.steps) for scored in episodes], dtype=np.int64),
        tokens_E=np.array([scored.episode.num_sampled for scored in episodes], dtype=np.int64),
        total_E=np.array([scored.reward.total for scored in episodes], dtype=np.float64),
        success_E=np.array([bool(scored.success) for scored in episodes], dtype=bool),
        reward_S=np.array([reward for scored in episodes for reward in _step_rewards(scored)], dtype=np.float64),
        state_S=np.array(
            [NO_STATE if key is None else numbers.setdefault(key, len(numbers)) for key in anchors],
            dtype=np.int64,
        ),
        valid_S=np.array([step.valid for step in steps], dtype=bool),
    )


def penalize(table: StepTable, penalty: float) -> StepTable:
    """Subtract `penalty` from the reward of every invalid step, before discounting, and from its episode's total."""
    if not penalty:
        return table
    loss_S = np.where(table.valid_S, 0.0, penalty)
    return StepTable(
        group_E=table.group_E,
        length_E=table.length_E,
        tokens_E=table.tokens_E,
        total_E=table.total_E - np.bincount(table.episode_S, weights=loss_S, minlength=len(table.total_E)),
        success_E=table.success_E,
        reward_S=table.reward_S - loss_S,
        state_S=table.state_S,
        valid_S=table.valid_S,
    )


def discount(values_S: Floats, length_E: Ints, factor: float | Floats) -> Floats:
    """Compute out_t = values_t + factor * out_{t+1} within each episode; one factor for all, or one per episode.

    One vectorised pass per time step, over the episodes that are that long: linear in the number of steps.
    """
    assert int(length_E.sum()) == len(values_S)
    order_E = np.argsort(-length_E, kind="stable")
    lengths_E = length_E[order_E]
    starts_E = (np.cumsum(length_E) - length_E)[order_E]
    factor_E = np.broadcast_to(factor, lengths_E.shape)[order_E]
    out_S = values_S.astype(np.float64).copy()
    longest = int(lengths_E[0]) if len(lengths_E) else 0
    num_longer = np.searchsorted(-lengths_E, -np.arange(1, longest + 1), side="left")  # episodes longer than t = 1, ...
    for t in range(longest - 2, -1, -1):
        rows = starts_E[: num_longer[t]] + t
        out_S[rows] += factor_E[: num_longer[t]] * out_S[rows + 1]
    return out_S


def _step_rewards(scored: ScoredEpisode) -> tuple[float, ...]:
    length = len(scored.episode.steps)
    if scored.reward.steps is not None:
        assert len(scored.reward.steps) == length
        return scored.reward.steps
    return (0.0,) * (length - 1) + (scored.reward.total,) * min(length, 1)
