"""GAGPO: the mean return of an anchor state as its value, and generalised advantages over it (arXiv 2605.13217)."""

import numpy as np

from headrace.algo.advantages.anchors import (
    EpisodeWeight,
    Norm,
    anchor_advantages,
    combine_advantages,
    episode_advantages,
    normalised,
)
from headrace.algo.advantages.episode_level import Advantages
from headrace.algo.advantages.group_stats import group_stats
from headrace.algo.advantages.step_table import StepTable, discount, penalize


def gagpo(
    table: StepTable,
    *,
    gamma: float = 0.95,
    lam: float = 0.95,
    norm: Norm = Norm.STD,
    episode_coef: float = 0.0,
    invalid_penalty: float = 0.0,
    std_eps: float = 1e-6,
) -> Advantages:
    """GAGPO: A_t = delta_t + gamma lam A_{t+1}, normalised per task group, plus episode_coef A_E.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t). V(s) is the mean of G over the steps of the group taken in s; a step
    without a state is alone, V = its own G. The end of an episode has value 0. Goes with a sequence-level ratio (gspo).
    """
    table = penalize(table, invalid_penalty)
    returns_S = discount(table.reward_S, table.length_E, gamma)
    step = anchor_advantages(returns_S, table, norm=Norm.NONE)
    values_S = returns_S.copy()
    values_S[step.anchored_S] = step.stats.mean_G[step.stats.index_N]
    next_S = np.where(table.last_S, 0.0, np.roll(values_S, -1))
    raw_S = discount(table.reward_S + gamma * next_S - values_S, table.length_E, gamma * lam)
    advantages_S = normalised(raw_S, group_stats(raw_S, table.group_S), norm=norm, ddof=1, eps=std_eps)
    episode_S = episode_advantages(table, norm=norm, episode_weight=EpisodeWeight.TRAJECTORY, eps=std_eps)
    return combine_advantages(advantages_S + episode_coef * episode_S, episode_S, step, table, returns_S=returns_S)
