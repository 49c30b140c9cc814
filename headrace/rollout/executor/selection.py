"""Choose the batch when more groups are ready than needed: the first to finish, or the highest-scoring. Pure."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace import names
from headrace.errors import RolloutError, boundary
from headrace.types import Group

Score = Callable[[Group], float]


def reward_spread(group: Group) -> float:
    """Return how much the group's rewards differ: the larger, the more there is to learn from comparing them."""
    rewards = [scored.reward.total for scored in group.episodes]
    return max(rewards) - min(rewards)


def mean_reward(group: Group) -> float:
    """Return the mean reward of the group's episodes."""
    return sum(scored.reward.total for scored in group.episodes) / len(group.episodes)


SCORES: Mapping[str, Score] = {"reward_spread": reward_spread, "mean_reward": mean_reward}
assert tuple(SCORES) == names.GROUP_SCORES


@dataclass(frozen=True, slots=True)
class TakeFirst:
    """Take a batch as soon as it is complete."""

    def needed(self, batch_groups: int, oversampling: float) -> int:
        """Return how many groups must be ready before a batch is chosen."""
        return batch_groups

    def choose(self, groups: Sequence[Group], n: int, *, before: Collection[int] = ()) -> tuple[Group, ...]:
        """Choose the `n` first of `groups`, which are oldest first; groups with ids in `before` precede the others."""
        ids = {group.id for group in sorted(groups, key=lambda group: group.id not in before)[:n]}
        return tuple(group for group in groups if group.id in ids)


@dataclass(frozen=True, slots=True)
class TakeBest:
    """Take a batch when all groups started for it have ended; of two equal scores the older group wins."""

    score: Score

    def needed(self, batch_groups: int, oversampling: float) -> int:
        """Return how many groups must be ready before a batch is chosen."""
        return math.ceil(oversampling * batch_groups)

    def choose(self, groups: Sequence[Group], n: int, *, before: Collection[int] = ()) -> tuple[Group, ...]:
        """Choose the `n` highest-scoring of `groups`, in their order; groups with ids in `before` precede the others.

        Raises RolloutError when a score fails or is not finite.
        """
        scores = {group.id: self._score(group) for group in groups}
        ids = {group.id for group in sorted(groups, key=lambda group: (group.id not in before, -scores[group.id]))[:n]}
        return tuple(group for group in groups if group.id in ids)

    def _score(self, group: Group) -> float:
        name = getattr(self.score, "__name__", type(self.score).__name__)
        with boundary(RolloutError, f"score {name} failed on group {group.id}"):
            score = float(self.score(group))
        if not math.isfinite(score):
            raise RolloutError(f"score {name} gave {score} for group {group.id}: let it return a finite number")
        return score


GroupSelection = TakeFirst | TakeBest
