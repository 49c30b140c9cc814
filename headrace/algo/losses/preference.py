"""Learn from pairs of a preferred and a rejected sequence (`units.as_pairs` makes the data). T tokens, P pairs.

Every token carries the number of its pair (`units`) and +1 or -1 for its side (`preferences`). A pair's loss is
multiplied by the mean weight of its trained tokens, so that the weighting unit_mean gives the mean over pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace.algo.loss_signature import LossOut, Unit, loss_unit
from headrace.algo.segment_ops import dense_index, segment_any, segment_mean, segment_sum
from headrace.metrics import Mean, Sum


@loss_unit(Unit.PAIR)
def dpo(
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossOut:
    """L = -sum_p c_p [(1 - e) log sigma(beta D) + e log sigma(-beta D)] (arXiv 2305.18290).

    D = sum over preferred tokens of (policy - reference) minus the same over rejected ones, e = label_smoothing.
    """
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    difference_T = torch.where(trained_T, policy_logprobs_T - reference_logprobs_T, 0.0)
    margin_P = beta * segment_sum(difference_T * preferences_T.sign(), index_T)
    pair_loss_P = -(1.0 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return _pair_out(pair_loss_P, margin_P, weights_T, index_T)


@loss_unit(Unit.PAIR)
def ipo(
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    *,
    beta: float = 0.1,
) -> LossOut:
    """L = sum_p c_p (D - 1 / (2 beta))^2, D as in `dpo` with means over tokens in place of sums (arXiv 2310.12036)."""
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    difference_T = torch.where(trained_T, policy_logprobs_T - reference_logprobs_T, 0.0)
    preferred_T = preferences_T > 0
    margin_P = segment_mean(difference_T, trained_T & preferred_T, index_T)
    margin_P = margin_P - segment_mean(difference_T, trained_T & ~preferred_T, index_T)
    return _pair_out((margin_P - 0.5 / beta) ** 2, margin_P, weights_T, index_T)


@loss_unit(Unit.PAIR)
def bradley_terry(
    scores_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    margins_T: Tensor | None = None,
    *,
    center_coef: float = 0.0,
) -> LossOut:
    """L = -sum_p c_p [log sigma(s_chosen - s_rejected - margin) - center (s_chosen + s_rejected)^2].

    A sequence's score is the mean of the scalar head over its trained positions, usually the last one alone.
    """
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    chosen_T = trained_T & (preferences_T > 0)
    chosen_P = segment_mean(scores_T, chosen_T, index_T)
    rejected_P = segment_mean(scores_T, trained_T & (preferences_T < 0), index_T)
    difference_P = chosen_P - rejected_P
    required_P = 0.0 if margins_T is None else segment_mean(margins_T, chosen_T, index_T)
    pair_loss_P = -logsigmoid(difference_P - required_P) + center_coef * (chosen_P + rejected_P) ** 2
    return _pair_out(pair_loss_P, difference_P, weights_T, index_T)


def _pair_out(pair_loss_P: Tensor, margin_P: Tensor, weights_T: Tensor, index_T: Tensor) -> LossOut:
    trained_T = weights_T != 0
    present_P = segment_any(trained_T, index_T)
    coefficient_P = segment_mean(weights_T, trained_T, index_T)
    loss = torch.where(present_P, coefficient_P * pair_loss_P, 0.0).sum()
    margin_P = margin_P.detach()
    return LossOut(
        loss=loss,
        metrics={
            "loss/preference": Sum(loss.detach()),
            "loss/accuracy": Mean(((margin_P > 0) & present_P).sum(), present_P.sum()),
            "loss/margin": Mean(torch.where(present_P, margin_P, 0.0).sum(), present_P.sum()),
        },
    )
