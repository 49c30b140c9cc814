"""Advantages of whole episodes from one reward each, compared within explicit groups. N episodes.

float64 throughout; a group whose rewards are all equal, or that has one member, gets exactly 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.groups import Floats, GroupStats, centred, group_stats, standardised
from headrace.types import Mean, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """One advantage per row, and figures that say whether they carry a signal."""

    values: Floats
    health: Mapping[str, Metric]


def grpo(rewards: npt.NDArray[Any], groups: npt.NDArray[Any], *, std_eps: float = 1e-6) -> Advantages:
    """A = (R - mean) / (std + eps) of the group, sample standard deviation (arXiv 2402.03300)."""
    rewards_N = np.asarray(rewards, dtype=np.float64)
    stats = group_stats(rewards_N, np.asarray(groups))
    return _with_health(standardised(rewards_N, stats, ddof=1, eps=std_eps), rewards_N, stats)


def dr_grpo(rewards: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Advantages:
    """A = R - mean of the group (arXiv 2503.20783); goes with the weighting `constant`."""
    rewards_N = np.asarray(rewards, dtype=np.float64)
    stats = group_stats(rewards_N, np.asarray(groups))
    return _with_health(centred(rewards_N, stats), rewards_N, stats)


def rloo(rewards: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Advantages:
    """A = R - mean of the others = (R - mean) n / (n - 1) (arXiv 2402.14740); 0 for a group of one."""
    rewards_N = np.asarray(rewards, dtype=np.float64)
    stats = group_stats(rewards_N, np.asarray(groups))
    factor_G = stats.count_G / np.maximum(stats.count_G - 1, 1)
    return _with_health(centred(rewards_N, stats) * factor_G[stats.index_N], rewards_N, stats)


def _with_health(values_N: Floats, rewards_N: Floats, stats: GroupStats) -> Advantages:
    return Advantages(values=values_N, health=episode_health(values_N, rewards_N, stats))


def episode_health(values_N: Floats, rewards_N: Floats, stats: GroupStats) -> dict[str, Metric]:
    """`zero_variance_share`: groups that teach nothing; `single_episode_share`: those of them with one episode only."""
    num_rows, num_groups = len(values_N), len(stats.count_G)
    return {
        "credit/reward_mean": Mean(float(rewards_N.sum()), num_rows),
        "credit/zero_variance_share": Mean(int(stats.constant_G.sum()), num_groups),
        "credit/single_episode_share": Mean(int((stats.count_G == 1).sum()), num_groups),
        "credit/advantage_mean": Mean(float(values_N.sum()), num_rows),
        "credit/advantage_abs": Mean(float(np.abs(values_N).sum()), num_rows),
    }
