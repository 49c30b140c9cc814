"""HGPO: steps compared among peers that share the last k states, for several k (arXiv 2602.22817)."""

import numpy as np

from headrace.algo.advantages.anchors import (
    EpisodeWeight,
    Norm,
    anchor_advantages,
    anchor_labels,
    combine_advantages,
    episode_advantages,
    normalised,
)
from headrace.algo.advantages.episode_level import Advantages
from headrace.algo.advantages.group_stats import Bools, Ints, group_stats
from headrace.algo.advantages.step_table import NO_STATE, StepTable, discount, penalize


def hgpo(
    table: StepTable,
    *,
    gamma: float = 0.95,
    depth: int = 2,
    alpha: float = 1.0,
    norm: Norm = Norm.STD,
    episode_coef: float = 0.0,
    invalid_penalty: float = 0.0,
    std_eps: float = 1e-6,
) -> Advantages:
    """HGPO: A = sum_k w_k a_k, k = 1 .. depth + 1, plus episode_coef A_E.

    a_k compares G_t among the steps whose last k states (s_{t-k+1} .. s_t) are equal, by the population standard
    deviation or, with norm "none", by the mean alone.
    w_k is proportional to (k + 1)^alpha over the k whose a_k is not 0, so agreement on a longer history counts more.
    """
    table = penalize(table, invalid_penalty)
    returns_S = discount(table.reward_S, table.length_E, gamma)
    weighted_S, weights_S = np.zeros(len(returns_S)), np.zeros(len(returns_S))
    first_S = np.zeros(len(returns_S), dtype=bool)
    first_S[(np.cumsum(table.length_E) - table.length_E)[table.length_E > 0]] = True
    state_S, known_S = anchor_labels(table), table.state_S != NO_STATE
    history_S = state_S
    for k in range(1, int(depth) + 2):
        if k > 1:
            history_S, known_S = _longer(history_S, known_S, state_S, table.state_S != NO_STATE, first_S)
        level_S = np.zeros(len(returns_S))
        stats = group_stats(returns_S[known_S], history_S[known_S])
        level_S[known_S] = normalised(returns_S[known_S], stats, norm=norm, ddof=0, eps=std_eps)
        weight = float(k + 1) ** alpha
        weighted_S += weight * level_S
        weights_S += weight * (level_S != 0)
    step_S = weighted_S / np.where(weights_S > 0, weights_S, 1.0)
    episode_S = episode_advantages(table, norm=norm, episode_weight=EpisodeWeight.TRAJECTORY, eps=std_eps)
    anchored = anchor_advantages(returns_S, table, norm=norm, ddof=0, eps=std_eps)._replace(values_S=step_S)
    return combine_advantages(step_S + episode_coef * episode_S, episode_S, anchored, table, returns_S=returns_S)


def _longer(history_S: Ints, known_S: Bools, state_S: Ints, has_state_S: Bools, first_S: Bools) -> tuple[Ints, Bools]:
    """Extend histories by one state: number the pairs (history of the step before, state of this one) densely."""
    _, before_S = np.unique(history_S, return_inverse=True)
    _, current_S = np.unique(state_S, return_inverse=True)
    longer_S = np.roll(before_S, 1) * (int(current_S.max(initial=0)) + 1) + current_S
    return longer_S, np.roll(known_S, 1) & has_state_S & ~first_S
