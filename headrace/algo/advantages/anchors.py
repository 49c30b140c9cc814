"""Compare steps with their peers: the steps of one task group taken in the same anchor state. S steps, A anchors.

Shared by the step-level methods: normalising a step among its peers, combining it with its episode's advantage, and the
metrics that tell a useful anchor from an inert one.
"""

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from headrace.algo.advantages.episode_level import AdvantageParts, Advantages, advantage_health, reward_health
from headrace.algo.advantages.group_stats import Bools, Floats, GroupStats, Ints, center, group_stats, standardize
from headrace.algo.advantages.step_table import NO_STATE, StepTable
from headrace.metrics import Max, Mean, Metric, Sum


class Norm(StrEnum):
    """The divisor of a deviation from the mean."""

    STD = "std"
    NONE = "none"


class EpisodeWeight(StrEnum):
    """The unit that counts once in the statistics of episode returns."""

    TRAJECTORY = "trajectory"  # as in the paper
    STEP = "step"  # as in its code


class AnchorAdvantage(NamedTuple):
    """Values of steps normalised among their peers."""

    values_S: Floats  # 0 for steps without a state
    anchored_S: Bools  # the steps that have a state
    stats: GroupStats  # of the anchored steps


def anchor_labels(table: StepTable) -> Ints:
    """Number the pairs (task group, state); the number of a step without a state is meaningless."""
    _, group_S = np.unique(table.group_S, return_inverse=True)
    return np.asarray(group_S * (int(table.state_S.max(initial=0)) + 1) + np.maximum(table.state_S, 0), dtype=np.int64)


def anchor_advantages(
    values_S: Floats, table: StepTable, *, norm: Norm, ddof: int = 1, eps: float = 1e-6
) -> AnchorAdvantage:
    """Compute (value - mean) of the anchor, over (std + eps) with Norm.STD; exactly 0 alone or among equals."""
    anchored_S = table.state_S != NO_STATE
    stats = group_stats(values_S[anchored_S], anchor_labels(table)[anchored_S])
    out_S = np.zeros(len(values_S))
    out_S[anchored_S] = normalised(values_S[anchored_S], stats, norm=norm, ddof=ddof, eps=eps)
    return AnchorAdvantage(values_S=out_S, anchored_S=anchored_S, stats=stats)


def normalised(values_N: Floats, stats: GroupStats, *, norm: Norm, ddof: int, eps: float) -> Floats:
    match norm:
        case Norm.STD:
            return standardize(values_N, stats, ddof=ddof, eps=eps)
        case Norm.NONE:
            return center(values_N, stats)


def episode_advantages(table: StepTable, *, norm: Norm, episode_weight: EpisodeWeight, eps: float = 1e-6) -> Floats:
    """Compute A_E of each step's episode: its total compared within the task group."""
    match episode_weight:
        case EpisodeWeight.TRAJECTORY:
            stats = group_stats(table.total_E, table.group_E)
            return np.repeat(normalised(table.total_E, stats, norm=norm, ddof=1, eps=eps), table.length_E)
        case EpisodeWeight.STEP:
            total_S = np.repeat(table.total_E, table.length_E)
            return normalised(total_S, group_stats(total_S, table.group_S), norm=norm, ddof=1, eps=eps)


def combine_advantages(
    values_S: Floats, episode_S: Floats, step: AnchorAdvantage, table: StepTable, *, returns_S: Floats
) -> Advantages:
    """Put the final advantages together with their parts and health metrics."""
    num_steps = len(values_S)
    disagree = int((episode_S * step.values_S < 0).sum())
    return Advantages(
        values=values_S,
        health={
            **reward_health(table.total_E, group_stats(table.total_E, table.group_E)),
            **advantage_health(values_S),
            "credit/episode_abs": Mean(float(np.abs(episode_S).sum()), num_steps),
            "credit/step_abs": Mean(float(np.abs(step.values_S).sum()), num_steps),
            "credit/sign_disagreement_share": Mean(disagree, num_steps),
            **anchor_health(step, table),
        },
        parts=AdvantageParts(returns_S=returns_S, episode_S=episode_S, step_S=step.values_S, peers_S=peers(table)),
    )


def peers(table: StepTable) -> Ints:
    """Count the steps of the task group taken in each step's state, itself included; 0 for a step without a state."""
    anchored_S = table.state_S != NO_STATE
    _, index_N, count_A = np.unique(anchor_labels(table)[anchored_S], return_inverse=True, return_counts=True)
    peers_S = np.zeros(len(anchored_S), dtype=np.int64)
    peers_S[anchored_S] = count_A[index_N]
    return peers_S


def anchor_health(step: AnchorAdvantage, table: StepTable) -> dict[str, Metric]:
    """Measure whether anchors compare anything.

    `anchor_inert_share` is the share of task groups that had steps to compare but whose anchors carry no information:
    no step has a state, all steps have the same state, or no state occurs twice. Near 1 the anchor is wrong, not the
    policy.
    """
    count_A = step.stats.count_G
    _, group_S = np.unique(table.group_S, return_inverse=True)
    steps_G = np.bincount(group_S)
    anchor_group_A = np.zeros(len(count_A), dtype=np.int64)
    anchor_group_A[step.stats.index_N] = group_S[step.anchored_S]
    anchors_G = np.bincount(anchor_group_A, minlength=len(steps_G))
    largest_G = np.zeros(len(steps_G), dtype=np.int64)
    np.maximum.at(largest_G, anchor_group_A, count_A)
    inert_G = (steps_G > 1) & ((anchors_G <= 1) | (largest_G == 1))
    return {
        "credit/anchor_count": Sum(len(count_A)),
        "credit/anchor_size_mean": Mean(int(count_A.sum()), len(count_A)),
        "credit/anchor_size_max": Max(int(count_A.max(initial=0))),
        "credit/anchor_singleton_share": Mean(int((count_A == 1).sum()), len(count_A)),
        "credit/anchor_zero_variance_share": Mean(int(step.stats.constant_G.sum()), len(count_A)),
        "credit/anchored_step_share": Mean(int(step.anchored_S.sum()), len(step.anchored_S)),
        "credit/anchor_inert_share": Mean(int(inert_G.sum()), len(steps_G)),
    }
