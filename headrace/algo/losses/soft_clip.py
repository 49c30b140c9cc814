"""Define losses that keep the policy near the sampler without a hard clip. T tokens, r = exp(policy - sampler)."""

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import (
    advantage_metrics,
    divergence_metrics,
    log_ratio,
    ratio_metrics,
    weighted_sum,
)
from headrace.metrics import Sum


def sapo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossOut:
    """L = -sum_t w_t A_t (4 / tau) sigmoid(tau (r_t - 1)), tau by the sign of A (arXiv 2511.20347).

    At r = 1 the gradient is that of the plain surrogate; it fades smoothly on both sides.
    """
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    tau_T = torch.where(advantages_T > 0, tau_pos, tau_neg).to(policy_logprobs_T.dtype)
    gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1.0)) * (4.0 / tau_T)
    loss = -weighted_sum(weights_T, gate_T * advantages_T, trained_T & (advantages_T != 0))
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **ratio_metrics(log_ratio_T, trained_T),
            **divergence_metrics(log_ratio_T, trained_T, name="sampler"),
        },
    )


def dro(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    beta: float = 0.05,
) -> LossOut:
    """L = -sum_t w_t (A_t log pi_t - beta / 2 (policy - sampler)^2), off-policy without ratios (arXiv 2405.19107).

    The square also holds back tokens whose advantage is 0; a position that is not to be trained needs weight 0.
    """
    assert policy_logprobs_T.shape == sampler_logprobs_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    logprobs_T = torch.where(trained_T, policy_logprobs_T, 0.0)
    loss = -weighted_sum(weights_T, advantages_T * logprobs_T - 0.5 * beta * log_ratio_T**2, trained_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **ratio_metrics(log_ratio_T, trained_T),
            **divergence_metrics(log_ratio_T, trained_T, name="sampler"),
        },
    )
