"""Models, requests and comparisons that the engine's tests share."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import END_ID, make_model, make_tokenizer
from headrace.types import Completion, SampleRequest, SamplingParams, int_array

WORDS = tuple(f"w{index}" for index in range(112))
VOCABULARY = len(WORDS) + 8  # with the tokenizer's special tokens
CONTEXT = 512
LIMIT_S = 200.0  # of what would hang; a busy machine is far from it


def small_model(
    seed: int = 0, *, context: int = CONTEXT, layers: int = 2, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """In float32 the engine reads its parameters; in float64 it calls its modules, which a test can tamper with."""
    model = make_model(vocab_size=VOCABULARY, width=32, layers=layers, heads=4, kv_heads=2, context=context, seed=seed)
    lm = prepare(model.to(dtype), make_tokenizer(WORDS), source="tests")
    assert lm.eos_tokens == (END_ID,)
    return lm


@contextmanager
def opened(lm: LanguageModel, **options: Any) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(lm, **options)
    try:
        yield engine
    finally:
        engine.close()


def request_of(
    prompt: Sequence[int], max_tokens: int, *, after: Completion | None = None, **params: Any
) -> SampleRequest:
    """Without stop tokens unless they are given."""
    options = {"stop_tokens": (), **params}
    return SampleRequest(
        prompt=int_array(prompt), params=SamplingParams(max_tokens=max_tokens, **options), continue_from=after
    )


def sample_all(
    engine: EmbeddedEngine, requests: Sequence[SampleRequest], *, limit_s: float = LIMIT_S
) -> list[Completion]:
    async def run() -> list[Completion]:
        async with asyncio.timeout(limit_s):
            return await asyncio.gather(*(engine.sample(request) for request in requests))

    return asyncio.run(run())


def alone(lm: LanguageModel, request: SampleRequest) -> Completion:
    """The request in an engine of its own with room to spare."""
    with opened(lm, max_num_seqs=8) as engine:
        return sample_all(engine, [request])[0]


def bits(completion: Completion) -> tuple[Any, ...]:
    """Equal for two completions exactly when tokens, log-probs (bit for bit) and the stop are."""
    return (
        completion.tokens.tolist(),
        completion.sampler_logprobs.view(np.int32).tolist(),
        completion.raw_logprobs.view(np.int32).tolist(),
        completion.stop,
    )


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size).tolist()


def long_requests(count: int, *, size: int = 10, max_tokens: int = 450) -> list[SampleRequest]:
    return [request_of(prompt_of(size, seed), max_tokens, seed=seed) for seed in range(count)]


async def decoded(engine: EmbeddedEngine, count: int) -> None:
    """Return when the engine has sampled `count` tokens since it started."""
    while engine.counters.decoded < count:  # noqa: ASYNC110 the engine is a thread that tells nobody about a token
        await asyncio.sleep(0)


def twice_as_sharp(lm: LanguageModel) -> None:
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(1.5)
