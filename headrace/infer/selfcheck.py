"""Does this machine keep the determinism contract? A tiny model is sampled alone and in crowds."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from headrace.infer.engine import FIRST_SLOT_TOKENS, EmbeddedEngine
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model
from headrace.types import Completion, SampleRequest, SamplingParams, int_array

VOCABULARY, CROWD, ROWS = 384, 48, 16
PROMPTS = (3, 17, 40, 64, 86, 110)  # tokens; the longest outgrow the first slots
TIGHT = ROWS * FIRST_SLOT_TOKENS  # as soon as slots must grow, half of the sequences are preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    changed: int  # requests whose bits depended on the batch
    detail: str

    @property
    def ok(self) -> bool:
        return self.changed == 0


def check_bit_equality(lm: LanguageModel | None = None) -> CheckResult:
    """Sample some requests alone, in a crowd, and in a crowd short of KV space; all must agree bit for bit."""
    lm = lm or _tiny()
    vocabulary = lm.vocabulary
    rng = np.random.default_rng(7)
    prompts = [int_array(rng.integers(0, vocabulary, size)) for size in PROMPTS]
    requests = [
        SampleRequest(
            prompt=prompts[index % len(prompts)], params=SamplingParams(max_tokens=40, seed=index, stop_tokens=())
        )
        for index in range(CROWD)
    ]
    with _engine(lm) as engine:
        alone = [completion for request in requests[: len(prompts)] for completion in _sample(engine, [request])]
    with _engine(lm) as engine:
        crowd = _sample(engine, requests)
    with _engine(lm, kv_tokens=TIGHT) as engine:
        tight = _sample(engine, requests)
        assert engine.counters.preempted > 0
    wrong = [
        index for index, first in enumerate(alone) if not (_same(first, crowd[index]) and _same(first, tight[index]))
    ]
    tokens = sum(len(completion.tokens) for completion in alone)
    if wrong:
        return CheckResult(
            changed=len(wrong), detail=f"{len(wrong)} of {len(prompts)} requests changed bits with the batch"
        )
    return CheckResult(
        changed=0, detail=f"{tokens} tokens have the same bits alone, among {CROWD} requests and preempted"
    )


def _tiny() -> LanguageModel:
    model = make_model(vocab_size=VOCABULARY, width=96, layers=2, heads=4, kv_heads=2, context=512, seed=0)
    return prepare(model, None, source="self-check")


@contextmanager
def _engine(lm: LanguageModel, *, kv_tokens: int | None = None) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(lm, max_rows=ROWS, kv_tokens=kv_tokens, piece_tokens=32)
    try:
        yield engine
    finally:
        engine.close()


def _sample(engine: EmbeddedEngine, requests: list[SampleRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    return asyncio.run(run())


def _same(left: Completion, right: Completion) -> bool:
    return bool(
        np.array_equal(left.tokens, right.tokens)
        and np.array_equal(left.sampler_logprobs.view(np.int32), right.sampler_logprobs.view(np.int32))
    )
