import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from headrace.algo.statistics import explained_variance, k1, k2, k3, mismatch, pass_at_k
from headrace.metrics import merge_metrics, metric_values


def test_estimators_by_hand() -> None:
    # d = log a - log b = 1: k1 = 1, k2 = 0.5, k3 = e^-1 - 1 + 1
    a, b = np.array([-1.0]), np.array([-2.0])
    assert (k1(a, b)[0], k2(a, b)[0]) == (1.0, 0.5)
    assert k3(a, b)[0] == pytest.approx(math.exp(-1))


def test_k1_and_k3_are_unbiased() -> None:
    # exact expectation over a three-letter alphabet under p equals KL(p || q)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    kl = float((p * np.log(p / q)).sum())
    for estimator in (k1, k3):
        assert (p * estimator(np.log(p), np.log(q))).sum() == pytest.approx(kl)


@given(floats(-20, 0), floats(-20, 0))
def test_k3_is_never_negative(a: float, b: float) -> None:
    assert k3(np.array([a]), np.array([b]))[0] >= 0


def test_mismatch_counts_trained_tokens_and_merges() -> None:
    sampler, policy = np.array([-1.0, -2.0, math.nan]), np.array([-1.5, -1.0, -3.0])
    whole = metric_values(mismatch(sampler, policy, np.array([1.0, 0.5, 0.0])))
    assert whole["rollout/mismatch_abs"] == pytest.approx(0.75)
    assert whole["rollout/mismatch_max"] == 1.0
    assert whole["rollout/mismatch_k1"] == pytest.approx(-0.25)
    assert whole["rollout/mismatch_k3"] == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(1) - 2) / 2)
    parts = [mismatch(sampler[i : i + 1], policy[i : i + 1], np.array([float(i < 2)])) for i in range(3)]
    assert metric_values(merge_metrics(merge_metrics(parts[0], parts[1]), parts[2])) == pytest.approx(whole)


@given(integers(1, 7), integers(0, 7), integers(1, 7))
def test_pass_at_k_counts_subsets(n: int, c: int, k: int) -> None:
    c, k = min(c, n), min(k, n)
    subsets = list(itertools.combinations(range(n), k))
    hits = sum(any(member < c for member in subset) for subset in subsets)
    assert pass_at_k(n, c, k) == pytest.approx(hits / len(subsets))


def test_explained_variance() -> None:
    returns = np.array([0.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 2.0), returns) == 0.0
    assert explained_variance(np.array([1.0, 2.0, 3.0]), returns) == pytest.approx(0.75)
    assert math.isnan(explained_variance(np.zeros(2), np.ones(2)))
