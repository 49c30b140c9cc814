"""Which of more groups than a batch has are trained: those that ended first, or those that score highest. Pure."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace import names
from headrace.errors import RolloutError, boundary
from headrace.types import Group

Score = Callable[[Group], float]


def reward_spread(group: Group) -> float:
    """How much the rewards of a group differ: the larger, the more there is to learn from comparing them."""
    rewards = [scored.reward.total for scored in group.episodes]
    return max(rewards) - min(rewards)


def mean_reward(group: Group) -> float:
    return sum(scored.reward.total for scored in group.episodes) / len(group.episodes)


SCORES: Mapping[str, Score] = {"reward_spread": reward_spread, "mean_reward": mean_reward}
assert tuple(SCORES) == names.GROUP_SCORES


@dataclass(frozen=True, slots=True)
class KeepFirst:
    """A batch is taken as soon as it is complete."""

    def needed(self, batch_groups: int, oversampling: float) -> int:
        return batch_groups

    def choose(self, groups: Sequence[Group], n: int, *, before: Collection[int] = ()) -> tuple[Group, ...]:
        """The `n` first of `groups`, which are oldest first; those whose ids are in `before` go before the others."""
        ids = {group.id for group in sorted(groups, key=lambda group: group.id not in before)[:n]}
        return tuple(group for group in groups if group.id in ids)


@dataclass(frozen=True, slots=True)
class KeepBest:
    """A batch is taken when all that were started for it have ended; the older of two equal ones is better."""

    score: Score

    def needed(self, batch_groups: int, oversampling: float) -> int:
        return math.ceil(oversampling * batch_groups)

    def choose(self, groups: Sequence[Group], n: int, *, before: Collection[int] = ()) -> tuple[Group, ...]:
        """The `n` highest of `groups`, in the order they are in. Raises RolloutError when there is no finite score."""
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


Keep = KeepFirst | KeepBest
