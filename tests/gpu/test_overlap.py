"""Sampling beside training on one device: the engine goes on while the trainer works, and versions stay exact."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import LanguageModel, prepare
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    FloatArray,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
VOCABULARY, PROMPT, TOKENS, VERSIONS = 500, 12, 400, 3
CONFIG = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
Weights = dict[str, torch.Tensor]


def model() -> LanguageModel:
    torch.manual_seed(0)
    return prepare(Qwen2ForCausalLM(CONFIG).cuda(), None, source="test")


def batch(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(16):
        tokens = rng.integers(0, VOCABULARY, 301)
        weights = float_array(np.full(300, 1 / 4800))
        data.append(Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": weights}))
    return data


async def train_meanwhile(engine: EmbeddedEngine, backend: TorchBackend) -> list[Weights]:
    """The weights of each version; every one is published while sequences are being sampled."""
    made = [copy.deepcopy(backend.lm.model.state_dict())]
    for version in range(1, VERSIONS + 1):
        meanwhile = 0  # sampled while the trainer worked
        for part in range(50):
            before = engine.counters.decoded
            computing = backend.forward_backward(batch(100 * version + part), CROSS_ENTROPY)
            updating = backend.optim_step(Adam(learning_rate=3e-3))
            await asyncio.wrap_future(computing)
            await asyncio.wrap_future(updating)
            meanwhile += engine.counters.decoded - before
            if part and meanwhile >= 1000:
                break
        assert meanwhile >= 1000
        handle = await asyncio.wrap_future(backend.export_weights())
        made.append(copy.deepcopy(backend.lm.model.state_dict()))
        await engine.pause(interrupt=True)
        assert await engine.load(handle, version) == handle.fingerprint
        await engine.resume()
    return made


def scores_by(lm: LanguageModel, weights: Weights, sequences: list[np.ndarray]) -> tuple[FloatArray, ...]:
    lm.model.load_state_dict(weights)
    engine = EmbeddedEngine(lm, max_num_seqs=8)
    try:
        return asyncio.run(engine.score([int_array(sequence) for sequence in sequences]))
    finally:
        engine.close()


def test_sampling_goes_on_beside_training_and_every_token_has_the_version_that_sampled_it() -> None:
    trained = model()
    own = prepare(copy.deepcopy(trained.model), None, source="test")
    kv_tokens = 32 * 512
    decoder = graph_decoder(own, max_num_seqs=32, kv_tokens=kv_tokens, graphs=True)
    engine = EmbeddedEngine(own, max_num_seqs=32, kv_tokens=kv_tokens, source=trained, decoder=decoder)
    backend = TorchBackend(trained, micro_batch_tokens=1200)
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(
            prompt=int_array(rng.integers(0, VOCABULARY, PROMPT)),
            params=SamplingParams(max_tokens=TOKENS, seed=index, stop_tokens=()),
        )
        for index in range(256)
    ]

    async def run() -> tuple[list[Completion], list[Weights]]:
        async with asyncio.timeout(120):
            await PartialEpisode().sample(engine, requests[0])  # kernels are compiled and graphs captured
            sampling = [asyncio.ensure_future(PartialEpisode().sample(engine, request)) for request in requests]
            made = await train_meanwhile(engine, backend)
            return await asyncio.gather(*sampling), made

    try:
        completions, made = asyncio.run(run())
    finally:
        engine.close()
        backend.close()
    sequences = [np.concatenate([r.prompt, c.tokens]) for r, c in zip(requests, completions, strict=True)]
    scored = [scores_by(own, weights, sequences) for weights in made]
    seen = np.concatenate([c.versions for c in completions])
    assert set(seen.tolist()) == set(range(VERSIONS + 1))
    assert all(len(c.tokens) == TOKENS for c in completions)
    for version in range(VERSIONS + 1):
        by_own, by_next = (
            np.concatenate(
                [
                    np.abs(score[PROMPT:] - c.sampler_logprobs)[c.versions == version]
                    for score, c in zip(scored[other], completions, strict=True)
                ]
            )
            for other in (version, (version + 1) % (VERSIONS + 1))
        )
        assert by_own.max() < 5e-3 < 0.05 < by_next.mean()
