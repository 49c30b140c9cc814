"""A small model, data and hosts that the tests of the adapter host share."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.service.host.adapter_host import AdapterHost
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)

WORDS = tuple(f"w{index}" for index in range(40))
LIMIT_S = 200
STEP = Adam(learning_rate=0.02)


def small_model(dtype: torch.dtype = torch.float32) -> LanguageModel:
    model = make_model(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, context=128, seed=1)
    return prepare(model.to(dtype), make_tokenizer(WORDS), source="small")


@contextmanager
def opened(lm: LanguageModel | None = None, **options: Any) -> Iterator[AdapterHost]:
    host = AdapterHost(lm or small_model(), **{"max_num_seqs": 8, "kv_tokens": 4096, **options})
    try:
        yield host
    finally:
        host.close()


def data(seed: int, count: int = 3, length: int = 12) -> list[Datum]:
    """Token sequences; the first two tokens of each have no weight."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = int_array(rng.integers(0, 48, length + 1))
        weights = float_array([0.0, 0.0, *np.ones(length - 2)])
        made.append(Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights}))
    return made


def train(host: AdapterHost, model: str, seeds: Sequence[int]) -> list[float]:
    """One update for each seed, from two requests; the losses."""
    losses = []
    for seed in seeds:
        for part in (0, 1):
            losses.append(host.forward_backward(model, data(seed + 100 * part), CROSS_ENTROPY).result(LIMIT_S).loss)
        host.optim_step(model, STEP).result(LIMIT_S)
    return losses


def saved(host: AdapterHost, model: str, folder: Path) -> dict[str, torch.Tensor]:
    """All that a model saves, optimiser too."""
    host.save(model, folder, optimizer=True).result(LIMIT_S)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{file.name}/{name}": each for name, each in load_file(file).items()}
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def request(seed: int, *, prompt: Sequence[int] = (3, 1, 4, 1, 5, 9, 2, 6), max_tokens: int = 12) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_tokens=())
    return SampleRequest(prompt=int_array(prompt), params=params)


def sample(host: AdapterHost, asked: Sequence[tuple[str, SampleRequest]]) -> list[Completion]:
    """All at once."""

    async def run() -> list[Completion]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(host.sample(name, each) for name, each in asked))

    return asyncio.run(run())


def bits(completion: Completion) -> tuple[Any, ...]:
    """Equal for two completions exactly when tokens, log-probs (bit for bit) and the stop are."""
    logprobs = completion.sampler_logprobs.view(np.int32), completion.raw_logprobs.view(np.int32)
    return tuple(completion.tokens.tolist()), *(tuple(each.tolist()) for each in logprobs), completion.stop
