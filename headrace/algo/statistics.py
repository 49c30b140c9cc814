"""Compute statistics of log-probs, values and success: KL estimators, mismatch, pass@k. T tokens."""

from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.metrics import Max, Mean, Metric

Floats = npt.NDArray[np.float64]


def k1(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
    """Estimate KL(a || b) per token on samples of a: log a - log b. Unbiased, of either sign."""
    return np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)


def k2(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
    """Estimate KL(a || b) as (log a - log b)^2 / 2: biased, low variance, never negative."""
    return np.asarray(0.5 * k1(a, b) ** 2)


def k3(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
    """Estimate KL(a || b) on samples of a as exp(-d) - 1 + d, d = log a - log b: unbiased, never negative."""
    difference = k1(a, b)
    return np.asarray(np.expm1(-difference) + difference)


def mismatch(
    sampler_logprobs: npt.NDArray[Any], policy_logprobs: npt.NDArray[Any], trained: npt.NDArray[Any]
) -> dict[str, Metric]:
    """Measure how far the trainer's log-probs of sampled tokens are from the sampler's, where `trained` is not 0.

    Meaningful for tokens sampled by the very weights that are scored; merges over data.
    """
    assert sampler_logprobs.shape == policy_logprobs.shape == trained.shape
    mask = np.asarray(trained) != 0
    sampler_T, policy_T = np.asarray(sampler_logprobs)[mask], np.asarray(policy_logprobs)[mask]
    difference_T = k1(sampler_T, policy_T)
    count = len(difference_T)
    return {
        "rollout/mismatch_abs": Mean(float(np.abs(difference_T).sum()), count),
        "rollout/mismatch_max": Max(float(np.abs(difference_T).max(initial=0.0))),
        "rollout/mismatch_k1": Mean(float(difference_T.sum()), count),
        "rollout/mismatch_k3": Mean(float(k3(sampler_T, policy_T).sum()), count),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Compute the chance that k of n samples drawn without replacement hold a correct one: 1 - C(n - c, k) / C(n, k).

    Unbiased for the chance that k fresh samples do (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= num_correct <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def explained_variance(values: npt.NDArray[Any], returns: npt.NDArray[Any]) -> float:
    """Compute 1 - Var(returns - values) / Var(returns); NaN if all returns are equal: there is nothing to explain."""
    values_T, returns_T = np.asarray(values, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    assert values_T.shape == returns_T.shape
    if not returns_T.size or returns_T.min() == returns_T.max():
        return float("nan")
    return float(1.0 - (returns_T - values_T).var() / returns_T.var())
