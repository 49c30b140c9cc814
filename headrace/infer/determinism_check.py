"""Check that this machine keeps the determinism contract: requests sampled alone and in batches have the same bits."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from headrace.infer.engine import EmbeddedEngine
from headrace.infer.slot_cache import FIRST_SLOT_TOKENS
from headrace.model.load import LanguageModel, prepare, shared_view
from headrace.model.multi_lora import BASE, Adapter, AdapterTable, install_hooks
from headrace.model.tiny import make_model
from headrace.types import Completion, SampleRequest, SamplingParams, int_array

VOCABULARY, CROWD, ROWS = 384, 48, 16
RANKS = (8, 8, 3)  # of the adapters, which requests use in turn
PROMPTS = (3, 17, 40, 64, 86, 110)  # tokens; the longest outgrow the first slots
TIGHT = ROWS * FIRST_SLOT_TOKENS  # as soon as slots must grow, half of the sequences are preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    changed: int  # requests whose bits depended on the batch
    detail: str

    @property
    def ok(self) -> bool:
        return self.changed == 0


@dataclass(frozen=True, slots=True)
class Case:
    request: SampleRequest
    adapter: int


def check_bit_equality(lm: LanguageModel | None = None) -> CheckResult:
    """Sample requests alone, in a large batch, and in one short of KV space; all must agree bit for bit.

    On a CPU some of them use adapters, if the model has the layers for them and no adapters yet.
    """
    lm = shared_view(lm or _tiny())
    table = AdapterTable(lm.model)
    install_hooks(lm.model, table)
    keys = [BASE, *_adapters(lm, table)]
    vocabulary = lm.vocabulary
    rng = np.random.default_rng(7)
    prompts = [int_array(rng.integers(0, vocabulary, size)) for size in PROMPTS]
    cases = [
        Case(
            SampleRequest(
                prompt=prompts[index % len(prompts)], params=SamplingParams(max_tokens=40, seed=index, stop_tokens=())
            ),
            keys[index % len(keys)],
        )
        for index in range(CROWD)
    ]
    with _engine(lm, table) as engine:
        alone = [completion for case in cases[: len(prompts)] for completion in _sample(engine, [case])]
    with _engine(lm, table) as engine:
        crowd = _sample(engine, cases)
    with _engine(lm, table, kv_tokens=TIGHT) as engine:
        tight = _sample(engine, cases)
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


def _adapters(lm: LanguageModel, table: AdapterTable) -> list[int]:
    if lm.device.type != "cpu" or not table.places:
        return []
    generator = torch.Generator().manual_seed(0)
    keys = []
    for rank in RANKS:
        down, up = {}, {}
        for name, (part, index) in table.places.items():
            down[name] = torch.randn(rank, part.inputs, generator=generator).to(lm.dtype) / part.inputs**0.5
            up[name] = 0.1 * torch.randn(part.outputs[index], rank, generator=generator).to(lm.dtype)
        keys.append(table.put(Adapter(rank=rank, alpha=1.0, down=down, up=up)))
    return keys


@contextmanager
def _engine(lm: LanguageModel, table: AdapterTable, *, kv_tokens: int | None = None) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(lm, max_num_seqs=ROWS, kv_tokens=kv_tokens, prefill_chunk_tokens=32, adapters=table)
    try:
        yield engine
    finally:
        engine.close()


def _sample(engine: EmbeddedEngine, cases: list[Case]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.sample(case.request, adapter=case.adapter) for case in cases))

    return asyncio.run(run())


def _same(left: Completion, right: Completion) -> bool:
    return bool(
        np.array_equal(left.tokens, right.tokens)
        and np.array_equal(left.sampler_logprobs.view(np.int32), right.sampler_logprobs.view(np.int32))
    )
