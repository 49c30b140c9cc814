"""Learning from given tokens. T tokens, K alternatives per target."""

import torch
from torch import Tensor

from headrace.algo.loss import LossOut
from headrace.types import Mean, Sum


def cross_entropy(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
    """L = -sum_t w_t log pi(x_t), summed over alternatives too when both are [T, K].

    Weights are any real numbers: negative ones push a token away, rows of K are soft targets.
    `loss/nll` is the mean over trained targets, weighted by nothing.
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
