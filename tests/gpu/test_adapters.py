"""Adapters in CUDA graphs: rows of one batch use different ones, which come and go without a new capture."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import SamplerError
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import LanguageModel
from headrace.model.multi_lora import Adapter, AdapterTable, install_hooks
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.types import CROSS_ENTROPY, Adam, Completion, Datum, SampleRequest, SamplingParams, float_array, int_array
from support.cuda_models import KV_TOKENS, VOCABULARY, model_of, requests_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
EVERYTHING = (*ATTENTION, *MLP, "lm_head")
KINDS = ((4, EVERYTHING), (16, EVERYTHING), (20, EVERYTHING), (8, ATTENTION), (32, (*MLP, "lm_head")))


def random_adapter(table: AdapterTable, rank: int, targets: Sequence[str], seed: int, size: float = 0.2) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    down, up = {}, {}
    for part in table.parts.values():
        for name, outputs in zip(part.names, part.outputs, strict=True):
            if name.rpartition(".")[2] in targets:
                down[name] = torch.randn(rank, part.inputs, generator=generator) / part.inputs**0.5
                up[name] = torch.randn(outputs, rank, generator=generator) * size
    return Adapter(rank=rank, alpha=rank * 0.5, down=down, up=up)


@contextmanager
def opened(lm: LanguageModel, *, graphs: bool, rows: int = 64) -> Iterator[tuple[EmbeddedEngine, AdapterTable, Any]]:
    table = AdapterTable(lm.model)
    install_hooks(lm.model, table)
    decoder = graph_decoder(lm, max_num_seqs=rows, kv_tokens=KV_TOKENS, graphs=graphs, adapters=table)
    engine = EmbeddedEngine(lm, max_num_seqs=rows, kv_tokens=KV_TOKENS, decoder=decoder, adapters=table)
    try:
        yield engine, table, decoder
    finally:
        engine.close()


def sample_all(engine: EmbeddedEngine, requests: Sequence[SampleRequest], keys: Sequence[int]) -> list[Completion]:
    async def run() -> list[Completion]:
        async with asyncio.timeout(100):
            pairs = enumerate(requests)
            return await asyncio.gather(*(engine.sample(r, adapter=keys[i % len(keys)]) for i, r in pairs))

    return asyncio.run(run())


def differences(
    engine: EmbeddedEngine, requests: Sequence[SampleRequest], got: Sequence[Completion], keys: Sequence[int]
) -> list[float]:
    """Mean difference of each key's log-probs to a forward pass over the whole sequences."""
    found = []
    for at, key in enumerate(keys):
        mine = [(r, c) for i, (r, c) in enumerate(zip(requests, got, strict=True)) if i % len(keys) == at]
        scores = asyncio.run(
            engine.score([int_array(np.concatenate([r.prompt, c.tokens])) for r, c in mine], adapter=key)
        )
        parts = [np.abs(s[len(r.prompt) :] - c.raw_logprobs) for s, (r, c) in zip(scores, mine, strict=True)]
        found.append(float(np.concatenate(parts).mean()))
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_float32_log_probs_of_mixed_adapters_are_those_of_the_plain_path(kind: str) -> None:
    requests = requests_of(48)
    with opened(model_of(kind), graphs=True) as (engine, table, _):
        keys = [0, *(table.put(random_adapter(table, rank, on, rank)) for rank, on in KINDS)]
        graphed = sample_all(engine, requests, keys)
        assert max(differences(engine, requests, graphed, keys)) < 2e-4
    with opened(model_of(kind), graphs=False) as (engine, table, _):
        keys = [0, *(table.put(random_adapter(table, rank, on, rank)) for rank, on in KINDS)]
        plain = sample_all(engine, requests, keys)
    same = [(a.tokens == b.tokens).all() for a, b in zip(graphed, plain, strict=True)]
    assert np.mean(same) > 0.8  # others draw at an edge between two tokens
    for a, b, equal in zip(graphed, plain, same, strict=True):
        if equal:
            np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=2e-3)


def test_in_bfloat16_log_probs_of_mixed_adapters_are_those_of_a_forward_pass() -> None:
    requests = requests_of(60, temperature=1.0)
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, _):
        keys = [0, *(table.put(random_adapter(table, rank, on, rank, 0.05)) for rank, on in KINDS)]
        found = differences(engine, requests, sample_all(engine, requests, keys), keys)
    print("mean differences:", " ".join(f"{each:.5f}" for each in found))
    assert max(found) < 0.01


def test_a_prompt_of_two_tokens_has_one_to_prefill() -> None:
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, _):
        key = table.put(random_adapter(table, 16, EVERYTHING, 0, 0.05))
        request = SampleRequest(prompt=int_array([5, 9]), params=SamplingParams(max_tokens=20, seed=1, stop_tokens=()))
        assert max(differences(engine, [request], sample_all(engine, [request], [key]), [key])) < 0.02


def test_adapters_come_and_go_without_a_capture() -> None:
    requests = requests_of(32, temperature=1.0)
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, decoder):
        key = table.put(random_adapter(table, 32, EVERYTHING, 0))
        sample_all(engine, requests, [0, key])
        captured = dict(decoder._graphs)
        for seed in range(1, 5):
            before = key
            key = table.put(random_adapter(table, 32 if seed % 2 else 8, EVERYTHING, seed))
            asyncio.run(engine._call(lambda before=before: engine.remove_adapter(before, SamplerError("gone"))))
            got = sample_all(engine, requests, [0, key])
            assert max(differences(engine, requests, got, [0, key])) < 0.02
        assert decoder._graphs == captured


def test_an_adapter_of_a_larger_rank_makes_graphs_anew() -> None:
    requests = requests_of(16, temperature=1.0)
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, _):
        keys: list[int] = []
        for rank in (8, 64, 16, 128):
            keys.append(table.put(random_adapter(table, rank, EVERYTHING, rank, 0.05)))
            got = sample_all(engine, requests, keys)
            assert max(differences(engine, requests, got, keys)) < 0.02


def test_a_damaged_adapter_fails_its_own_requests_alone() -> None:
    requests = requests_of(16, temperature=1.0)
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, _):
        good = table.put(random_adapter(table, 8, EVERYTHING, 0))
        bad = table.put(random_adapter(table, 8, EVERYTHING, 1, size=1e30))

        async def run() -> list[Any]:
            keys = [good, bad, 0, 0]
            calls = (engine.sample(r, adapter=keys[i % 4]) for i, r in enumerate(requests))
            return await asyncio.gather(*calls, return_exceptions=True)

        got = asyncio.run(run())
    assert all(isinstance(got[i], SamplerError) == (i % 4 == 1) for i in range(16))
    assert "adapter" in str(got[1])


def test_many_different_adapters_fit_one_batch() -> None:
    requests = requests_of(64, tokens=20, temperature=1.0)
    with opened(model_of(dtype=torch.bfloat16), graphs=True) as (engine, table, _):
        keys = [table.put(random_adapter(table, 8, EVERYTHING, seed, 0.05)) for seed in range(64)]
        assert max(differences(engine, requests, sample_all(engine, requests, keys), keys)) < 0.02


def test_the_service_samples_what_it_trained() -> None:
    lm = model_of(dtype=torch.bfloat16, spread=0.02)
    host = AdapterHost(lm, max_num_seqs=16, kv_tokens=KV_TOKENS)
    tokens = int_array(np.random.default_rng(0).integers(0, VOCABULARY, 65))
    datum = Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(np.ones(64))})
    host.create("model", AdapterSpec(rank=16, seed=0)).result()
    first = host.forward_backward("model", [datum], CROSS_ENTROPY).result()
    for _ in range(20):
        host.optim_step("model", Adam(learning_rate=1e-3)).result()
        out = host.forward_backward("model", [datum], CROSS_ENTROPY).result()
    host.snapshot("model", "sampler").result()
    host.open_sampler("base", None).result()
    assert out.logprobs[0].mean() > first.logprobs[0].mean() + 1.0
    scores = {name: asyncio.run(host.score(name, [tokens]))[0][1:] for name in ("sampler", "base")}
    last = host.forward("model", [datum], CROSS_ENTROPY).result().logprobs[0]
    assert np.abs(scores["sampler"] - last).mean() < 0.01
    assert np.abs(scores["base"] - first.logprobs[0]).mean() < 0.01
    requests = requests_of(16, temperature=1.0)

    async def sample() -> list[Completion]:
        return await asyncio.gather(*(host.sample("sampler", request) for request in requests))

    got = asyncio.run(sample())
    whole = [int_array(np.concatenate([r.prompt, c.tokens])) for r, c in zip(requests, got, strict=True)]
    data = [
        Datum(inputs=each[:-1], targets=each[1:], arrays={"weights": float_array(np.ones(len(each) - 1))})
        for each in whole
    ]
    trained = host.forward("model", data, CROSS_ENTROPY).result().logprobs
    parts = [np.abs(t[len(r.prompt) - 1 :] - c.raw_logprobs) for t, r, c in zip(trained, requests, got, strict=True)]
    print(f"sampler against trainer {np.concatenate(parts).mean():.5f}")
    assert np.concatenate(parts).mean() < 0.01
    host.close()
