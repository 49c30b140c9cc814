"""Decoding in CUDA graphs: what the plain path samples, in any crowd, through preemption and weight updates."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algo.random import uniforms
from headrace.errors import SamplerError
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.multistep import DecodeRow
from headrace.model.attention import Packed, PromptChunk
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora, lora_layers
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights, StopReason, int_array
from support.cuda_models import KV_TOKENS, VOCABULARY, model_of, requests_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@contextmanager
def opened(
    lm: LanguageModel, *, graphs: bool, max_num_seqs: int = 32, kv_tokens: int = KV_TOKENS, **options: Any
) -> Iterator[EmbeddedEngine]:
    decoder = graph_decoder(lm, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens, graphs=graphs, **options)
    assert (decoder is not None) == graphs
    engine = EmbeddedEngine(lm, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens, decoder=decoder)
    try:
        yield engine
    finally:
        engine.close()


def sample_all(engine: EmbeddedEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        async with asyncio.timeout(100):
            return await asyncio.gather(*(engine.sample(request) for request in requests))

    return asyncio.run(run())


def mean_difference(engine: EmbeddedEngine, requests: Sequence[SampleRequest], got: Sequence[Completion]) -> float:
    """Of the raw log-probs to the trainer's forward pass."""
    whole = [int_array(np.concatenate([r.prompt, c.tokens])) for r, c in zip(requests, got, strict=True)]
    scores = asyncio.run(engine.score(whole))
    return float(
        np.concatenate(
            [np.abs(s[len(r.prompt) :] - c.raw_logprobs) for s, r, c in zip(scores, requests, got, strict=True)]
        ).mean()
    )


def same_share(left: Sequence[Completion], right: Sequence[Completion]) -> float:
    """Share of tokens before the first that differs, over all sequences."""
    total = equal = 0
    for a, b in zip(left, right, strict=True):
        differs = a.tokens != b.tokens
        total += len(a.tokens)
        equal += int(differs.argmax()) if differs.any() else len(a.tokens)
    return equal / total


def unexplained(
    lm: LanguageModel, requests: Sequence[SampleRequest], left: Sequence[Completion], right: Sequence[Completion]
) -> list[tuple[int, int, float]]:
    """Sequences that part at a token for which rounding is no reason: (request, place, how far from an edge).

    Two draws may differ only where the uniform number lies on the edge between their tokens, or, greedily, at a tie.
    """
    found = []
    for index, (request, a, b) in enumerate(zip(requests, left, right, strict=True)):
        differs = a.tokens != b.tokens
        if not differs.any():
            continue
        place = int(differs.argmax())
        tokens = torch.tensor([*request.prompt.tolist(), *a.tokens[:place].tolist()], device=lm.device)
        with torch.no_grad():
            hidden = lm.hidden(tokens, torch.arange(len(tokens), device=lm.device), Packed((len(tokens),)))
            logits = (hidden[-1] @ lm.head_weight().T).double()
        low, high = sorted((int(a.tokens[place]), int(b.tokens[place])))
        allowed = 1e-4 if request.params.temperature == 0.0 else 2e-5  # a fifth of a token's mean share
        if request.params.temperature == 0.0:
            distance = float((logits[low] - logits[high]).abs())
        else:
            edges = torch.softmax(logits / request.params.temperature, dim=-1).cumsum(0)
            number = float(uniforms([request.params.seed], [place])[0])
            distance = max(abs(float(edges[low]) - number), abs(float(edges[high - 1]) - number))
        if distance > allowed:
            found.append((index, place, distance))
    return found


def test_a_visit_behind_a_visit_goes_on_and_what_is_shared_is_read_in_the_donors_slot() -> None:
    lm = model_of(dtype=torch.bfloat16)
    decoder = graph_decoder(lm, max_num_seqs=8, kv_tokens=8 * 256, graphs=True)
    assert decoder is not None
    cache = decoder.cache(8, 256)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 151).tolist()

    def drawn(steps: Sequence[int], *, donor: int, shared: int) -> list[int]:
        token, position = prompt[150], 150
        row = DecodeRow(slot=1, token=token, position=position, count=0, limit=200, seed=7, temperature=1.0, stops=(),
                  donor=donor, shared=shared)  # fmt: skip
        decoder.start([row], steps[0])
        for more in steps[1:]:
            assert decoder.start_next(more)
        return [int(one) for _ in steps for one in decoder.finish().tokens[0]]

    with torch.inference_mode():
        decoder.prefill([PromptChunk(0, 0, 150)], prompt[:150])
        cache.copy_prefix(0, 1, 150)
        own = drawn([12], donor=1, shared=0)
        assert drawn([7, 5], donor=0, shared=150) == own
        for layer in (*cache.keys, *cache.values):
            layer[1][:, :128] = 0.0  # two whole blocks, which are not read here
        assert drawn([7, 5], donor=0, shared=150) == own
        assert drawn([12], donor=0, shared=127) != own  # of the second block one position is not shared


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_float32_the_tokens_are_those_of_the_plain_path(kind: str) -> None:
    lm, requests = model_of(kind), requests_of(48)
    with opened(lm, graphs=True) as engine:
        graphed = sample_all(engine, requests)
        assert engine.counters.shared > 0
        assert mean_difference(engine, requests, graphed) < 1e-4
    with opened(lm, graphs=False) as engine:
        plain = sample_all(engine, requests)
    assert [c.stop for c in graphed] == [c.stop for c in plain]
    assert unexplained(lm, requests, graphed, plain) == []
    for a, b in zip(graphed, plain, strict=True):
        if (a.tokens == b.tokens).all():
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=2e-3)
            np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=2e-3)


def distance_to_float32(lm: LanguageModel, requests: Sequence[SampleRequest], got: Sequence[Completion]) -> float:
    """Mean |difference| between the trainer's log-probs of what was sampled and those of the same weights in float32:
    what half precision costs this model, whoever computes."""
    exact = prepare(copy.deepcopy(lm.model).float(), None, source="test")
    whole = [int_array(np.concatenate([r.prompt, c.tokens])) for r, c in zip(requests, got, strict=True)]
    scored = []
    for model in (lm, exact):
        engine = EmbeddedEngine(model, max_num_seqs=8)
        scored.append(asyncio.run(engine.score(whole)))
        engine.close()
    pairs = zip(*scored, requests, strict=True)
    return float(np.concatenate([np.abs(a - b)[len(request.prompt) :] for a, b, request in pairs]).mean())


@pytest.mark.parametrize("spread", [0.02, 0.1])  # with 0.1 logits are far apart, as in a trained model
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_the_log_probs_are_those_of_the_trainer(kind: str, spread: float) -> None:
    lm, requests = model_of(kind, torch.bfloat16, spread=spread), requests_of(48, temperature=1.0)
    with opened(lm, graphs=True) as engine:
        graphed = sample_all(engine, requests)
        by_graph = mean_difference(engine, requests, graphed)
    with opened(lm, graphs=False) as engine:
        by_plain = mean_difference(engine, requests, sample_all(engine, requests))
    rounding = distance_to_float32(lm, requests, graphed)
    print(
        f"{kind} {spread}: sampler against trainer {by_graph:.5f} (plain path {by_plain:.5f}), bfloat16 {rounding:.5f}"
    )
    assert by_graph < 1.5 * rounding + 1e-3  # two results that round independently are sqrt(2) of one's error apart
    assert by_plain < 1.5 * rounding + 1e-3
    assert max(by_graph, by_plain) < 0.01


@pytest.mark.parametrize("rows", [64, 256])  # attention has other programs than with few rows; those of 64 are split
def test_many_rows_have_the_log_probs_of_the_trainer_too(rows: int) -> None:
    lm, requests = model_of(dtype=torch.bfloat16), requests_of(rows, temperature=1.0)
    with opened(lm, graphs=True, max_num_seqs=rows, kv_tokens=rows * 128) as engine:
        assert mean_difference(engine, requests, sample_all(engine, requests)) < 0.01


@pytest.mark.parametrize("graphs", [True, False])
def test_in_bfloat16_an_adapters_log_probs_are_those_of_the_trainer(graphs: bool) -> None:
    lm, requests = model_of(dtype=torch.bfloat16, spread=0.1), requests_of(24, temperature=1.0)
    add_lora(lm.model, rank=4, alpha=8.0, targets=("q_proj", "o_proj", "gate_proj", "down_proj"), seed=0)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.normal_(std=0.1)
    with opened(lm, graphs=graphs) as engine:
        assert mean_difference(engine, requests, sample_all(engine, requests)) < 0.01


def test_rows_stop_at_their_tokens_and_limits() -> None:
    lm = model_of()
    [free] = requests_of(1, tokens=60)
    with opened(lm, graphs=True) as engine:
        [whole] = sample_all(engine, [free])
        for place in (0, 15, 16, 40):
            wanted = int(whole.tokens[place])
            end = whole.tokens.tolist().index(wanted) + 1
            stopped = SampleRequest(
                prompt=free.prompt,
                params=SamplingParams(max_tokens=60, seed=2**63, stop_tokens=(VOCABULARY - 1, wanted)),
            )
            [short] = sample_all(engine, [stopped])
            assert (short.stop, short.tokens.tolist()) == (StopReason.STOP, whole.tokens[:end].tolist())


def test_preempted_sequences_go_on() -> None:
    # 16 slots of 128 tokens fit; at 100 + 60 tokens slots must have 256, of which 8 fit: 8 of 16 are preempted
    lm = model_of()
    rng = np.random.default_rng(1)
    requests = [
        SampleRequest(
            prompt=int_array(rng.integers(0, VOCABULARY, 100)),
            params=SamplingParams(max_tokens=60, seed=seed, stop_tokens=()),
        )
        for seed in range(20)
    ]
    with opened(lm, graphs=True, max_num_seqs=16, kv_tokens=2048) as engine:
        tight = sample_all(engine, requests)
        assert engine.counters.preempted >= 8
        assert engine.counters.decoded == 20 * 60
        assert mean_difference(engine, requests, tight) < 1e-4
    with opened(lm, graphs=True) as engine:
        roomy = sample_all(engine, requests)
    assert unexplained(lm, requests, tight, roomy) == []


def test_graphs_survive_a_weight_update_in_flight() -> None:
    lm = model_of(dtype=torch.bfloat16, spread=0.02)
    source = prepare(copy.deepcopy(lm.model), None, source="test")
    requests = requests_of(24, tokens=200, temperature=1.0)
    decoder = graph_decoder(lm, max_num_seqs=32, kv_tokens=KV_TOKENS, graphs=True)
    engine = EmbeddedEngine(lm, max_num_seqs=32, kv_tokens=KV_TOKENS, source=source, decoder=decoder)

    async def run() -> list[Completion]:
        calls = [asyncio.ensure_future(engine.sample(request)) for request in requests]
        while engine.counters.decoded < 500:  # noqa: ASYNC110 the engine is a thread that tells nobody about a token
            await asyncio.sleep(0)
        await engine.pause(interrupt=True)
        partials = await asyncio.gather(*calls)
        with torch.no_grad():
            for parameter in source.model.parameters():
                parameter.mul_(1.5)
        await engine.load(SharedWeights(fingerprint=""), 1)
        await engine.resume()
        return await asyncio.gather(
            *(
                engine.sample(SampleRequest(prompt=r.prompt, params=r.params, continue_from=p))
                for r, p in zip(requests, partials, strict=True)
            )
        )

    whole = asyncio.run(run())
    sequences = [int_array(np.concatenate([r.prompt, c.tokens])) for r, c in zip(requests, whole, strict=True)]
    scores = asyncio.run(engine.score(sequences))  # under the new weights
    engine.close()
    old, new = [], []
    for request, completion, score in zip(requests, whole, scores, strict=True):
        difference = np.abs(score[len(request.prompt) :] - completion.raw_logprobs)
        old.append(difference[completion.versions == 0])
        new.append(difference[completion.versions == 1])
    assert len(np.concatenate(new)) > 500
    assert np.concatenate(new).mean() < 0.03 < 0.1 < np.concatenate(old).mean()


def test_an_adapter_is_part_of_what_is_decoded() -> None:
    lm = model_of()
    add_lora(lm.model, rank=4, alpha=8.0, targets=("q_proj", "gate_proj", "down_proj"), seed=0)
    requests = requests_of(8)
    with opened(lm, graphs=True) as engine:
        before = sample_all(engine, requests)
        with torch.no_grad():
            for _, layer in lora_layers(lm.model):
                layer.up.normal_(std=0.2)
        asyncio.run(engine.load(SharedWeights(fingerprint=""), 1))
        after = sample_all(engine, requests)
        assert mean_difference(engine, requests, after) < 1e-3
    assert same_share(before, after) < 0.5


def test_a_deterministic_decoder_repeats_itself_in_any_crowd() -> None:
    lm, requests = model_of(dtype=torch.bfloat16), requests_of(40)
    with opened(lm, graphs=True, deterministic=True) as engine:
        first = sample_all(engine, requests)
    with opened(lm, graphs=True, deterministic=True) as engine:
        again = sample_all(engine, list(reversed(requests)))[::-1]
        few = [sample_all(engine, [request])[0] for request in requests[:5]]
    for one, other in [*zip(first, again, strict=True), *zip(first, few, strict=False)]:
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.sampler_logprobs.tobytes() == other.sampler_logprobs.tobytes()


def test_a_deterministic_decoder_repeats_a_second_turn_whoever_has_the_slots() -> None:
    lm, requests = model_of(dtype=torch.bfloat16), requests_of(20)

    def second_turns(first: list[Completion]) -> list[SampleRequest]:
        return [
            SampleRequest(prompt=int_array([*r.prompt, *c.tokens, *r.prompt[:5]]), params=r.params)
            for r, c in zip(requests, first, strict=True)
        ]

    with opened(lm, graphs=True, deterministic=True) as engine:
        turns = second_turns(sample_all(engine, requests))
        kept = sample_all(engine, turns)  # next to the slots of the first turns
    with opened(lm, graphs=True, deterministic=True) as engine:
        fresh = [sample_all(engine, [turn])[0] for turn in turns[:8]] + sample_all(engine, turns[8:])
    for one, other in zip(kept, fresh, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.sampler_logprobs.tobytes() == other.sampler_logprobs.tobytes()


def test_a_copy_of_a_fused_model_computes_as_the_model_does() -> None:
    lm = model_of(dtype=torch.bfloat16)
    other = prepare(copy.deepcopy(lm.model), None, source="test")
    tokens = torch.arange(1, 40, device="cuda")
    with torch.no_grad():
        one, two = (m.hidden(tokens, torch.arange(39, device="cuda"), Packed((39,))) for m in (lm, other))
    assert one.dtype == two.dtype == torch.bfloat16
    assert torch.equal(one, two)


def test_the_same_requests_have_the_same_tokens_again() -> None:
    lm, requests = model_of(dtype=torch.bfloat16), requests_of(32)
    runs = []
    for _ in range(2):
        with opened(lm, graphs=True) as engine:
            runs.append(sample_all(engine, requests))
    assert same_share(*runs) > 0.9


def test_what_cannot_be_graphed_is_said() -> None:
    lm = model_of()
    lm.model.config.model_type = "olmo2"
    with pytest.raises(SamplerError, match="olmo2"):
        graph_decoder(lm, max_num_seqs=8, kv_tokens=4096, graphs=True)
    assert graph_decoder(lm, max_num_seqs=8, kv_tokens=4096) is None
