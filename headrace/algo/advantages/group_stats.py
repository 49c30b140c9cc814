"""Compute statistics of values by explicit group label. N rows in any order, G groups.

Rows are summed in sorted order, so a result does not depend on the order of the rows, to the last bit. A group is
constant when its smallest and largest value agree to 13 digits, which is all that a sum of rewards taken in another
order can differ by; no threshold on a rounded deviation is involved.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
SAME = 1e-13  # relative


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Statistics per group."""

    index_N: Ints  # group of each row
    count_G: Ints  # number of rows
    mean_G: Floats
    squares_G: Floats  # sum of squared deviations from the mean
    constant_G: Bools  # all values are equal

    def deviation_G(self, *, ddof: int) -> Floats:
        """Compute the standard deviation; exactly 0 for a constant group, such as one of a single row."""
        freedom_G = np.maximum(self.count_G - ddof, 1)
        return np.sqrt(self.squares_G / freedom_G)


def group_stats(values_N: Floats, labels_N: npt.NDArray[Any]) -> GroupStats:
    """Compute the statistics of each label that occurs. Labels are any integers."""
    assert values_N.shape == labels_N.shape
    assert values_N.ndim == 1
    assert np.isfinite(values_N).all()
    order_N = np.lexsort((values_N, labels_N))
    sorted_N, labels_sorted_N = values_N[order_N], labels_N[order_N]
    first_N = np.ones(len(values_N), dtype=bool)
    first_N[1:] = labels_sorted_N[1:] != labels_sorted_N[:-1]
    starts_G = np.flatnonzero(first_N)
    row_group_N = np.cumsum(first_N) - 1
    index_N = np.empty(len(values_N), dtype=np.int64)
    index_N[order_N] = row_group_N
    count_G = np.diff(np.append(starts_G, len(values_N)))
    if not len(starts_G):
        empty = np.zeros(0)
        return GroupStats(
            index_N=index_N, count_G=count_G, mean_G=empty, squares_G=empty, constant_G=np.zeros(0, dtype=bool)
        )
    lowest_G, highest_G = sorted_N[starts_G], sorted_N[starts_G + count_G - 1]
    constant_G = highest_G - lowest_G <= SAME * np.maximum(np.abs(lowest_G), np.abs(highest_G))
    mean_G = np.where(constant_G, lowest_G, np.add.reduceat(sorted_N, starts_G) / count_G)
    squares_G = np.add.reduceat((sorted_N - mean_G[row_group_N]) ** 2, starts_G)
    return GroupStats(index_N=index_N, count_G=count_G, mean_G=mean_G, squares_G=squares_G, constant_G=constant_G)


def center(values_N: Floats, stats: GroupStats) -> Floats:
    """Compute value - mean of its group; exactly 0 in a constant group."""
    return np.where(stats.constant_G[stats.index_N], 0.0, values_N - stats.mean_G[stats.index_N])


def standardize(values_N: Floats, stats: GroupStats, *, ddof: int, eps: float) -> Floats:
    """Compute (value - mean) / (std + eps) of its group; exactly 0 in a constant group."""
    scale_G = np.where(stats.constant_G, 1.0, stats.deviation_G(ddof=ddof) + eps)
    return center(values_N, stats) / scale_G[stats.index_N]


def whiten_values(values_N: Floats, *, eps: float) -> Floats:
    """Compute (value - mean) / (std + eps) over all rows, sample standard deviation; exactly 0 if all are equal."""
    one_group_N = np.zeros(len(values_N), dtype=np.int64)
    return standardize(values_N, group_stats(values_N, one_group_N), ddof=1, eps=eps)
