"""Train good answers to score above the bad ones of the same task.

T tokens, S sequences, G groups.
"""

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut, Unit, loss_unit
from headrace.algo.losses.ratios import advantage_metrics
from headrace.algo.segment_ops import dense_index, segment_any, segment_logsumexp, segment_mean, segment_sum
from headrace.metrics import Mean, Metric, Sum


@loss_unit(Unit.GROUP)
def discriminative(
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    tau: float = 1.0,
) -> LossOut:
    """L = -sum_g c_g [mean_{A > 0} s - tau log mean_{A < 0} exp(s / tau)], s = mean log-prob of a sequence.

    The objective of DisCO (arXiv 2505.12366): hard negatives, those with a high score, get most of the push. Only the
    sign of the advantage counts; a group without both signs contributes 0. c = mean weight of the group's trained
    tokens, so that the weighting unit_mean gives the mean over groups. "+ sampler_kl" keeps it near the sampler.
    """
    trained_T = weights_T != 0
    gap_G, both_G = _score_gaps(policy_logprobs_T, advantages_T, units_T, trained_T, segments_T, tau)
    coefficient_G = segment_mean(weights_T, trained_T, dense_index(units_T))
    loss = -(coefficient_G * gap_G).sum()
    return LossOut(
        loss=loss,
        metrics={
            "loss/policy": Sum(loss.detach()),
            **advantage_metrics(advantages_T, trained_T),
            **_gap_metrics(gap_G, both_G, trained_T, units_T),
        },
    )


@loss_unit(Unit.GROUP)
def discriminative_term(
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    units_T: Tensor,
    weights_T: Tensor,
    segments_T: Tensor,
    *,
    tau: float = 1.0,
    discriminative_coef: float = 0.1,
) -> LossOut:
    """L = -coef sum_g c_g [mean_{A > 0} s - tau log mean_{A < 0} exp(s / tau)], c = sum of the group's weights.

    `discriminative` as a term to add to a policy loss whose weights add up to 1 ("ppo + discriminative_term"): a group
    counts as much here as its tokens count there. DRGRPO is GRPO with this term.
    """
    trained_T = weights_T != 0
    gap_G, both_G = _score_gaps(policy_logprobs_T, advantages_T, units_T, trained_T, segments_T, tau)
    share_G = segment_sum(torch.where(trained_T, weights_T, 0.0), dense_index(units_T))
    loss = -discriminative_coef * (share_G * gap_G).sum()
    return LossOut(
        loss=loss,
        metrics={"loss/discriminative": Sum(loss.detach()), **_gap_metrics(gap_G, both_G, trained_T, units_T)},
    )


def _score_gaps(
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    units_T: Tensor,
    trained_T: Tensor,
    segments_T: Tensor,
    tau: float,
) -> tuple[Tensor, Tensor]:
    """Compute how far the good answers of each group score above the bad ones, and which groups have both."""
    group_T, segment_T = dense_index(units_T), dense_index(segments_T)
    score_S = segment_mean(policy_logprobs_T, trained_T, segment_T)
    group_S = torch.zeros_like(group_T).scatter_(0, segment_T, group_T)
    good_S = segment_any(trained_T & (advantages_T > 0), segment_T)
    bad_S = segment_any(trained_T & (advantages_T < 0), segment_T)
    mean_good_G = segment_mean(score_S, good_S, group_S)
    num_bad_G = segment_sum(bad_S.to(score_S.dtype), group_S)
    soft_bad_G = tau * (segment_logsumexp(score_S / tau, bad_S, group_S) - num_bad_G.clamp(min=1.0).log())
    both_G = segment_any(good_S, group_S) & (num_bad_G > 0)
    return torch.where(both_G, mean_good_G - soft_bad_G, 0.0), both_G


def _gap_metrics(gap_G: Tensor, both_G: Tensor, trained_T: Tensor, units_T: Tensor) -> dict[str, Metric]:
    return {
        "loss/score_gap": Mean(gap_G.detach().sum(), both_G.sum()),
        "loss/contrast_share": Mean(both_G.sum(), segment_any(trained_T, dense_index(units_T)).sum()),
    }
