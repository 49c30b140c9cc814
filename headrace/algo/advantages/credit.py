"""From groups of scored episodes to one advantage per step, by the name of the method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature

import numpy as np

from headrace.algo.advantages.episode import Advantages, dr_grpo, grpo, rloo
from headrace.algo.lookup import check_numbers, lookup
from headrace.types import CreditedEpisode, Group, Metric

EPISODE_METHODS: Mapping[str, Callable[..., Advantages]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
NO_PARAMS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """Every scored episode with its advantages, in the order of the groups, and the health of the signal."""

    episodes: tuple[CreditedEpisode, ...]
    health: Mapping[str, Metric]


def credit(groups: Sequence[Group], *, method: str, params: Mapping[str, float] = NO_PARAMS) -> Credited:
    """Advantages by `method`, an episode's on each of its steps; failed episodes take no part.

    Groups are compared by their place in `groups`, never by the order in which episodes ended. Raises ConfigError on
    an unknown method or parameter.
    """
    fn = lookup(EPISODE_METHODS, method, "credit method")
    numbers = [name for name, parameter in signature(fn).parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    check_numbers(params, numbers, f"credit method {method!r}")
    rows = [(index, scored) for index, group in enumerate(groups) for scored in group.episodes]
    rewards_N = np.array([scored.reward.total for _, scored in rows], dtype=np.float64)
    labels_N = np.array([index for index, _ in rows], dtype=np.int64)
    advantages = fn(rewards_N, labels_N, **params)
    return Credited(
        episodes=tuple(
            CreditedEpisode(
                scored=scored, group_id=groups[index].id, advantages=(float(value),) * len(scored.episode.steps)
            )
            for (index, scored), value in zip(rows, advantages.values, strict=True)
        ),
        health=advantages.health,
    )
