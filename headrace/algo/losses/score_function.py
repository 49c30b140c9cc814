"""Define policy gradients in score-function form: L = -sum_t w_t sg(c_t) A_t log pi(x_t), where c is a bounded ratio.

sg stops the gradient, so a bound changes how much a token counts but never cuts it off from learning, except where a
rule drops it (c = 0). r_t = exp(policy - sampler). Unlike PPO's clip, the direction of the advantage plays no part.
T tokens, S segments.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut, Unit, loss_unit
from headrace.algo.losses.ratios import (
    MAX_LOG_RATIO,
    advantage_metrics,
    clip_metrics,
    divergence_metrics,
    log_ratio,
    masked_share,
    ratio_metrics,
    weight_metrics,
    weighted_sum,
)
from headrace.algo.segment_ops import dense_index, segment_mean, segment_sum
from headrace.metrics import Metric, Sum


def cispo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    ratio_low: float = 0.0,
    ratio_high: float = 4.0,
) -> LossOut:
    """c = clip(r, low, high), bounds on the ratio itself (MiniMax-M1, arXiv 2506.13585)."""
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    ratio_T = log_ratio_T.detach().exp()
    return _score_function(
        policy_logprobs_T,
        advantages_T,
        weights_T,
        log_ratio_T,
        ratio_T.clamp(ratio_low, ratio_high),
        clip_metrics(ratio_T < ratio_low, ratio_T > ratio_high, trained_T),
    )


def aipo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    cap: float = 4.0,
) -> LossOut:
    """c = min(r, cap): truncated importance sampling by token, TIS (LlamaRL, arXiv 2505.24034)."""
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    ratio_T = log_ratio_T.detach().exp()
    return _score_function(
        policy_logprobs_T,
        advantages_T,
        weights_T,
        log_ratio_T,
        ratio_T.clamp(max=cap),
        {"loss/clip_frac_high": masked_share(ratio_T > cap, trained_T)},
    )


def mis(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    cap: float = 4.0,
) -> LossOut:
    """c = r where r <= cap, else the token is dropped: masked importance sampling."""
    return icepop(policy_logprobs_T, sampler_logprobs_T, advantages_T, weights_T, floor=0.0, cap=cap)


def icepop(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    floor: float = 0.5,
    cap: float = 5.0,
) -> LossOut:
    """c = r where floor <= r <= cap, else the token is dropped."""
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    ratio_T = log_ratio_T.detach().exp()
    return _dropping(policy_logprobs_T, advantages_T, weights_T, log_ratio_T, ratio_T, ratio_T, floor=floor, cap=cap)


@loss_unit(Unit.SEQUENCE)
def sequence_tis(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    cap: float = 4.0,
) -> LossOut:
    """c = min(product of the sequence's ratios, cap) on all its tokens.

    The product grows or shrinks exponentially with length; prefer token or geometric forms for long sequences.
    """
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    product_T = _sequence_product(log_ratio_T, segments_T)
    return _score_function(
        policy_logprobs_T,
        advantages_T,
        weights_T,
        log_ratio_T,
        product_T.clamp(max=cap),
        {"loss/clip_frac_high": masked_share(product_T > cap, trained_T)},
    )


@loss_unit(Unit.SEQUENCE)
def sequence_mis(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    cap: float = 4.0,
) -> LossOut:
    """c = product of the sequence's ratios; the sequence is dropped where that exceeds the cap."""
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, weights_T != 0)
    product_T = _sequence_product(log_ratio_T, segments_T)
    return _dropping(policy_logprobs_T, advantages_T, weights_T, log_ratio_T, product_T, product_T, floor=0.0, cap=cap)


@loss_unit(Unit.SEQUENCE)
def geometric_mis(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    floor: float = 0.99,
    cap: float = 1.01,
) -> LossOut:
    """c = r of the token; the sequence is dropped unless floor <= geometric mean of its ratios <= cap."""
    trained_T = weights_T != 0
    log_ratio_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, trained_T)
    index_T = dense_index(segments_T)
    mean_T = segment_mean(log_ratio_T.detach(), trained_T, index_T)[index_T].exp()
    ratio_T = log_ratio_T.detach().exp()
    return _dropping(policy_logprobs_T, advantages_T, weights_T, log_ratio_T, ratio_T, mean_T, floor=floor, cap=cap)


def _sequence_product(log_ratio_T: Tensor, segments_T: Tensor) -> Tensor:
    index_T = dense_index(segments_T)
    total_T = segment_sum(log_ratio_T.detach(), index_T)[index_T]
    return total_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _dropping(
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    log_ratio_T: Tensor,
    coefficient_T: Tensor,
    judged_T: Tensor,
    *,
    floor: float,
    cap: float,
) -> LossOut:
    below_T, above_T = judged_T < floor, judged_T > cap
    trained_T = weights_T != 0
    return _score_function(
        policy_logprobs_T,
        advantages_T,
        weights_T,
        log_ratio_T,
        torch.where(below_T | above_T, 0.0, coefficient_T),
        {"loss/dropped_low": masked_share(below_T, trained_T), "loss/dropped_high": masked_share(above_T, trained_T)},
    )


def _score_function(
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    log_ratio_T: Tensor,
    coefficient_T: Tensor,
    metrics: Mapping[str, Metric],
) -> LossOut:
    assert policy_logprobs_T.shape == advantages_T.shape == weights_T.shape == coefficient_T.shape
    trained_T = weights_T != 0
    live_T = trained_T & (advantages_T != 0) & (coefficient_T != 0)
    logprobs_T = torch.where(live_T, policy_logprobs_T, 0.0)
    loss = -weighted_sum(weights_T, coefficient_T.detach() * advantages_T * logprobs_T, live_T)
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **metrics,
            **weight_metrics(coefficient_T, trained_T),
            **ratio_metrics(log_ratio_T, trained_T),
            **divergence_metrics(log_ratio_T, trained_T, name="sampler"),
        },
    )
