"""Define policy-gradient surrogates whose gradient flows through the importance ratio. T tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import (
    advantage_metrics,
    clip_metrics,
    divergence_metrics,
    log_ratio,
    ratio_metrics,
    weighted_sum,
)
from headrace.metrics import Metric, Sum


def importance_sampling(
    policy_logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor
) -> LossOut:
    """L = -sum_t w_t r_t A_t, r = exp(policy - sampler): unbiased for any sampler, unbounded in variance."""
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    live_T = trained_T & (advantages_T != 0)
    loss = -weighted_sum(weights_T, log_ratio_T.exp() * advantages_T, live_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **ratio_metrics(log_ratio_T, trained_T),
            **divergence_metrics(log_ratio_T, trained_T, name="sampler"),
        },
    )


def ppo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossOut:
    """L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r = exp(policy - sampler).

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` c > 1 bounds the loss of a token
    with A < 0 by -c A (arXiv 1912.09729); 0 leaves it unbounded.
    """
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    objective_T = clipped_objective(
        log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    live_T = trained_T & (advantages_T != 0)
    loss = -weighted_sum(weights_T, objective_T, live_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **clipped_metrics(log_ratio_T, advantages_T, trained_T, clip_low=clip_low, clip_high=clip_high),
            **divergence_metrics(log_ratio_T, trained_T, name="sampler"),
        },
    )


def clipped_objective(
    log_ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """Compute min(r A, clip(r) A) per token; with `dual_clip` c, not below c A where A < 0."""
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip:
        objective_T = torch.where(advantages_T < 0, torch.maximum(objective_T, dual_clip * advantages_T), objective_T)
    return objective_T


def clipped_metrics(
    log_ratio_T: Tensor, advantages_T: Tensor, trained_T: Tensor, *, clip_low: float, clip_high: float
) -> Mapping[str, Metric]:
    """Measure ratios, and the share of tokens whose gradient the clip has cut at either bound."""
    ratio_T = log_ratio_T.detach().exp()
    below_T = (advantages_T < 0) & (ratio_T < 1.0 - clip_low)
    above_T = (advantages_T > 0) & (ratio_T > 1.0 + clip_high)
    return {**clip_metrics(below_T, above_T, trained_T), **ratio_metrics(log_ratio_T, trained_T)}
