"""Filters: decide whether a scored group is worth training on. Pure functions of one group.

A filter is any function `Group -> Keep | Reject`; a user's function may also return a bool (False rejects in the
function's own name). Rejected groups are replaced by new ones, counted as `rollout/filtered_<reason>`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace import names
from headrace.errors import ConfigError, RolloutError, boundary
from headrace.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Accept the group for training."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Reject the group."""

    reason: str  # becomes part of the metric `rollout/filtered_<reason>`


Decision = Keep | Reject
Filter = Callable[[Group], Decision | bool]


def reward_spread(*, min_spread: float = 0.0) -> Filter:
    """Reject a group whose rewards differ by no more than `min_spread`: its advantages are all zero (DAPO's
    dynamic sampling, arXiv 2503.14476)."""

    def decide(group: Group) -> Decision:
        rewards = [scored.reward.total for scored in group.episodes]
        return Keep() if max(rewards) - min(rewards) > min_spread else Reject("reward_spread")

    return decide


def reward_range(*, low: float = -math.inf, high: float = math.inf) -> Filter:
    """Reject a group whose mean reward lies outside [low, high]."""

    def decide(group: Group) -> Decision:
        mean = sum(scored.reward.total for scored in group.episodes) / len(group.episodes)
        if mean < low:
            return Reject("reward_low")
        return Reject("reward_high") if mean > high else Keep()

    return decide


def diversity(*, min_share: float = 0.5) -> Filter:
    """Reject a group in which fewer than `min_share` of the episodes differ in their sampled tokens: copies of one
    answer teach nothing by comparison."""

    def decide(group: Group) -> Decision:
        answers = [
            tuple(step.completion.tokens.tobytes() for step in scored.episode.steps) for scored in group.episodes
        ]
        return Keep() if len(set(answers)) >= min_share * len(answers) else Reject("diversity")

    return decide


def length(*, min_tokens: int = 0, max_tokens: int | None = None) -> Filter:
    """Reject a group in which an episode sampled fewer than `min_tokens` or more than `max_tokens` tokens."""

    def decide(group: Group) -> Decision:
        sampled = [scored.episode.num_sampled for scored in group.episodes]
        if min(sampled) < min_tokens:
            return Reject("too_short")
        return Reject("too_long") if max_tokens is not None and max(sampled) > max_tokens else Keep()

    return decide


def success_rate(*, low: float = 0.0, high: float = 1.0) -> Filter:
    """Reject a group whose share of successful episodes lies outside [low, high]; episodes without a verdict do not
    count. Raises RolloutError when no episode has one."""

    def decide(group: Group) -> Decision:
        verdicts = [scored.success for scored in group.episodes if scored.success is not None]
        if not verdicts:
            raise RolloutError(
                "the success_rate filter needs episodes that say whether they succeeded: let the environment or the "
                "reward function set `success`, or use reward_spread"
            )
        rate = sum(verdicts) / len(verdicts)
        if rate < low:
            return Reject("too_hard")
        return Reject("too_easy") if rate > high else Keep()

    return decide


FILTERS: Mapping[str, Callable[..., Filter]] = {
    "reward_spread": reward_spread,
    "reward_range": reward_range,
    "diversity": diversity,
    "length": length,
    "success_rate": success_rate,
}
assert tuple(FILTERS) == names.FILTERS


def named_filter(name: str, options: Mapping[str, Any]) -> Filter:
    """Return a built-in filter. Raises ConfigError that names the nearest one, or the option that is wrong."""
    if name not in FILTERS:
        near = names.near_name(name, FILTERS)
        hint = "" if near is None else f"did you mean {near!r}? "
        raise ConfigError(f"there is no filter {name!r}: {hint}there are {', '.join(FILTERS)}")
    with boundary(ConfigError, f"filter {name!r} does not take these options"):
        return FILTERS[name](**options)


def first_rejection(filters: Sequence[Filter], group: Group) -> Reject | None:
    """Return the first rejection, or None. Raises RolloutError when a filter fails or returns something else."""
    for decide in filters:
        name = getattr(decide, "__name__", type(decide).__name__)
        with boundary(RolloutError, f"filter {name} failed on group {group.id}"):
            decision = decide(group)
        match decision:
            case Keep():
                continue
            case Reject(reason):
                return Reject(_metric_name(reason))
            case bool() | np.bool_():
                if not decision:
                    return Reject(_metric_name(name))
            case _:
                raise RolloutError(
                    f"filter {name} returned {type(decision).__name__}: let it return a bool, Keep() or Reject(reason)"
                )
    return None


def _metric_name(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "filter"
