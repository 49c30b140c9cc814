"""Means of paired differences and shares, with 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

LEVEL = 0.95
NORMAL = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean or a share with its 95 % interval."""

    value: float
    low: float  # NaN without an interval
    high: float  # likewise
    count: int


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean, plus and minus Student's t times its standard error.

    >>> interval = t_interval([1.0, 3.0])  # 2 +- 12.706 * sqrt(2) / sqrt(2)
    >>> interval.value, round(interval.low, 3), round(interval.high, 3)
    (2.0, -10.706, 14.706)
    """
    if not values:
        return Interval(value=math.nan, low=math.nan, high=math.nan, count=0)
    middle, count = mean(values), len(values)
    half = math.nan if count == 1 else t_quantile(count - 1) * stdev(values) / math.sqrt(count)
    return Interval(value=middle, low=middle - half, high=middle + half, count=count)


def wilson_interval(share: float, count: int) -> Interval:
    """Return a share of `count` trials with Wilson's interval (1927): within 0 and 1, and no point if all agree."""
    assert 0.0 <= share <= 1.0
    if not count:
        return Interval(value=math.nan, low=math.nan, high=math.nan, count=0)
    square = NORMAL**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return Interval(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half), count=count)


def t_quantile(freedom: int) -> float:
    """Compute the two-sided 95 % point of Student's t, by bisection of its distribution function.

    >>> round(t_quantile(1), 3), round(t_quantile(7), 3), round(t_quantile(30), 3)
    (12.706, 2.365, 2.042)
    """
    assert freedom >= 1
    low, high = 0.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """Compute P(|T| < t) by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
