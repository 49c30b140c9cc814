"""Losses for tokens that several policy versions sampled. T tokens.

Decoupled PPO keeps two corrections apart: the behaviour weight b (from the sampler to the policy at the start of the
step, computed for the whole step by `algo.correction`) and the trust-region ratio r (from there to the policy now).
A loss here requires the arrays that the correction writes, so it cannot silently run with weights of 1.
"""

from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import (
    advantage_metrics,
    divergence_metrics,
    log_ratio,
    masked_share,
    ratio_metrics,
    weight_metrics,
    weighted_sum,
)
from headrace.algo.losses.surrogate import clipped_metrics, clipped_objective
from headrace.metrics import Sum


def decoupled_ppo(
    policy_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    behaviour_weights_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossOut:
    """L = -sum_t w_t b_t min(r_t A_t, clip(r_t) A_t), r = exp(policy - proximal) (arXiv 2110.00641, 2505.24298).

    b is 0 for rejected tokens; they stay in every denominator, because the weights were computed before.
    """
    assert policy_logprobs_T.shape == proximal_logprobs_T.shape == sampler_logprobs_T.shape
    assert policy_logprobs_T.shape == behaviour_weights_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, proximal_logprobs_T, trained_T)
    sampler_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    objective_T = clipped_objective(
        log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    live_T = trained_T & (advantages_T != 0) & (behaviour_weights_T != 0)
    loss = -weighted_sum(weights_T * behaviour_weights_T, objective_T, live_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **clipped_metrics(log_ratio_T, advantages_T, trained_T, clip_low=clip_low, clip_high=clip_high),
            **weight_metrics(behaviour_weights_T, trained_T),
            "loss/dropped_behaviour": masked_share(behaviour_weights_T == 0, trained_T),
            **divergence_metrics(log_ratio_T, trained_T, name="proximal"),
            **divergence_metrics(sampler_T, trained_T, name="sampler"),
        },
    )


def loglinear_ppo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    lags_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 5.0,
) -> LossOut:
    """Decoupled PPO whose proximal policy is interpolated, so that it costs no forward pass (A-3PO, arXiv 2512.06547).

    For a token of lag d: log proximal = sampler + a (sg(policy) - sampler), a = (d - 1) / d, and 0 for d <= 1. Hence
    b = min(exp(a sg(policy - sampler)), weight_cap) and r = exp(policy - log proximal).
    """
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == lags_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    sampler_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    share_T = ((lags_T - 1.0) / lags_T.clamp(min=1.0)).clamp(min=0.0)
    behaviour_T = (share_T * sampler_T.detach()).exp().clamp(max=weight_cap)
    log_ratio_T = sampler_T - share_T * sampler_T.detach()
    objective_T = clipped_objective(log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    loss = -weighted_sum(weights_T * behaviour_T, objective_T, trained_T & (advantages_T != 0))
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **clipped_metrics(log_ratio_T, advantages_T, trained_T, clip_low=clip_low, clip_high=clip_high),
            **weight_metrics(behaviour_T, trained_T),
            **divergence_metrics(sampler_T, trained_T, name="sampler"),
        },
    )


def m2po(
    policy_logprobs_T: Tensor, sampler_logprobs_T: Tensor, m2_mask_T: Tensor, advantages_T: Tensor, weights_T: Tensor
) -> LossOut:
    """L = -sum_t w_t k_t r_t A_t over the tokens kept by the step's second-moment mask k (arXiv 2510.01161).

    r = exp(policy - sampler), not clipped: `correction.m2_mask` has removed the tokens that make its variance large.
    """
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == m2_mask_T.shape == advantages_T.shape
    trained_T = weights_T != 0
    kept_T = trained_T & (m2_mask_T != 0)
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, kept_T)
    loss = -weighted_sum(weights_T, log_ratio_T.exp() * advantages_T, kept_T & (advantages_T != 0))
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            "loss/dropped_m2": masked_share(~kept_T, trained_T),
            **ratio_metrics(log_ratio_T, kept_T),
            **divergence_metrics(log_ratio_T, kept_T, name="sampler"),
        },
    )
