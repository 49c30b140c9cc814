"""Learn from pairs of a preferred and a rejected sequence, or from single ones with a label. T tokens, P pairs.

Every token carries the number of its pair (`units`) and +1 or -1 for its side or label (`preferences`). A pair's loss
is multiplied by the mean weight of its trained tokens, so that the weighting unit_mean gives the mean over pairs. A
side may be several data. `units.as_pairs` makes such data of one datum a side.
"""

import math

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
    chosen_P = beta * segment_sum(torch.where(preferences_T > 0, difference_T, 0.0), index_T)
    rejected_P = beta * segment_sum(torch.where(preferences_T < 0, difference_T, 0.0), index_T)
    return _pair_out(_sigmoid_loss(chosen_P - rejected_P, label_smoothing), chosen_P, rejected_P, weights_T, index_T)


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
    chosen_P, rejected_P = _side_means(difference_T, preferences_T, trained_T, index_T)
    return _pair_out((chosen_P - rejected_P - 0.5 / beta) ** 2, chosen_P, rejected_P, weights_T, index_T)


@loss_unit(Unit.PAIR)
def simpo(
    policy_logprobs_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> LossOut:
    """L = the loss of `dpo` at beta (m_chosen - m_rejected) - gamma, m = mean log-prob of a side's tokens
    (arXiv 2405.14734). There is no reference."""
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    chosen_P, rejected_P = _side_means(policy_logprobs_T, preferences_T, trained_T, index_T)
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    pair_loss_P = _sigmoid_loss(chosen_P - rejected_P - gamma, label_smoothing)
    return _pair_out(pair_loss_P, chosen_P, rejected_P, weights_T, index_T)


@loss_unit(Unit.PAIR)
def orpo(
    policy_logprobs_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    nll_weights_T: Tensor,
    *,
    beta: float = 0.1,
) -> LossOut:
    """L = -sum_t n_t log pi(x_t) - beta sum_p c_p log sigma(log odds(m_chosen) - log odds(m_rejected)).

    n are `nll_weights`, which may also be on tokens of weight 0 (prompts); m = mean log-prob of a side's tokens,
    log odds(m) = m - log(1 - e^m) (arXiv 2403.07691). There is no reference.
    """
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    imitated_T = nll_weights_T != 0
    nll = -torch.where(imitated_T, nll_weights_T * policy_logprobs_T, 0.0).sum()
    chosen_P, rejected_P = _side_means(policy_logprobs_T, preferences_T, trained_T, index_T)
    present_P = segment_any(trained_T, index_T)
    odds_P = chosen_P - rejected_P - _log1mexp(chosen_P, present_P) + _log1mexp(rejected_P, present_P)
    out = _pair_out(-beta * logsigmoid(odds_P), beta * chosen_P, beta * rejected_P, weights_T, index_T)
    return LossOut(loss=out.loss + nll, metrics={**out.metrics, "loss/chosen_nll": Sum(nll.detach())})


@loss_unit(Unit.PAIR)
def kto(
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    preferences_T: Tensor,
    units_T: Tensor,
    baselines_T: Tensor,
    weights_T: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOut:
    """L = sum_p c_p v_p (1 - sigma(y_p beta (D_p - z))) of single replies with labels y = +1 or -1 (arXiv 2402.01306).

    D = sum over tokens of (policy - reference), z the KL that all replies of a step are compared with (`baselines`),
    v = desirable_weight or undesirable_weight.
    """
    trained_T = weights_T != 0
    index_T = dense_index(units_T)
    difference_T = torch.where(trained_T, policy_logprobs_T - reference_logprobs_T, 0.0)
    reward_P = beta * segment_sum(difference_T, index_T)
    label_P = segment_mean(preferences_T.sign(), trained_T, index_T)
    beyond_P = label_P * (reward_P - beta * segment_mean(baselines_T, trained_T, index_T))
    value_P = torch.where(label_P > 0, desirable_weight, undesirable_weight)
    present_P = segment_any(trained_T, index_T)
    coefficient_P = segment_mean(weights_T, trained_T, index_T)
    loss = torch.where(present_P, coefficient_P * value_P * (1.0 - torch.sigmoid(beyond_P)), 0.0).sum()
    good_P, bad_P = present_P & (label_P > 0), present_P & (label_P < 0)
    return LossOut(
        loss=loss,
        metrics={
            "loss/preference": Sum(loss.detach()),
            "loss/accuracy": Mean(((beyond_P.detach() > 0) & present_P).sum(), present_P.sum()),
            "loss/chosen_reward": Mean(torch.where(good_P, reward_P.detach(), 0.0).sum(), good_P.sum()),
            "loss/rejected_reward": Mean(torch.where(bad_P, reward_P.detach(), 0.0).sum(), bad_P.sum()),
        },
    )


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
    return _pair_out(pair_loss_P, chosen_P, rejected_P, weights_T, index_T)


def _sigmoid_loss(margin_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1.0 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def _side_means(values_T: Tensor, preferences_T: Tensor, trained_T: Tensor, index_T: Tensor) -> tuple[Tensor, Tensor]:
    chosen_P = segment_mean(values_T, trained_T & (preferences_T > 0), index_T)
    return chosen_P, segment_mean(values_T, trained_T & (preferences_T < 0), index_T)


def _log1mexp(values_P: Tensor, present_P: Tensor) -> Tensor:
    """Compute log(1 - e^x) for x < 0 without cancellation; 0 where no pair is."""
    safe_P = torch.where(present_P, values_P, -1.0)
    small_P = safe_P < -math.log(2.0)
    far_P, near_P = torch.where(small_P, safe_P, -1.0), torch.where(small_P, -0.5, safe_P)
    return torch.where(present_P, torch.where(small_P, torch.log1p(-far_P.exp()), (-torch.expm1(near_P)).log()), 0.0)


def _pair_out(pair_loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, weights_T: Tensor, index_T: Tensor) -> LossOut:
    """Sum the losses of pairs; the rewards of their sides are for the metrics."""
    trained_T = weights_T != 0
    present_P = segment_any(trained_T, index_T)
    coefficient_P = segment_mean(weights_T, trained_T, index_T)
    loss = torch.where(present_P, coefficient_P * pair_loss_P, 0.0).sum()
    chosen_P, rejected_P = (torch.where(present_P, side_P.detach(), 0.0) for side_P in (chosen_P, rejected_P))
    return LossOut(
        loss=loss,
        metrics={
            "loss/preference": Sum(loss.detach()),
            "loss/accuracy": Mean(((chosen_P > rejected_P) & present_P).sum(), present_P.sum()),
            "loss/margin": Mean((chosen_P - rejected_P).sum(), present_P.sum()),
            "loss/chosen_reward": Mean(chosen_P.sum(), present_P.sum()),
            "loss/rejected_reward": Mean(rejected_P.sum(), present_P.sum()),
        },
    )
