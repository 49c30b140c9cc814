"""Does this machine keep the determinism contract? A tiny model is sampled alone and in crowds."""

import asyncio
from dataclasses import dataclass

import numpy as np

from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model
from headrace.types import Completion, SampleRequest, SamplingParams, int_array

VOCABULARY, PROMPTS, CROWD = 384, 6, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    ok: bool
    detail: str


def check_bit_equality(lm: LanguageModel | None = None) -> CheckResult:
    """Sample some requests alone, in a crowd, and in a crowd short of KV space; all must agree bit for bit."""
    lm = lm or _tiny()
    vocabulary = lm.vocabulary
    rng = np.random.default_rng(7)
    prompts = [int_array(rng.integers(0, vocabulary, size)) for size in rng.integers(3, 90, PROMPTS)]
    requests = [
        SampleRequest(prompt=prompts[index % PROMPTS], params=SamplingParams(max_tokens=40, seed=index, stop_tokens=()))
        for index in range(CROWD)
    ]
    alone = asyncio.run(_sample(lm, requests[:PROMPTS], crowd=False, kv_tokens=None))
    crowd = asyncio.run(_sample(lm, requests, crowd=True, kv_tokens=None))
    tight = asyncio.run(_sample(lm, requests, crowd=True, kv_tokens=8 * 192))
    wrong = [
        index for index, first in enumerate(alone) if not (_same(first, crowd[index]) and _same(first, tight[index]))
    ]
    tokens = sum(len(completion.tokens) for completion in alone)
    if wrong:
        return CheckResult(ok=False, detail=f"{len(wrong)} of {PROMPTS} requests changed bits with the batch")
    return CheckResult(
        ok=True, detail=f"{tokens} tokens have the same bits alone, among {CROWD} requests and preempted"
    )


def _tiny() -> LanguageModel:
    model = make_model(vocab_size=VOCABULARY, width=96, layers=2, heads=4, kv_heads=2, context=512, seed=0)
    return prepare(model, None, source="self-check")


async def _sample(
    lm: LanguageModel, requests: list[SampleRequest], *, crowd: bool, kv_tokens: int | None
) -> list[Completion]:
    engine = EmbeddedEngine(lm, max_rows=16, kv_tokens=kv_tokens, piece_tokens=32)
    try:
        if crowd:
            return list(await asyncio.gather(*(engine.sample(request) for request in requests)))
        return [await engine.sample(request) for request in requests]
    finally:
        engine.close()


def _same(left: Completion, right: Completion) -> bool:
    return bool(
        np.array_equal(left.tokens, right.tokens)
        and np.array_equal(left.sampler_logprobs.view(np.int32), right.sampler_logprobs.view(np.int32))
    )
