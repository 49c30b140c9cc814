"""Learn from targets or a teacher's log-probs, without rewards. T tokens, K alternatives per target."""

import math

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import divergence_metrics, log_ratio, masked_mean, ratio_metrics, weighted_sum
from headrace.metrics import Mean, Sum


def cross_entropy(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
    """L = -sum_t w_t log pi(x_t), summed over alternatives too when both are [T, K].

    Weights are any real numbers: negative ones push a token away, K per position are soft targets.
    `loss/nll` is the unweighted mean over trained targets.
    """
    assert policy_logprobs_T.shape == weights_T.shape
    trained_T = weights_T != 0
    logprobs_T = torch.where(trained_T, policy_logprobs_T, 0.0)
    loss = -(weights_T * logprobs_T).sum()
    return LossOut(
        loss=loss,
        metrics={
            "loss/cross_entropy": Sum(loss.detach()),
            "loss/nll": Mean(-logprobs_T.detach().sum(), trained_T.sum()),
        },
    )


def teacher_kl_reverse(policy_logprobs_T: Tensor, teacher_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
    """L = sum_t w_t KL(policy || teacher) over K alternatives, usually the teacher's likeliest tokens, and the rest.

    All other tokens count as one alternative, so the KL is exact if K is the whole vocabulary and never above it.
    Policy and teacher are [T, K], or [T] for K = 1.
    """
    policy_TK, teacher_TK, trained_T = _alternatives(policy_logprobs_T, teacher_logprobs_T, weights_T)
    return _teacher_out(_coarse_kl(policy_TK, teacher_TK), weights_T, trained_T)


def teacher_kl_forward(policy_logprobs_T: Tensor, teacher_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
    """L = sum_t w_t KL(teacher || policy), otherwise as `teacher_kl_reverse`: soft labels of a teacher."""
    policy_TK, teacher_TK, trained_T = _alternatives(policy_logprobs_T, teacher_logprobs_T, weights_T)
    return _teacher_out(_coarse_kl(teacher_TK, policy_TK), weights_T, trained_T)


REST_FLOOR = 1e-7  # the least probability of all other tokens together; below it float32 knows only rounding


def _alternatives(policy: Tensor, teacher: Tensor, weights_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs [T, K] of policy and teacher; at positions without a weight both are log(1/2K)."""
    assert policy.shape == teacher.shape
    policy_TK, teacher_TK = (rows if rows.ndim == 2 else rows[:, None] for rows in (policy, teacher))
    trained_T = weights_T != 0
    dummy = -math.log(2.0 * policy_TK.shape[1])
    return (
        torch.where(trained_T[:, None], policy_TK, dummy),
        torch.where(trained_T[:, None], teacher_TK, dummy),
        trained_T,
    )


def _coarse_kl(left_TK: Tensor, right_TK: Tensor) -> Tensor:
    """Compute KL(left || right) of each position over K tokens and the rest, which counts if either has any."""
    left_rest_T, right_rest_T = (1.0 - rows_TK.exp().sum(dim=1) for rows_TK in (left_TK, right_TK))
    has_rest_T = torch.maximum(left_rest_T, right_rest_T) > REST_FLOOR
    safe_left_T = torch.where(has_rest_T, left_rest_T, 0.5).clamp(min=REST_FLOOR)
    safe_right_T = torch.where(has_rest_T, right_rest_T, 0.5).clamp(min=REST_FLOOR)
    rest_T = torch.where(has_rest_T, safe_left_T * (safe_left_T.log() - safe_right_T.log()), 0.0)
    return (left_TK.exp() * (left_TK - right_TK)).sum(dim=1) + rest_T


def _teacher_out(kl_T: Tensor, weights_T: Tensor, trained_T: Tensor) -> LossOut:
    loss = weighted_sum(weights_T, kl_T, trained_T)
    return LossOut(
        loss=loss,
        metrics={"loss/distillation": Sum(loss.detach()), "loss/kl_teacher": masked_mean(kl_T, trained_T)},
    )


def distillation(
    policy_logprobs_T: Tensor, teacher_logprobs_T: Tensor, sampler_logprobs_T: Tensor, weights_T: Tensor
) -> LossOut:
    """L = sum_t w_t r_t sg(policy - teacher), r = exp(policy - sampler): reverse KL on sampled tokens.

    Its gradient, r (policy - teacher) grad log pi, is that of the reverse KL per token. Soft targets over K
    alternatives, the forward form, are cross_entropy with weights [T, K].
    """
    assert policy_logprobs_T.shape == teacher_logprobs_T.shape == sampler_logprobs_T.shape == weights_T.shape
    trained_T = weights_T != 0
    sampler_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    excess_T = log_ratio(policy_logprobs_T, teacher_logprobs_T, trained_T).detach()
    loss = weighted_sum(weights_T, sampler_T.exp() * excess_T, trained_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/distillation": Sum(loss.detach()),
            "loss/kl_teacher_k1": masked_mean(excess_T, trained_T),
            "loss/kl_teacher_k3": masked_mean(torch.expm1(-excess_T) + excess_T, trained_T),
            **ratio_metrics(sampler_T, trained_T),
            **divergence_metrics(sampler_T, trained_T, name="sampler"),
        },
    )
