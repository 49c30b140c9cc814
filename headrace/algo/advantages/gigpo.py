"""GiGPO: an episode's advantage plus a step's, compared with other steps taken in the same state (arXiv 2505.10978)."""

from enum import StrEnum

from headrace.algo.advantages.anchors import (
    EpisodeWeight,
    Norm,
    anchor_advantages,
    combine_advantages,
    episode_advantages,
)
from headrace.algo.advantages.episode_level import Advantages
from headrace.algo.advantages.step_table import StepTable, discount, penalize


class MixMode(StrEnum):
    """The combination of episode and step advantage."""

    SUM = "sum"  # A_E + omega A_S, as in the paper
    CONVEX = "convex"  # (1 - omega) A_E + omega A_S


def gigpo(
    table: StepTable,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    norm: Norm = Norm.STD,
    episode_weight: EpisodeWeight = EpisodeWeight.TRAJECTORY,
    mix: MixMode = MixMode.SUM,
    invalid_penalty: float = 0.0,
    std_eps: float = 1e-6,
) -> Advantages:
    """GiGPO: A = A_E + omega A_S.

    A_E compares the episode's reward in its task group; A_S compares G_t = sum_k gamma^(k - t) r_k among all steps of
    the group taken in the same state. `invalid_penalty` is taken off r_t of invalid steps before discounting. With
    gamma = 1 and a terminal reward a loop costs nothing; gamma < 1 is what punishes it.
    """
    table = penalize(table, invalid_penalty)
    returns_S = discount(table.reward_S, table.length_E, gamma)
    step = anchor_advantages(returns_S, table, norm=norm, eps=std_eps)
    episode_S = episode_advantages(table, norm=norm, episode_weight=episode_weight, eps=std_eps)
    base = 1.0 if mix is MixMode.SUM else 1.0 - omega
    return combine_advantages(base * episode_S + omega * step.values_S, episode_S, step, table, returns_S=returns_S)
