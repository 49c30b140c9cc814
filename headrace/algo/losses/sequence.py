"""Define clipped surrogates with one ratio per sequence: GSPO's geometric mean, and the plain product. T tokens."""

from torch import Tensor

from headrace.algo.loss_signature import LossOut, Unit, loss_unit
from headrace.algo.losses.ratios import (
    MAX_LOG_RATIO,
    advantage_metrics,
    divergence_metrics,
    log_ratio,
    weighted_sum,
)
from headrace.algo.losses.surrogate import clipped_metrics, clipped_objective
from headrace.algo.segment_ops import dense_index, segment_mean, segment_sum
from headrace.metrics import Sum


@loss_unit(Unit.SEQUENCE)
def gspo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    sequence_ratio_mask_T: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOut:
    """L = -sum_t w_t min(s A_t, clip(s, 1 - low, 1 + high) A_t), s = exp(mean_t (policy - sampler)) of the sequence.

    The mean is over trained tokens, or over `sequence_ratio_mask` where the data have one. With the weighting
    sequence_mean this is the objective of arXiv 2507.18071.
    """
    counted_T = (weights_T if sequence_ratio_mask_T is None else sequence_ratio_mask_T) != 0
    token_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, counted_T)
    index_T = dense_index(segments_T)
    sequence_T = segment_mean(token_T, counted_T, index_T)[index_T]
    return _clipped(sequence_T, token_T, advantages_T, weights_T, clip_low=clip_low, clip_high=clip_high)


@loss_unit(Unit.SEQUENCE)
def gspo_token(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    sequence_ratio_mask_T: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOut:
    """GSPO with s_t = sg(s) exp(log pi_t - sg(log pi_t)): the value of gspo, each token's gradient under its A_t."""
    counted_T = (weights_T if sequence_ratio_mask_T is None else sequence_ratio_mask_T) != 0
    token_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, counted_T)
    index_T = dense_index(segments_T)
    sequence_T = segment_mean(token_T.detach(), counted_T, index_T)[index_T]
    zero_T = log_ratio(policy_logprobs_T, policy_logprobs_T.detach(), weights_T != 0)  # carries the token's gradient
    return _clipped(sequence_T + zero_T, token_T, advantages_T, weights_T, clip_low=clip_low, clip_high=clip_high)


@loss_unit(Unit.SEQUENCE)
def sequence_ppo(
    policy_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOut:
    """PPO with the whole sequence as the action: s = product of its tokens' ratios, as RLOO has it (arXiv 2402.14740).

    With the weighting sequence_mean, the mean over sequences of -min(s A, clip(s) A).
    """
    token_T = log_ratio(policy_logprobs_T, sampler_logprobs_T, weights_T != 0)
    index_T = dense_index(segments_T)
    sequence_T = segment_sum(token_T, index_T)[index_T].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(sequence_T, token_T, advantages_T, weights_T, clip_low=clip_low, clip_high=clip_high)


def _clipped(
    sequence_T: Tensor, token_T: Tensor, advantages_T: Tensor, weights_T: Tensor, *, clip_low: float, clip_high: float
) -> LossOut:
    assert sequence_T.shape == advantages_T.shape == weights_T.shape
    trained_T = weights_T != 0
    objective_T = clipped_objective(sequence_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=0.0)
    loss = -weighted_sum(weights_T, objective_T, trained_T & (advantages_T != 0))
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **clipped_metrics(sequence_T, advantages_T, trained_T, clip_low=clip_low, clip_high=clip_high),
            **divergence_metrics(token_T, trained_T, name="sampler"),
        },
    )
