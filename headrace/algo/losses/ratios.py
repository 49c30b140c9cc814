"""Ratios of two policies on sampled tokens, safe where a token is not trained, and the figures policy losses report.

T tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.metrics import EffectiveSampleShare, ExplainedVariance, Max, Mean, Metric, StdDev

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


def masked_mean(values_T: Tensor, counted_T: Tensor) -> Mean:
    """Mean over counted tokens, as a metric that merges over chunks, micro-batches and ranks."""
    return Mean(torch.where(counted_T, values_T.detach(), 0.0).sum(), counted_T.sum())


def masked_share(hits_T: Tensor, counted_T: Tensor) -> Mean:
    return Mean((hits_T & counted_T).sum(), counted_T.sum())


def masked_max(values_T: Tensor, counted_T: Tensor) -> Max:
    """Largest value over counted tokens; 0 if there are none (for quantities that are never negative)."""
    kept_T = torch.where(counted_T, values_T.detach(), 0.0)
    return Max(kept_T.amax() if kept_T.numel() else kept_T.new_zeros(()))


def effective_sample_share(weights_T: Tensor, counted_T: Tensor) -> EffectiveSampleShare:
    """Effective sample size of weights as a share of the counted tokens."""
    kept_T = torch.where(counted_T, weights_T.detach(), 0.0)
    return EffectiveSampleShare(kept_T.sum(), (kept_T * kept_T).sum(), counted_T.sum())


def masked_std(values_T: Tensor, counted_T: Tensor) -> StdDev:
    """Standard deviation over counted tokens. Sums of squares lose digits, so they are taken in float64 where the
    device has it."""
    wide = torch.float32 if values_T.device.type == "mps" else torch.float64
    kept_T = torch.where(counted_T, values_T.detach(), 0.0).to(wide)
    return StdDev(kept_T.sum(), (kept_T * kept_T).sum(), counted_T.sum())


def weight_metrics(weights_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Mean, maximum and effective sample size of weights that are never negative."""
    return {
        "loss/weight_mean": masked_mean(weights_T, counted_T),
        "loss/weight_max": masked_max(weights_T, counted_T),
        "loss/weight_effective": effective_sample_share(weights_T, counted_T),
    }


def advantage_metrics(advantages_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Of the advantages as tokens see them."""
    return {
        "loss/advantage_mean": masked_mean(advantages_T, counted_T),
        "loss/advantage_std": masked_std(advantages_T, counted_T),
    }


def masked_explained_variance(predicted_T: Tensor, targets_T: Tensor, counted_T: Tensor) -> ExplainedVariance:
    """How much of the targets' variance the predictions explain."""
    return ExplainedVariance(masked_std(targets_T - predicted_T, counted_T), masked_std(targets_T, counted_T))


def divergence_metrics(log_ratio_T: Tensor, counted_T: Tensor, *, name: str) -> Mapping[str, Metric]:
    """KL(other || policy) on the other's samples, log_ratio = policy - other: k1 = -log r, k3 = r - 1 - log r."""
    log_ratio_T = log_ratio_T.detach()
    return {
        f"loss/kl_{name}_k1": masked_mean(-log_ratio_T, counted_T),
        f"loss/kl_{name}_k3": masked_mean(torch.expm1(log_ratio_T) - log_ratio_T, counted_T),
    }


def ratio_metrics(log_ratio_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Mean, maximum and effective sample size of importance ratios."""
    ratio_T = log_ratio_T.detach().exp()
    return {
        "loss/ratio_mean": masked_mean(ratio_T, counted_T),
        "loss/ratio_max": masked_max(ratio_T, counted_T),
        "loss/ratio_effective": effective_sample_share(ratio_T, counted_T),
    }


def clip_metrics(below_T: Tensor, above_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Share of tokens whose gradient a bound has cut, by the bound that did it."""
    return {
        "loss/clip_frac_low": masked_share(below_T, counted_T),
        "loss/clip_frac_high": masked_share(above_T, counted_T),
    }
