"""Compute ratios of two policies on sampled tokens, safe where a token is not trained, and the metrics of losses.

T tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.metrics import EffectiveSampleShare, ExplainedVariance, Max, Mean, Metric, Min, StdDev

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: a larger ratio means only that something is broken, and must not overflow


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, live_T: Tensor) -> Tensor:
    """Compute numerator - denominator where live, exactly 0 (with gradient 0) elsewhere, clamped to +-20.

    The mask comes before any exp, so that values at positions without a weight can be anything.
    """
    assert numerator_T.shape == denominator_T.shape == live_T.shape
    difference_T = torch.where(live_T, numerator_T - denominator_T, 0.0)
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(weights_T: Tensor, values_T: Tensor, live_T: Tensor) -> Tensor:
    """Compute sum_t w_t x_t over live positions; the others contribute exactly 0 to value and gradient."""
    return torch.where(live_T, weights_T * values_T, 0.0).sum()


def masked_mean(values_T: Tensor, counted_T: Tensor) -> Mean:
    """Take the mean over counted tokens, as a metric that merges over chunks, micro-batches and ranks."""
    return Mean(torch.where(counted_T, values_T.detach(), 0.0).sum(), counted_T.sum())


def masked_share(hits_T: Tensor, counted_T: Tensor) -> Mean:
    """Compute the share of counted tokens that are hit."""
    return Mean((hits_T & counted_T).sum(), counted_T.sum())


def masked_max(values_T: Tensor, counted_T: Tensor) -> Max:
    """Take the largest value over counted tokens; 0 if there are none (for quantities that are never negative)."""
    masked_T = torch.where(counted_T, values_T.detach(), 0.0)
    return Max(masked_T.amax() if masked_T.numel() else masked_T.new_zeros(()))


def masked_min(values_T: Tensor, counted_T: Tensor) -> Min:
    """Take the smallest value over counted tokens; infinity if there are none."""
    masked_T = torch.where(counted_T, values_T.detach(), torch.inf)
    return Min(masked_T.amin() if masked_T.numel() else masked_T.new_full((), torch.inf))


def effective_sample_share(weights_T: Tensor, counted_T: Tensor) -> EffectiveSampleShare:
    """Compute the effective sample size of weights as a share of the counted tokens."""
    masked_T = torch.where(counted_T, weights_T.detach(), 0.0)
    return EffectiveSampleShare(masked_T.sum(), (masked_T * masked_T).sum(), counted_T.sum())


def masked_std(values_T: Tensor, counted_T: Tensor) -> StdDev:
    """Compute the standard deviation over counted tokens.

    Sums of squares lose digits, so they are taken in float64 where the device has it.
    """
    wide = torch.float32 if values_T.device.type == "mps" else torch.float64
    masked_T = torch.where(counted_T, values_T.detach(), 0.0).to(wide)
    return StdDev(masked_T.sum(), (masked_T * masked_T).sum(), counted_T.sum())


def weight_metrics(weights_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Measure mean, maximum and effective sample size of weights that are never negative."""
    return {
        "loss/weight_mean": masked_mean(weights_T, counted_T),
        "loss/weight_max": masked_max(weights_T, counted_T),
        "loss/weight_effective": effective_sample_share(weights_T, counted_T),
    }


def advantage_metrics(advantages_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Measure mean and deviation of the advantages over tokens."""
    return {
        "loss/advantage_mean": masked_mean(advantages_T, counted_T),
        "loss/advantage_std": masked_std(advantages_T, counted_T),
    }


def masked_explained_variance(predicted_T: Tensor, targets_T: Tensor, counted_T: Tensor) -> ExplainedVariance:
    """Compute the share of the targets' variance that the predictions explain."""
    return ExplainedVariance(masked_std(targets_T - predicted_T, counted_T), masked_std(targets_T, counted_T))


def divergence_metrics(log_ratio_T: Tensor, counted_T: Tensor, *, name: str) -> Mapping[str, Metric]:
    """Estimate KL(other || policy) on the other's samples, log r = policy - other: k1 = -log r, k3 = r - 1 - log r."""
    log_ratio_T = log_ratio_T.detach()
    return {
        f"loss/kl_{name}_k1": masked_mean(-log_ratio_T, counted_T),
        f"loss/kl_{name}_k3": masked_mean(torch.expm1(log_ratio_T) - log_ratio_T, counted_T),
    }


def ratio_metrics(log_ratio_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Measure mean, deviation, extremes and effective sample size of importance ratios."""
    log_ratio_T = log_ratio_T.detach()
    ratio_T = log_ratio_T.exp()
    return {
        "loss/ratio_mean": masked_mean(ratio_T, counted_T),
        "loss/ratio_std": masked_std(log_ratio_T.expm1(), counted_T),  # ratios are near 1: r - 1 keeps their digits
        "loss/ratio_min": masked_min(ratio_T, counted_T),
        "loss/ratio_max": masked_max(ratio_T, counted_T),
        "loss/ratio_effective": effective_sample_share(ratio_T, counted_T),
    }


def clip_metrics(below_T: Tensor, above_T: Tensor, counted_T: Tensor) -> Mapping[str, Metric]:
    """Measure the share of tokens whose gradient each bound has cut."""
    return {
        "loss/clip_frac_low": masked_share(below_T, counted_T),
        "loss/clip_frac_high": masked_share(above_T, counted_T),
    }
