"""From logits to a token: temperature, cuts, inverse CDF at a given uniform number. Rows are independent of each other.

Shape letters: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.types import SamplingParams

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Sampled:
    """`logprobs_B` under the tempered distribution before any cut, `raw_logprobs_B` at temperature 1."""

    tokens_B: Tensor
    logprobs_B: Tensor
    raw_logprobs_B: Tensor


def sample_rows(logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: Tensor) -> Sampled:
    """One token per row. Temperature 0 takes the most likely token and records its raw log-prob."""
    assert logits_BV.shape[0] == len(params) == uniforms_B.shape[0]
    logits_BV = logits_BV.float()
    raw_BV = torch.log_softmax(logits_BV, dim=-1)
    tempered_BV = raw_BV
    if any(row.temperature not in (0.0, 1.0) for row in params):
        scale = torch.tensor([row.temperature or 1.0 for row in params], device=logits_BV.device)
        tempered_BV = torch.log_softmax(logits_BV / scale[:, None], dim=-1)
    probs_BV = tempered_BV.exp()
    for index, row in enumerate(params):
        if row.truncated:
            probs_BV[index] = cut(probs_BV[index], row)
    tokens_B = inverse_cdf(probs_BV, uniforms_B)
    greedy = [index for index, row in enumerate(params) if row.temperature == 0.0]
    if greedy:
        tokens_B[greedy] = logits_BV[greedy].argmax(dim=-1)
    picked = tokens_B[:, None]
    return Sampled(tokens_B, tempered_BV.gather(1, picked)[:, 0], raw_BV.gather(1, picked)[:, 0])


def cut(probs_V: Tensor, params: SamplingParams) -> Tensor:
    """Zero the tokens that top-k, min-p or top-p leave out (in that order; the most likely one always stays)."""
    kept_V = torch.ones_like(probs_V, dtype=torch.bool)
    if params.top_k is not None and params.top_k < probs_V.shape[0]:
        kept_V &= probs_V >= torch.topk(probs_V, params.top_k).values[-1]
    if params.min_p > 0.0:
        kept_V &= probs_V >= params.min_p * probs_V.max()
    if params.top_p < 1.0:
        ordered, order = torch.sort(torch.where(kept_V, probs_V, 0.0), descending=True, stable=True)
        before = torch.cumsum(ordered.double(), 0) - ordered
        nucleus = torch.zeros_like(kept_V)
        nucleus[order] = before < params.top_p * ordered.double().sum()
        kept_V &= nucleus
    return torch.where(kept_V, probs_V, 0.0)


def inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token t with sum(w[:t]) <= u sum(w) < sum(w[:t + 1]); never one of weight 0.

    In two levels (blocks of 128, then inside the block) with float64 sums: fewer roundings than one long cumulative
    sum, and most of the vocabulary is read once.
    """
    rows, size = weights_BV.shape
    padded = torch.nn.functional.pad(weights_BV, (0, -size % BLOCK)).view(rows, -1, BLOCK)
    blocks = padded.sum(dim=-1).double().cumsum(dim=-1)
    target = uniforms_B.to(blocks.dtype)[:, None] * blocks[:, -1:]
    block = (blocks <= target).sum(dim=-1).clamp_max(blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inside = padded[torch.arange(rows, device=block.device), block]
    cumulative = inside.double().cumsum(dim=-1)
    index = (cumulative <= (target[:, 0] - before)[:, None]).sum(dim=-1)
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(dim=-1)  # rounding may push the target past the block's end
    return block * BLOCK + torch.minimum(index, last)
