"""Ratios of two policies on sampled tokens, safe where a token is not trained, and the figures policy losses report.

T tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.types import EffectiveShare, Max, Mean, Metric

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: beyond it a ratio says only that something is broken, and overflow would say less


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, live_T: Tensor) -> Tensor:
    """numerator - denominator where live, exactly 0 (with gradient 0) elsewhere, clamped to +-20.

    The mask comes before any exp, so that values at positions without a weight can be anything.
    """
    assert numerator_T.shape == denominator_T.shape == live_T.shape
    difference_T = torch.where(live_T, numerator_T - denominator_T, 0.0)
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(weights_T: Tensor, values_T: Tensor, live_T: Tensor) -> Tensor:
    """sum_t w_t x_t over live positions; the others contribute exactly 0 to value and gradient."""
    return torch.where(live_T, weights_T * values_T, 0.0).sum()


def mean_over(values_T: Tensor, counted_T: Tensor) -> Mean:
    """Mean over counted tokens, as a metric that merges over chunks, micro-batches and ranks."""
    return Mean(torch.where(counted_T, values_T.detach(), 0.0).sum(), counted_T.sum())


def share_of(hits_T: Tensor, counted_T: Tensor) -> Mean:
    return Mean((hits_T & counted_T).sum(), counted_T.sum())


def max_over(values_T: Tensor, counted_T: Tensor) -> Max:
    """Largest value over counted tokens; 0 if there are none (for quantities that are never negative)."""
    kept_T = torch.where(counted_T, values_T.detach(), 0.0)
    return Max(kept_T.amax() if kept_T.numel() else kept_T.new_zeros(()))


def weight_metrics(weights_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Mean, maximum and effective sample size (as a share of the counted tokens) of weights that are never negative."""
    kept_T = torch.where(counted_T, weights_T.detach(), 0.0)
    return {
        "loss/weight_mean": mean_over(weights_T, counted_T),
        "loss/weight_max": max_over(weights_T, counted_T),
        "loss/weight_effective": EffectiveShare(kept_T.sum(), (kept_T * kept_T).sum(), counted_T.sum()),
    }


def divergence_metrics(log_ratio_T: Tensor, counted_T: Tensor, *, name: str) -> Mapping[str, Metric]:
    """KL(other || policy) on the other's samples, log_ratio = policy - other: k1 = -log r, k3 = r - 1 - log r."""
    log_ratio_T = log_ratio_T.detach()
    return {
        f"loss/kl_{name}_k1": mean_over(-log_ratio_T, counted_T),
        f"loss/kl_{name}_k3": mean_over(torch.expm1(log_ratio_T) - log_ratio_T, counted_T),
    }


def ratio_metrics(log_ratio_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    ratio_T = log_ratio_T.detach().exp()
    return {"loss/ratio_mean": mean_over(ratio_T, counted_T), "loss/ratio_max": max_over(ratio_T, counted_T)}


def clip_metrics(below_T: Tensor, above_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Share of tokens whose gradient a bound has cut, by the bound that did it."""
    return {"loss/clip_frac_low": share_of(below_T, counted_T), "loss/clip_frac_high": share_of(above_T, counted_T)}
