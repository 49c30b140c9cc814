"""Recompute GAE without the critic, from the values it gave when an episode was trained on.

S steps of all episodes and T their sampled tokens, laid end to end; E episodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import names
from headrace.algo.advantages.gae import GaeResult, token_gae, turn_gae
from headrace.algo.advantages.group_stats import Floats, Ints, whiten_values
from headrace.algo.advantages.step_table import step_table
from headrace.algo.name_lookup import check_numbers
from headrace.errors import ConfigError
from headrace.types import CreditedEpisode, Group, ScoredEpisode, TokenValues

# parameters and defaults, as in [rl.critic]; `whiten` and `bootstrap` are 0 or 1; `kl_coef` 0: without penalties
GAE_PARAMS: Mapping[str, float] = {"gamma": 1.0, "lam": 0.95, "whiten": 1.0, "bootstrap": 1.0, "kl_coef": 0.0}


def credit_by_values(
    groups: Sequence[Group], values_by_id: Mapping[str, TokenValues], *, method: str, params: Mapping[str, float | str]
) -> tuple[CreditedEpisode, ...]:
    """Credit every scored episode as a critic with these values would have: the mean advantage of each step's tokens.

    `values_by_id` has the values of every episode by its id. turn_gae reads the first value of each step only. Raises
    ConfigError on unknown parameters.
    """
    c = check_gae(method, params)
    episodes = [scored for group in groups for scored in group.episodes]
    values = [values_by_id[scored.episode.id] for scored in episodes]
    counts_S = np.array([len(array) for episode in values for array in episode.steps], dtype=np.int64)
    turns_T = np.repeat(np.arange(len(counts_S)), counts_S)
    gae = _gae(method, c, episodes, values, step_table(groups).reward_S, turns_T)
    advantages_T = whiten_values(gae.advantages, eps=1e-6) if c["whiten"] else gae.advantages
    totals_S = np.bincount(turns_T, weights=advantages_T, minlength=len(counts_S))
    means = iter((totals_S / np.maximum(counts_S, 1)).tolist())
    return tuple(
        CreditedEpisode(
            scored=scored,
            group_id=group.id,
            advantages=tuple(next(means) for _ in scored.episode.steps),
            values=tuple(
                float(array[0]) if len(array) else float("nan") for array in values_by_id[scored.episode.id].steps
            ),
        )
        for group in groups
        for scored in group.episodes
    )


def check_gae(method: str, params: Mapping[str, float | str]) -> dict[str, float]:
    """Complete the parameters of a GAE by defaults. Raises ConfigError that says what to write instead."""
    assert method in names.CRITIC_CREDITS
    check_numbers(params, GAE_PARAMS, f"{method!r}")
    c = {**GAE_PARAMS, **{name: float(value) for name, value in params.items()}}
    for name in ("whiten", "bootstrap"):
        if c[name] not in (0.0, 1.0):
            raise ConfigError(f"parameter {name!r} of {method!r} is {c[name]:g}: write 0 or 1")
    for name in ("gamma", "lam"):
        if not 0.0 <= c[name] <= 1.0:
            raise ConfigError(f"parameter {name!r} of {method!r} is {c[name]:g}: write a number from 0 to 1")
    return c


def _gae(
    method: str,
    c: Mapping[str, float],
    episodes: Sequence[ScoredEpisode],
    values: Sequence[TokenValues],
    reward_S: Floats,
    turns_T: Ints,
) -> GaeResult:
    lengths_E = np.array([sum(map(len, episode.steps)) for episode in values], dtype=np.int64)
    rewards_T = _rewards(values, reward_S, lengths_E, penalised=bool(c["kl_coef"]))
    values_T = _concatenate([array for episode in values for array in episode.steps])
    cut_off_E = np.array([scored.episode.truncated for scored in episodes], dtype=bool) & bool(c["bootstrap"])
    after_E = np.where(cut_off_E, np.array([episode.after for episode in values]), 0.0)
    if method == "turn_gae":
        return turn_gae(rewards_T, values_T, turns_T, lengths_E, after_E, gamma=c["gamma"], lam=c["lam"])
    sampled_T = np.ones(len(turns_T))
    return token_gae(rewards_T, values_T, sampled_T, lengths_E, after_E, gamma=c["gamma"], lam=c["lam"])


def _rewards(values: Sequence[TokenValues], reward_S: Floats, lengths_E: Ints, *, penalised: bool) -> Floats:
    """Put each step's reward on its last token, and add the KL penalties.

    The reward of a step without tokens goes to the token before it.
    """
    rewards_T = np.zeros(int(lengths_E.sum()))
    step_rewards = iter(reward_S.tolist())
    start = 0
    for episode, length in zip(values, lengths_E.tolist(), strict=True):
        last = start - 1
        for array in episode.steps:
            last, reward = last + len(array), next(step_rewards)
            if last >= start:
                rewards_T[last] += reward
        if penalised and episode.penalties is not None:
            rewards_T[start : start + length] += _concatenate(episode.penalties)
        start += length
    return rewards_T


def _concatenate(arrays: Sequence[npt.NDArray[Any]]) -> Floats:
    return np.concatenate([np.zeros(0), *(array.astype(np.float64) for array in arrays)])
