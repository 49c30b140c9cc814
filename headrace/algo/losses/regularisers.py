"""Define terms to add to a policy loss ("ppo + reference_kl_k3"): KL to another policy, and entropy. T tokens.

For samples of the policy, d = policy - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As values, k1 and k3
estimate KL(policy || reference). As terms to differentiate they differ: the expected gradient of k1 is zero, that of k2
is the gradient of KL(policy || reference), that of k3 the gradient of KL(reference || policy). So the names here state
value and gradient separately. As a term of the reward all three are in `shaping.kl_rewards`.
"""

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut
from headrace.algo.losses.ratios import divergence_metrics, log_ratio, masked_mean, weighted_sum
from headrace.metrics import Sum


def reference_kl_k1_k2(
    policy_logprobs_T: Tensor, reference_logprobs_T: Tensor, weights_T: Tensor, *, kl_coef: float = 0.01
) -> LossOut:
    """L = coef sum_t w_t k1_t with the gradient of k2: unbiased value of either sign, gradient of KL(policy || ref)."""
    d_T = log_ratio(policy_logprobs_T, reference_logprobs_T, weights_T != 0)
    k2_T = 0.5 * d_T**2
    return _penalty(d_T.detach() + k2_T - k2_T.detach(), d_T, weights_T, kl_coef)


def reference_kl_k2(
    policy_logprobs_T: Tensor, reference_logprobs_T: Tensor, weights_T: Tensor, *, kl_coef: float = 0.01
) -> LossOut:
    """L = coef sum_t w_t k2_t: on-policy gradient of KL(policy || reference); the value is biased."""
    d_T = log_ratio(policy_logprobs_T, reference_logprobs_T, weights_T != 0)
    return _penalty(0.5 * d_T**2, d_T, weights_T, kl_coef)


def reference_kl_k3(
    policy_logprobs_T: Tensor, reference_logprobs_T: Tensor, weights_T: Tensor, *, kl_coef: float = 0.01
) -> LossOut:
    """L = coef sum_t w_t k3_t: the term of GRPO; gradient of KL(reference || policy)."""
    d_T = log_ratio(policy_logprobs_T, reference_logprobs_T, weights_T != 0)
    return _penalty(torch.expm1(-d_T) + d_T, d_T, weights_T, kl_coef)


def reference_kl_k3_k2(
    policy_logprobs_T: Tensor, reference_logprobs_T: Tensor, weights_T: Tensor, *, kl_coef: float = 0.01
) -> LossOut:
    """L = coef sum_t w_t k3_t with the gradient of k2: value and gradient of KL(policy || reference)."""
    d_T = log_ratio(policy_logprobs_T, reference_logprobs_T, weights_T != 0)
    k2_T = 0.5 * d_T**2
    return _penalty((torch.expm1(-d_T) + d_T).detach() + k2_T - k2_T.detach(), d_T, weights_T, kl_coef)


def reference_kl_weighted(
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    weights_T: Tensor,
    *,
    kl_coef: float = 0.01,
) -> LossOut:
    """L = coef sum_t w_t r_t k3_t, r = exp(policy - sampler): unbiased in value and gradient off-policy too."""
    trained_T = weights_T != 0
    d_T = log_ratio(policy_logprobs_T, reference_logprobs_T, trained_T)
    ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T).exp()
    return _penalty(ratio_T * (torch.expm1(-d_T) + d_T), d_T, weights_T, kl_coef)


def sampler_kl(
    policy_logprobs_T: Tensor, sampler_logprobs_T: Tensor, weights_T: Tensor, *, sampler_kl_coef: float = 1.0
) -> LossOut:
    """L = coef sum_t w_t (r - 1 - log r), r = exp(policy - sampler): KL(sampler || policy), unbiased on its samples.

    The trust-region term of conservative PPO; `kl_control.adapt_kl_coef` adapts its coefficient between training steps.
    """
    trained_T = weights_T != 0
    d_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    loss = sampler_kl_coef * weighted_sum(weights_T, torch.expm1(d_T) - d_T, trained_T)
    return LossOut(
        loss=loss,
        metrics={"loss/sampler_kl": Sum(loss.detach()), **divergence_metrics(d_T, trained_T, name="sampler")},
    )


def entropy_bonus(
    policy_logprobs_T: Tensor, weights_T: Tensor, entropy_T: Tensor, *, entropy_coef: float = 0.001
) -> LossOut:
    """L = -coef sum_t w_t H_t, with the entropy of the whole distribution at each position."""
    assert policy_logprobs_T.shape == weights_T.shape == entropy_T.shape
    trained_T = weights_T != 0
    loss = -entropy_coef * weighted_sum(weights_T, entropy_T, trained_T)
    return LossOut(
        loss=loss,
        metrics={"loss/entropy_bonus": Sum(loss.detach()), "loss/entropy": masked_mean(entropy_T, trained_T)},
    )


def _penalty(kl_T: Tensor, d_T: Tensor, weights_T: Tensor, coef: float) -> LossOut:
    trained_T = weights_T != 0
    loss = coef * weighted_sum(weights_T, kl_T, trained_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/reference_kl": Sum(loss.detach()),
            "loss/kl_reference_k1": masked_mean(d_T, trained_T),
            "loss/kl_reference_k3": masked_mean(torch.expm1(-d_T) + d_T, trained_T),
        },
    )
