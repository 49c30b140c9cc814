"""Compute advantages of whole episodes from one reward each, compared within explicit groups. N episodes.

float64 throughout; a group whose rewards are all equal, or that has one member, gets exactly 0, except by `reinforce`,
which compares with a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.group_stats import (
    Floats,
    GroupStats,
    Ints,
    center,
    group_stats,
    standardize,
    whiten_values,
)
from headrace.metrics import Mean, Metric

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageParts:
    """The terms of the advantages of S steps."""

    returns_S: Floats  # G
    episode_S: Floats  # A_E
    step_S: Floats  # A_S
    peers_S: Ints  # size of each step's anchor; 0: no state


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages of a batch, one per row; rows are episodes or steps."""

    values: Floats
    health: Mapping[str, Metric]  # whether the advantages carry a signal
    parts: AdvantageParts | None = None  # if rows are steps


def grpo(rewards: Numbers, groups: Numbers, *, std_eps: float = 1e-6) -> Advantages:
    """GRPO: A = (R - mean) / (std + eps) of the group, sample standard deviation (arXiv 2402.03300)."""
    rewards_N, stats = _stats(rewards, groups)
    return _with_health(standardize(rewards_N, stats, ddof=1, eps=std_eps), rewards_N, stats)


def dr_grpo(rewards: Numbers, groups: Numbers) -> Advantages:
    """Dr. GRPO: A = R - mean of the group (arXiv 2503.20783); goes with the weighting `constant`."""
    rewards_N, stats = _stats(rewards, groups)
    return _with_health(center(rewards_N, stats), rewards_N, stats)


def rloo(rewards: Numbers, groups: Numbers) -> Advantages:
    """RLOO: A = R - mean of the others = (R - mean) n / (n - 1) (arXiv 2402.14740); 0 for a group of one."""
    rewards_N, stats = _stats(rewards, groups)
    factor_G = stats.count_G / np.maximum(stats.count_G - 1, 1)
    return _with_health(center(rewards_N, stats) * factor_G[stats.index_N], rewards_N, stats)


def reinforce_pp(rewards: Numbers, groups: Numbers, *, std_eps: float = 1e-6) -> Advantages:
    """REINFORCE++: A = (R - mean) / (std + eps) of the whole batch (arXiv 2501.03262).

    The form by token is `gae.reinforce_pp_tokens`.
    """
    rewards_N, stats = _stats(rewards, groups)
    return _with_health(whiten_values(rewards_N, eps=std_eps), rewards_N, stats)


def reinforce_pp_baseline(rewards: Numbers, groups: Numbers, *, std_eps: float = 1e-6) -> Advantages:
    """REINFORCE++ with baseline: A = (R - mean of the group), whitened over the whole batch."""
    rewards_N, stats = _stats(rewards, groups)
    return _with_health(whiten_values(center(rewards_N, stats), eps=std_eps), rewards_N, stats)


def lite_ppo(rewards: Numbers, groups: Numbers, *, std_eps: float = 1e-6) -> Advantages:
    """LitePPO: A = (R - mean of the group) / (std of the batch's rewards + eps) (arXiv 2508.08221)."""
    rewards_N, stats = _stats(rewards, groups)
    batch = group_stats(rewards_N, np.zeros(len(rewards_N), dtype=np.int64))
    scale = float(batch.deviation_G(ddof=1)[0]) + std_eps if len(rewards_N) else 1.0
    return _with_health(center(rewards_N, stats) / scale, rewards_N, stats)


def opo(rewards: Numbers, groups: Numbers, lengths: Numbers) -> Advantages:
    """OPO: A = R - sum(l R) / sum(l) of the group, l = sampled tokens: variance-optimal baseline (arXiv 2505.23585)."""
    rewards_N, stats = _stats(rewards, groups)
    lengths_N = np.asarray(lengths, dtype=np.float64)
    assert (lengths_N >= 0).all()
    deviations = group_stats(lengths_N * center(rewards_N, stats), stats.index_N)
    sizes = group_stats(lengths_N, stats.index_N)
    shift_G = np.where(stats.constant_G, 0.0, deviations.mean_G / np.where(sizes.mean_G > 0, sizes.mean_G, 1.0))
    return _with_health(center(rewards_N, stats) - shift_G[stats.index_N], rewards_N, stats)


def reinforce(rewards: Numbers, groups: Numbers, *, baseline: float = 0.0) -> Advantages:
    """REINFORCE with a scalar baseline: A = R - baseline, the same for every task; no other episode is looked at."""
    return measured(np.asarray(rewards, dtype=np.float64) - baseline, rewards, groups)


def measured(values: Numbers, rewards: Numbers, groups: Numbers) -> Advantages:
    """Add to the advantages of episodes what is measured of them."""
    rewards_N, stats = _stats(rewards, groups)
    return _with_health(np.asarray(values, dtype=np.float64), rewards_N, stats)


def _stats(rewards: Numbers, groups: Numbers) -> tuple[Floats, GroupStats]:
    rewards_N = np.asarray(rewards, dtype=np.float64)
    return rewards_N, group_stats(rewards_N, np.asarray(groups))


def _with_health(values_N: Floats, rewards_N: Floats, stats: GroupStats) -> Advantages:
    return Advantages(values=values_N, health={**reward_health(rewards_N, stats), **advantage_health(values_N)})


def reward_health(rewards_N: Floats, stats: GroupStats) -> dict[str, Metric]:
    """Measure the mean reward, and the shares of groups whose rewards are all equal and of groups of one episode."""
    num_groups = len(stats.count_G)
    return {
        "credit/reward_mean": Mean(float(rewards_N.sum()), len(rewards_N)),
        "credit/zero_variance_share": Mean(int(stats.constant_G.sum()), num_groups),
        "credit/single_episode_share": Mean(int((stats.count_G == 1).sum()), num_groups),
    }


def advantage_health(values_N: Floats) -> dict[str, Metric]:
    num_rows = len(values_N)
    return {
        "credit/advantage_mean": Mean(float(values_N.sum()), num_rows),
        "credit/advantage_abs": Mean(float(np.abs(values_N).sum()), num_rows),
        "credit/advantage_std": Mean(float(values_N.std()) if num_rows else 0.0, 1),
    }
