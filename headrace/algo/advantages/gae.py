"""Estimate generalised advantages over tokens or turns, with a critic's values. E episodes laid end to end, T tokens.

Tokens that the policy did not sample (prompt, tool output, padding) are no steps: they are taken out before the
recursion, so no value is bootstrapped across them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.group_stats import Floats, Ints, whiten_values
from headrace.algo.advantages.step_table import discount

Numbers = npt.NDArray[Any]
NOT_SAMPLED = -1  # in `turns`: a token of no turn


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeResult:
    """Advantages and the critic's targets per token; 0 where it was not sampled."""

    advantages: Floats
    returns: Floats  # the critic's targets
    critic: Floats  # 1 where the critic is trained


def token_gae(
    rewards: Numbers,
    values: Numbers,
    sampled: Numbers,
    lengths: Numbers,
    bootstrap: Numbers,
    *,
    gamma: float = 1.0,
    lam: float | Numbers = 0.95,
) -> GaeResult:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, over sampled tokens; returns = A + V.

    `lengths` are tokens per episode. `bootstrap` is the value after the last token of each episode: the critic's where
    the episode was cut off by a limit, 0 where it ended by itself. `lam` may be one number per episode.
    """
    sampled_T = np.asarray(sampled) != 0
    values_T = np.asarray(values, dtype=np.float64)
    lengths_E = _counts(sampled_T, np.asarray(lengths, dtype=np.int64))
    advantages_T = np.zeros(len(values_T))
    advantages_T[sampled_T] = _gae(
        np.asarray(rewards, dtype=np.float64)[sampled_T], values_T[sampled_T], lengths_E, bootstrap, gamma, lam
    )
    return GaeResult(
        advantages=advantages_T,
        returns=np.where(sampled_T, advantages_T + values_T, 0.0),
        critic=sampled_T.astype(np.float64),
    )


def turn_gae(
    rewards: Numbers,
    values: Numbers,
    turns: Numbers,
    lengths: Numbers,
    bootstrap: Numbers,
    local: Numbers | None = None,
    *,
    gamma: float = 1.0,
    lam: float | Numbers = 0.95,
) -> GaeResult:
    """Run the recursion of `token_gae` over turns, and give each turn's A to all its tokens.

    A turn's reward is the sum over its tokens, its value that at its first token. `turns` numbers the sampled tokens'
    turns within the batch (rising), -1 elsewhere. `local` is added to a token's own advantage and to no other, as a
    per-token KL penalty is.
    """
    turns_T = np.asarray(turns, dtype=np.int64)
    sampled_T = turns_T != NOT_SAMPLED
    values_T = np.asarray(values, dtype=np.float64)
    assert (np.diff(turns_T[sampled_T]) >= 0).all()
    first_T = np.zeros(len(turns_T), dtype=bool)
    positions = np.flatnonzero(sampled_T)
    fresh = np.ones(len(positions), dtype=bool)
    fresh[1:] = np.diff(turns_T[positions]) > 0
    first_T[positions[fresh]] = True
    index = np.cumsum(fresh) - 1  # turn of each sampled token, densely
    rewards_S = np.zeros(int(fresh.sum()))
    np.add.at(rewards_S, index, np.asarray(rewards, dtype=np.float64)[sampled_T])
    lengths_E = _counts(first_T, np.asarray(lengths, dtype=np.int64))
    advantages_S = _gae(rewards_S, values_T[first_T], lengths_E, bootstrap, gamma, lam)
    advantages_T = np.zeros(len(turns_T))
    advantages_T[sampled_T] = advantages_S[index]
    returns_T = np.where(first_T, advantages_T + values_T, 0.0)
    if local is not None:
        advantages_T += np.where(sampled_T, np.asarray(local, dtype=np.float64), 0.0)
    return GaeResult(advantages=advantages_T, returns=returns_T, critic=first_T.astype(np.float64))


def reinforce_pp_tokens(
    rewards: Numbers, sampled: Numbers, lengths: Numbers, *, gamma: float = 1.0, std_eps: float = 1e-6
) -> Floats:
    """REINFORCE++: whiten the discounted return of every sampled token over the whole batch (arXiv 2501.03262).

    Rewards are the outcome on the last token minus the per-token KL (`shaping.kl_rewards`).
    """
    sampled_T = np.asarray(sampled) != 0
    lengths_E = _counts(sampled_T, np.asarray(lengths, dtype=np.int64))
    out_T = np.zeros(len(sampled_T))
    returns = discount(np.asarray(rewards, dtype=np.float64)[sampled_T], lengths_E, gamma)
    out_T[sampled_T] = whiten_values(returns, eps=std_eps)
    return out_T


def adaptive_lam(num_tokens: int, *, alpha: float = 0.05) -> float:
    """Compute VAPO's lambda by length: max(0, 1 - 1 / (alpha L)), so that long answers look further ahead.

    >>> adaptive_lam(10), adaptive_lam(200)
    (0.0, 0.9)
    """
    return max(0.0, 1.0 - 1.0 / (alpha * num_tokens))


def _gae(
    rewards_S: Floats, values_S: Floats, lengths_E: Ints, bootstrap: Numbers, gamma: float, lam: float | Numbers
) -> Floats:
    bootstrap_E = np.asarray(bootstrap, dtype=np.float64)
    assert len(bootstrap_E) == len(lengths_E)
    next_S = np.roll(values_S, -1)
    filled_E = lengths_E > 0
    next_S[np.cumsum(lengths_E)[filled_E] - 1] = bootstrap_E[filled_E]
    return discount(rewards_S + gamma * next_S - values_S, lengths_E, gamma * np.asarray(lam, dtype=np.float64))


def _counts(marked_T: npt.NDArray[np.bool_], lengths_E: Ints) -> Ints:
    """Count the marked tokens of each episode."""
    assert int(lengths_E.sum()) == len(marked_T)
    episode_T = np.repeat(np.arange(len(lengths_E)), lengths_E)
    return np.bincount(episode_T[marked_T], minlength=len(lengths_E)).astype(np.int64)
