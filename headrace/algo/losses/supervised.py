"""Learn from targets or a teacher's log-probs, without rewards. T tokens, K alternatives per target."""

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
