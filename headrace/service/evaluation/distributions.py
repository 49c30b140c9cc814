"""Entropy of a policy and KL between two policies, in nats per token.

Small requests are answered from whole distributions (`exact`), others by estimates from what was sampled. Both are of
the distribution at the request's temperature. V vocabulary, n positions.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.statistics import k3
from headrace.service.evaluation.evaluation_metrics import Floats, PolicySamples, mean
from headrace.service.evaluation.reference_scoring import References
from headrace.service.host.model_host import ModelHost, TopLogprobsHost
from headrace.service.http.evaluation_schemas import Evaluate
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.types import Datum, FloatArray, IntArray, float_array, int_array

EXACT_CELLS = 2**24  # positions times vocabulary up to which whole distributions are compared
EXACT, K3, SAMPLED = "exact", "k3", "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    value: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions of a sequence whose distributions are looked at: from `start` on."""

    tokens: IntArray
    start: int


class Distributions:
    """Measure samplers of the host."""

    def __init__(self, host: ModelHost, samplers: SamplerCache, references: References, *, vocabulary: int) -> None:
        self._host, self._samplers, self._references = host, samplers, references
        self._vocabulary = vocabulary

    async def entropy(self, sampler: str, request: Evaluate, samples: PolicySamples) -> Measured | None:
        """Return the mean entropy of whole distributions, or minus the mean log-prob of the sampled tokens."""
        spans = _spans(request, samples)
        if self._are_small(spans):
            entropies = [np.zeros(0)]
            for span in spans:
                logprobs_nV = await self._logprobs(sampler, span, request.temperature)
                entropies.append(-(np.exp(logprobs_nV) * logprobs_nV).sum(axis=1))
            return Measured(value=mean(np.concatenate(entropies)), method=EXACT)
        if not request.prompts:
            return None
        logprobs = _sampled_logprobs(samples)
        return Measured(value=-float(logprobs.mean()) if len(logprobs) else math.nan, method=SAMPLED)

    async def kl_to_sampler(
        self, sampler: str, other: str, request: Evaluate, samples: PolicySamples
    ) -> Measured | None:
        """Measure KL(sampler || other) at positions of the sampler's own samples; `other` is an open sampler."""
        spans = _spans(request, samples)
        if self._are_small(spans):
            return await self._exact_kl(sampler, other, spans, request.temperature)
        if not request.prompts:
            return None  # estimates need samples of the policy itself
        scores = await self._references.score_under(other, [_datum(span, request.temperature) for span in spans])
        return _estimate_kl(samples, spans, scores)

    async def kl_to_reference(
        self, sampler: str, reference: str, owner: str, request: Evaluate, samples: PolicySamples
    ) -> Measured | None:
        """Measure KL(sampler || reference); the reference has a name of `References`, and may be a frozen model."""
        spans = _spans(request, samples)
        if self._are_small(spans) and reference not in self._references.named:
            async with self._samplers.using(self._references.policy(reference, owner)) as other:
                return await self._exact_kl(sampler, other, spans, request.temperature)
        if not request.prompts:
            return None  # estimates need samples of the policy itself
        data = [_datum(span, request.temperature) for span in spans]
        return _estimate_kl(samples, spans, await self._references.score(reference, owner, data))

    def _are_small(self, spans: Sequence[Span]) -> bool:
        cells = sum(len(span.tokens) for span in spans) * self._vocabulary  # the host ranks prompts as well
        return isinstance(self._host, TopLogprobsHost) and cells <= EXACT_CELLS

    async def _exact_kl(self, sampler: str, other: str, spans: Sequence[Span], temperature: float) -> Measured:
        divergences = [np.zeros(0)]
        for span in spans:
            mine_nV = await self._logprobs(sampler, span, temperature)
            theirs_nV = await self._logprobs(other, span, temperature)
            divergences.append((np.exp(mine_nV) * (mine_nV - theirs_nV)).sum(axis=1))
        return Measured(value=mean(np.concatenate(divergences)), method=EXACT)

    async def _logprobs(self, sampler: str, span: Span, temperature: float) -> Floats:
        """Return the log-probs of every token at the span's positions, [n, V]."""
        assert isinstance(self._host, TopLogprobsHost)
        top = await self._host.top_logprobs(sampler, span.tokens, self._vocabulary)
        return await asyncio.to_thread(_normalised, top.tokens[span.start :], top.logprobs[span.start :], temperature)


def _estimate_kl(samples: PolicySamples, spans: Sequence[Span], scores: Sequence[FloatArray]) -> Measured:
    theirs = np.concatenate([logprobs[span.start - 1 :] for logprobs, span in zip(scores, spans, strict=True)])
    return Measured(value=mean(k3(_sampled_logprobs(samples), theirs)), method=K3)


def _sampled_logprobs(samples: PolicySamples) -> Floats:
    logprobs: Floats = np.concatenate(
        [completion.sampler_logprobs for group in samples.completions for completion in group]
    )
    return logprobs


def _spans(request: Evaluate, samples: PolicySamples) -> list[Span]:
    """Choose the positions to look at: what was sampled, or the given sequences where nothing was."""
    if not request.prompts:
        return [Span(tokens=int_array(sequence.tokens), start=1) for sequence in request.sequences]
    return [
        Span(tokens=int_array([*prompt.tokens, *completion.tokens]), start=len(prompt.tokens))
        for prompt, group in zip(request.prompts, samples.completions, strict=True)
        for completion in group
    ]


def _datum(span: Span, temperature: float) -> Datum:
    weights = np.zeros(len(span.tokens) - 1)
    weights[span.start - 1 :] = 1.0
    return Datum(
        inputs=int_array(span.tokens[:-1]),
        targets=int_array(span.tokens[1:]),
        arrays={"weights": float_array(weights)},
        temperature=temperature,
    )


def _normalised(tokens: IntArray, logprobs: FloatArray, temperature: float) -> Floats:
    """Return log-probs at a temperature in the order of the vocabulary, from those of all tokens in any order."""
    table_nV = np.empty(logprobs.shape)
    np.put_along_axis(table_nV, tokens.astype(np.int64), logprobs, axis=1)
    table_nV /= temperature
    table_nV -= table_nV.max(axis=1, keepdims=True)
    normalised: Floats = table_nV - np.log(np.exp(table_nV).sum(axis=1, keepdims=True))
    return normalised
