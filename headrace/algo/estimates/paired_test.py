"""Compare two policies on the same tasks: the mean difference with its interval, and a permutation test."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.algo.estimates.intervals import Interval, t_interval

MOST_EXACT = 14  # differences other than 0 of which all signs are tried: 2^14 of them
DRAWS = 19_999  # of signs, beyond that
DRAWN_AT_ONCE = 1_000
ROUNDING = 1e-12  # sums that differ by less are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The difference of two policies, this minus the other, over the tasks that both have played."""

    difference: Interval  # of the means; its count is that of the tasks
    p_value: float  # two-sided, of no difference
    better: int  # tasks
    worse: int


def paired_difference(this: Mapping[str, float], other: Mapping[str, float]) -> PairedDifference | None:
    """Compare the scores of the tasks that both have; returns None if there is no such task."""
    differences = [score - other[task] for task, score in this.items() if task in other]
    if not differences:
        return None
    return PairedDifference(
        difference=t_interval(differences),
        p_value=permutation_p_value(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )


def permutation_p_value(differences: list[float]) -> float:
    """Return the share of signs of the differences whose sum is as far from 0 as the one that was measured.

    If the policies were alike, each difference could as well have had the other sign. All signs are tried up to
    2^14 of them; beyond that 19,999 are drawn with a fixed seed and the measured ones are counted with them.

    >>> permutation_p_value([0.0, 0.0]), permutation_p_value([1.0, 1.0, 1.0]), permutation_p_value([1.0, -1.0])
    (1.0, 0.25, 1.0)
    """
    changed = np.array([difference for difference in differences if difference], dtype=np.float64)
    count = len(changed)
    if not count:
        return 1.0
    least = abs(float(changed.sum())) - ROUNDING * float(np.abs(changed).sum())
    if count <= MOST_EXACT:
        signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float((np.abs(signs @ changed) >= least).mean())
    random, extreme, left = np.random.default_rng(0), 0, DRAWS
    while left:
        drawn = min(left, DRAWN_AT_ONCE)
        signs = 1.0 - 2.0 * random.integers(0, 2, size=(drawn, count))
        extreme += int((np.abs(signs @ changed) >= least).sum())
        left -= drawn
    return (1 + extreme) / (1 + DRAWS)
