"""The CUDA path: packed attention through varlen, the engine on the device, bf16 modules with float32 masters."""

import asyncio
import copy

import numpy as np
import pytest
import torch

from headrace.infer.engine import EmbeddedEngine
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model
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
VOCABULARY = 400


def model_on(device: str, dtype: torch.dtype) -> LanguageModel:
    model = make_model(vocab_size=VOCABULARY, width=256, layers=3, heads=4, kv_heads=2, context=512, seed=0)
    return prepare(model.to(device, dtype), None, source="test")


def batch(seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for size in rng.integers(10, 90, 12):
        tokens = rng.integers(0, VOCABULARY, size + 1)
        weights = rng.normal(size=size) / 500
        data.append(
            Datum(
                inputs=int_array(tokens[:-1]),
                targets=int_array(tokens[1:]),
                arrays={"weights": float_array(weights)},
            )
        )
    return data


def test_packed_hidden_states_equal_the_cpu_within_bf16() -> None:
    lengths = (17, 64, 5, 200)
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        exact = model_on("cpu", torch.float32).hidden(tokens, positions, Packed(lengths))
        cuda = model_on("cuda", torch.bfloat16).hidden(tokens.cuda(), positions.cuda(), Packed(lengths))
    error = (cuda.float().cpu() - exact).norm() / exact.norm()
    assert error < 2e-2  # bf16 keeps 8 bits: 4e-3 per operation


def test_training_on_cuda_follows_the_cpu() -> None:
    losses = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        backend = TorchBackend(model_on(device, dtype), micro_batch_tokens=256)
        steps = []
        for _ in range(5):
            steps.append(backend.forward_backward(batch(), CROSS_ENTROPY).result().loss)
            backend.optim_step(Adam(learning_rate=1e-3)).result()
        backend.close()
        losses[device, dtype] = np.array(steps)
    np.testing.assert_allclose(losses["cuda", torch.float32], losses["cpu", torch.float32], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(losses["cuda", torch.bfloat16], losses["cpu", torch.float32], rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_sampled_log_probs_agree_with_the_trainer(dtype: torch.dtype, mean: float) -> None:
    lm = model_on("cuda", dtype)
    engine = EmbeddedEngine(lm, max_num_seqs=32)
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(
            prompt=int_array(rng.integers(0, VOCABULARY, 20)),
            params=SamplingParams(max_tokens=60, seed=index, stop_tokens=()),
        )
        for index in range(48)
    ]

    async def sample_and_score() -> tuple[list[Completion], tuple[FloatArray, ...]]:
        completions = await asyncio.gather(*(engine.sample(request) for request in requests))
        sequences = [np.concatenate([r.prompt, c.tokens]) for r, c in zip(requests, completions, strict=True)]
        return completions, await engine.score(sequences)

    completions, scores = asyncio.run(sample_and_score())
    engine.close()
    difference = np.concatenate([np.abs(s[20:] - c.sampler_logprobs) for s, c in zip(scores, completions, strict=True)])
    assert len(difference) == 48 * 60
    assert difference.mean() <= mean


def test_a_saved_state_goes_on_exactly_on_cuda(tmp_path) -> None:  # type: ignore[no-untyped-def]
    lm = model_on("cuda", torch.bfloat16)

    class Tokenizer:
        def save_pretrained(self, folder: object) -> None: ...

    lm = LanguageModel(model=lm.model, tokenizer=Tokenizer(), eos_tokens=(), source="test")
    first = TorchBackend(lm)
    for _ in range(2):
        first.forward_backward(batch(), CROSS_ENTROPY).result()
        first.optim_step(Adam(learning_rate=1e-3)).result()
    first.save_state(tmp_path).result()
    other = TorchBackend(
        LanguageModel(model=copy.deepcopy(lm.model), tokenizer=Tokenizer(), eos_tokens=(), source="test")
    )
    other.load_state(tmp_path).result()
    assert other.export_weights().result().fingerprint == first.export_weights().result().fingerprint
    losses = [backend.forward(batch(1), CROSS_ENTROPY).result().loss for backend in (first, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
