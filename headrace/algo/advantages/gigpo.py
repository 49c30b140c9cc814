"""GiGPO: an episode's advantage plus a step's, compared with other steps taken in the same state (arXiv 2505.10978)."""

from enum import StrEnum

from headrace.algo.advantages.anchors import EpisodeWeight, Norm, among_peers, combined, episode_advantages
from headrace.algo.advantages.episode import Advantages
from headrace.algo.advantages.table import StepTable, discounted, penalised


class Mix(StrEnum):
    """A_E + omega A_S (the paper), or (1 - omega) A_E + omega A_S."""

    SUM = "sum"
    CONVEX = "convex"


def gigpo(
    table: StepTable,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    norm: Norm = Norm.STD,
    episode_weight: EpisodeWeight = EpisodeWeight.TRAJECTORY,
    mix: Mix = Mix.SUM,
    invalid_penalty: float = 0.0,
    std_eps: float = 1e-6,
) -> Advantages:
    """A = A_E + omega A_S.

    A_E compares the episode's reward in its task group; A_S compares G_t = sum_k gamma^(k - t) r_k among all steps of
    the group taken in the same state. `invalid_penalty` is taken off r_t of invalid steps before discounting. With
    gamma = 1 and a terminal reward a loop costs nothing; gamma < 1 is what punishes it.
    """
    table = penalised(table, invalid_penalty)
    returns_S = discounted(table.reward_S, table.length_E, gamma)
    step = among_peers(returns_S, table, norm=norm, eps=std_eps)
    episode_S = episode_advantages(table, norm=norm, episode_weight=episode_weight, eps=std_eps)
    base = 1.0 if mix is Mix.SUM else 1.0 - omega
    return combined(base * episode_S + omega * step.values_S, episode_S, step, table, returns_S=returns_S)
