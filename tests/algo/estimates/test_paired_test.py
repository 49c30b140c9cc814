"""The paired test: exact p-values by hand, and drawn ones that agree with the exact ones."""

import math
from math import comb

import pytest

from headrace.algo.estimates import paired_test
from headrace.algo.estimates.paired_test import paired_difference, permutation_p_value


def test_differences_count_only_common_tasks() -> None:
    this = {"a": 1.0, "b": 1.0, "c": 0.0, "new": 1.0}
    paired = paired_difference(this, {"a": 0.0, "b": 0.0, "c": 0.0, "old": 0.0})
    assert paired is not None
    assert (paired.difference.value, paired.difference.count) == (pytest.approx(2 / 3), 3)
    assert (paired.better, paired.worse) == (2, 0)
    assert paired.p_value == 0.5  # of ++, +-, -+, --, two are as far from 0
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_equal_steps_give_the_sign_test() -> None:
    for better, worse in ((5, 0), (6, 1), (8, 3), (4, 4)):
        n = better + worse
        tail = sum(comb(n, k) for k in range(max(better, worse), n + 1)) / 2**n
        differences = [0.25] * better + [-0.25] * worse + [0.0] * 3
        assert permutation_p_value(differences) == pytest.approx(min(1.0, 2 * tail))


def test_drawn_signs_agree_with_all_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [math.sin(3 * k) + 0.4 for k in range(12)]
    exact = permutation_p_value(differences)
    monkeypatch.setattr(paired_test, "MOST_EXACT", 4)
    drawn = permutation_p_value(differences)
    assert drawn == permutation_p_value(differences), "the draws have a seed"
    assert 0.01 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / paired_test.DRAWS) + 1e-4)


def test_a_large_difference_on_many_tasks_is_never_p_0() -> None:
    assert permutation_p_value([1.0] * 200) == 1 / (1 + paired_test.DRAWS)
