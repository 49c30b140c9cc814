"""Check sampling requests, and sample tokens from logits: temperature, top-k, top-p, min-p, inverse CDF.

Rows are independent of each other, and the uniform numbers are given, so sampling is deterministic.

Shape letters: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import SamplerError
from headrace.model.device import wide
from headrace.model.head import picked_logprobs
from headrace.types import SampleRequest, SamplingParams

BLOCK = 128
CACHED = 2**21  # logits that stay in a CPU's cache from one pass over them to the next
COLDEST = 1e-4  # logits divided by less would overflow


def check_request(request: SampleRequest, *, context: int, vocabulary: int, decodes: bool) -> None:
    """Raise SamplerError on a request that can never be served; `decodes`: there is a tokenizer for stop strings."""
    params, prompt = request.params, request.prompt
    if not len(prompt):
        raise SamplerError("a prompt needs at least one token")
    if len(prompt) >= context:
        raise SamplerError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    if not (int(prompt.min()) >= 0 and int(prompt.max()) < vocabulary):
        raise SamplerError(f"the prompt has a token outside of the vocabulary of {vocabulary}")
    if params.max_tokens < 1:
        raise SamplerError(f"max_tokens must be at least 1, not {params.max_tokens}")
    if not (params.temperature == 0 or COLDEST <= params.temperature < math.inf):
        raise SamplerError(f"temperature must be 0 (greedy) or at least {COLDEST}, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise SamplerError(f"top_p must be above 0 and at most 1, not {params.top_p}")
    if params.top_k is not None and params.top_k < 1:
        raise SamplerError(f"top_k must be at least 1, not {params.top_k}; leave it out to keep all tokens")
    if not 0 <= params.min_p <= 1:
        raise SamplerError(f"min_p must be from 0 to 1, not {params.min_p}")
    if not 0 <= params.seed < 2**64:
        raise SamplerError(f"a seed must be from 0 to 2**64 - 1, not {params.seed}")
    if "" in params.stop_strings:
        raise SamplerError("an empty stop string would stop everything: leave it out")
    if params.stop_strings and not decodes:
        raise SamplerError("stop strings need a tokenizer, and this model has none: use stop_tokens")


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled token of each row."""

    tokens_B: Tensor
    logprobs_B: Tensor  # under the tempered distribution before any truncation
    raw_logprobs_B: Tensor  # at temperature 1


def refuse_images(request: SampleRequest, sampler: str) -> None:
    """Raise SamplerError on a prompt with pictures, for a sampler that reads none."""
    if request.images:
        raise SamplerError(f"the prompt has pictures, which {sampler} is not given: use engine.type = 'embedded'")


def sample_rows(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: Tensor, *, spend: bool = False
) -> SampledTokens:
    """Sample one token per row. Temperature 0 takes the most likely token and records its raw log-prob.

    `spend`: the logits may be overwritten, which saves memory that would have to pass through a CPU's cache.
    """
    rows, size = logits_BV.shape
    assert rows == len(params) == uniforms_B.shape[0]
    span_rows = max(1, CACHED // size) if logits_BV.device.type == "cpu" else rows
    spans = [slice(start, start + span_rows) for start in range(0, rows, span_rows)]
    parts = [_sample_rows(logits_BV[span], params[span], uniforms_B[span], spend) for span in spans]
    if len(parts) == 1:
        return parts[0]
    return SampledTokens(
        torch.cat([part.tokens_B for part in parts]),
        torch.cat([part.logprobs_B for part in parts]),
        torch.cat([part.raw_logprobs_B for part in parts]),
    )


def _sample_rows(logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: Tensor, spend: bool) -> SampledTokens:
    logits_BV = logits_BV.float()
    on_cpu = logits_BV.device.type == "cpu"
    unread = spend and on_cpu and all(row.temperature == 1.0 for row in params)  # only the probabilities are needed
    raw_BV = torch.softmax(logits_BV, dim=-1, out=logits_BV if unread else None)
    tempered_BV = raw_BV
    if any(row.temperature not in (0.0, 1.0) for row in params):
        scale = torch.tensor([row.temperature or 1.0 for row in params], device=logits_BV.device)
        tempered_BV = torch.softmax(logits_BV / scale[:, None], dim=-1)
    kept_BV = tempered_BV
    if any(row.truncated for row in params):
        kept_BV = tempered_BV.clone()
        for index, row in enumerate(params):
            if row.truncated:
                kept_BV[index] = truncate_distribution(tempered_BV[index], row)
    tokens_B = inverse_cdf(kept_BV, uniforms_B)
    greedy = [index for index, row in enumerate(params) if row.temperature == 0.0]
    if greedy:
        tokens_B[greedy] = logits_BV[greedy].argmax(dim=-1)
    logprobs_B = tempered_BV.gather(1, tokens_B[:, None])[
        :, 0
    ].log()  # above 0, or the token would not have been sampled
    if tempered_BV is raw_BV:
        return SampledTokens(tokens_B, logprobs_B, logprobs_B)
    plain_B = torch.tensor([row.temperature in (0.0, 1.0) for row in params], device=logits_BV.device)
    return SampledTokens(tokens_B, logprobs_B, torch.where(plain_B, logprobs_B, _logprobs(logits_BV, raw_BV, tokens_B)))


def _logprobs(logits_BV: Tensor, probs_BV: Tensor, tokens_B: Tensor) -> Tensor:
    top_B1 = logits_BV.amax(dim=-1, keepdim=True)
    return picked_logprobs(logits_BV.gather(1, tokens_B[:, None]), top_B1, probs_BV)[:, 0]


def truncate_distribution(probs_V: Tensor, params: SamplingParams) -> Tensor:
    """Zero the tokens that top-k, min-p or top-p exclude (in that order; the most likely one always stays)."""
    kept_V = torch.ones_like(probs_V, dtype=torch.bool)
    if params.top_k is not None and params.top_k < probs_V.shape[0]:
        kept_V &= probs_V >= torch.topk(probs_V, params.top_k).values[-1]
    if params.min_p > 0.0:
        kept_V &= probs_V >= params.min_p * probs_V.max()
    if params.top_p < 1.0:
        ordered, order = torch.sort(torch.where(kept_V, probs_V, 0.0), descending=True, stable=True)
        before = torch.cumsum(wide(ordered), 0) - ordered
        nucleus = torch.zeros_like(kept_V)
        nucleus[order] = before < params.top_p * wide(ordered).sum()
        kept_V &= nucleus
    return torch.where(kept_V, probs_V, 0.0)


def inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the token t with sum(w[:t]) <= u sum(w) < sum(w[:t + 1]); never one of weight 0.

    In two levels (blocks of 128, then inside the block) with float64 sums (float32 on MPS): fewer roundings
    than one long cumulative sum, and most of the vocabulary is read once.
    """
    rows, size = weights_BV.shape
    even_BV = torch.nn.functional.pad(weights_BV, (0, -size % BLOCK)) if size % BLOCK else weights_BV
    padded = even_BV.reshape(rows, -1, BLOCK)
    blocks = wide(padded.sum(dim=-1)).cumsum(dim=-1)
    total = blocks[:, -1:]
    target = torch.minimum(
        uniforms_B.to(blocks.dtype)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    block = (blocks <= target).sum(dim=-1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inside = padded[torch.arange(rows, device=block.device), block]
    cumulative = wide(inside).cumsum(dim=-1)
    index = (cumulative <= (target[:, 0] - before)[:, None]).sum(dim=-1)
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(dim=-1)  # rounding may push the target past the block's end
    return block * BLOCK + torch.minimum(index, last)
