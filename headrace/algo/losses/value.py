"""Define the losses of a value head. T tokens."""

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import masked_explained_variance, masked_mean, masked_share, weighted_sum
from headrace.metrics import Sum


def value(predicted_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, *, value_coef: float = 0.5) -> LossOut:
    """L = coef sum_t w_t (V_t - R_t)^2."""
    assert predicted_values_T.shape == returns_T.shape == weights_T.shape
    trained_T = weights_T != 0
    error_T = torch.where(trained_T, predicted_values_T - returns_T, 0.0)
    loss = value_coef * weighted_sum(weights_T, error_T**2, trained_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/value": Sum(loss.detach()),
            "loss/value_error": masked_mean(error_T.abs(), trained_T),
            "loss/value_mean": masked_mean(predicted_values_T, trained_T),
            "loss/explained_variance": masked_explained_variance(predicted_values_T, returns_T, trained_T),
        },
    )


def value_clipped(
    predicted_values_T: Tensor,
    returns_T: Tensor,
    values_T: Tensor,
    weights_T: Tensor,
    *,
    value_coef: float = 0.5,
    value_clip: float = 0.2,
) -> LossOut:
    """L = coef sum_t w_t max((V - R)^2, (clip(V, V0 +- c) - R)^2), V0 = `values`, those of the advantages."""
    assert predicted_values_T.shape == returns_T.shape == values_T.shape == weights_T.shape
    trained_T = weights_T != 0
    moved_T = torch.where(trained_T, predicted_values_T - values_T, 0.0)
    error_T = torch.where(trained_T, predicted_values_T - returns_T, 0.0)
    clipped_error_T = torch.where(trained_T, values_T + moved_T.clamp(-value_clip, value_clip) - returns_T, 0.0)
    loss = value_coef * weighted_sum(weights_T, torch.maximum(error_T**2, clipped_error_T**2), trained_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/value": Sum(loss.detach()),
            "loss/value_error": masked_mean(error_T.abs(), trained_T),
            "loss/value_mean": masked_mean(predicted_values_T, trained_T),
            "loss/explained_variance": masked_explained_variance(predicted_values_T, returns_T, trained_T),
            "loss/value_clip_frac": masked_share(clipped_error_T**2 > error_T**2, trained_T),
        },
    )


def shared_value(
    predicted_values_T: Tensor,
    returns_T: Tensor,
    values_T: Tensor,
    value_weights_T: Tensor,
    *,
    value_coef: float = 0.5,
    value_clip: float = 0.2,
) -> LossOut:
    """Train a value head on the policy's own trunk: "ppo + shared_value + entropy_bonus" is PPO in one loss.

    The same as `value_clipped` (with `value_clip` 0, as `value`), under weights of its own: not every sampled token has
    a return to learn, and the mean over those that have one differs from the policy's.
    """
    if not value_clip:
        return value(predicted_values_T, returns_T, value_weights_T, value_coef=value_coef)
    return value_clipped(
        predicted_values_T, returns_T, values_T, value_weights_T, value_coef=value_coef, value_clip=value_clip
    )
