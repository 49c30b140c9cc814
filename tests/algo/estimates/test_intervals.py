"""Intervals: published points of Student's t, and shares that stay shares."""

import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.estimates.intervals import t_interval, t_quantile, wilson_interval


def test_students_t_has_its_published_points() -> None:
    published = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {freedom: round(t_quantile(freedom), 3) for freedom in published} == published


def test_a_mean_with_its_interval() -> None:
    found = t_interval([1.0, 2.0, 6.0])
    half = 4.302653 * stdev([1.0, 2.0, 6.0]) / math.sqrt(3)
    assert (found.value, found.count) == (3.0, 3)
    assert found.high - found.value == pytest.approx(half, rel=1e-6)
    assert found.value - found.low == pytest.approx(half, rel=1e-6)


def test_of_one_value_nothing_is_known_but_the_value() -> None:
    one, none = t_interval([2.0]), t_interval([])
    assert one.value == 2.0
    assert math.isnan(one.low)
    assert math.isnan(none.value)
    assert math.isnan(wilson_interval(0.0, 0).value)


def test_a_share_by_hand() -> None:
    # p = 1/2, n = 4, z^2 = 3.8415: middle 1/2, half = z / (1 + z^2/4) * sqrt(1/16 + z^2/64) = 0.34996
    found = wilson_interval(0.5, 4)
    assert (round(found.low, 5), round(found.high, 5)) == (0.15004, 0.84996)
    all_won = wilson_interval(1.0, 10)
    assert (round(all_won.low, 4), all_won.high) == (0.7225, 1.0)


@given(st.integers(1, 500), st.floats(0, 1))
def test_a_share_lies_in_its_interval(count: int, share: float) -> None:
    found = wilson_interval(share, count)
    assert 0.0 <= found.low <= share + 1e-12
    assert share - 1e-12 <= found.high <= 1.0
