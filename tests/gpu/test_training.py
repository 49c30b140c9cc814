"""Training on CUDA: fused and compiled layers against plain ones, recomputation, determinism, memory, parity."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.errors import BackendError
from headrace.infer.engine import EmbeddedEngine
from headrace.model.cuda.compile import compile_layers
from headrace.model.load import LanguageModel, fingerprint, prepare, recompute_layers
from headrace.model.lora import add_lora, lora_layers
from headrace.train.optimizer import MasterAdamW
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    FloatArray,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
VOCABULARY = 700
CONFIG = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
BF16 = 2**-8  # relative rounding of one operation


def model_on(device: str, dtype: torch.dtype, *, fused: bool = True) -> LanguageModel:
    torch.manual_seed(0)
    lm = prepare(Qwen2ForCausalLM(CONFIG).to(device, dtype), None, source="test")
    if device == "cuda" and fused:
        from headrace.model.cuda.layers import fuse_layers

        fuse_layers(lm.model)
    return lm


def batch(seed: int = 0, *, temperature: float = 1.0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for size in rng.integers(10, 200, 16):
        tokens = rng.integers(0, VOCABULARY, size + 1)
        weights = rng.normal(size=size) / 1000
        data.append(
            Datum(
                inputs=int_array(tokens[:-1]),
                targets=int_array(tokens[1:]),
                arrays={"weights": float_array(weights)},
                temperature=temperature,
            )
        )
    return data


def groups(seed: int = 0) -> list[Datum]:
    """Three groups of five sequences: a prompt of their own each, and two levels of common beginnings in the third."""
    rng = np.random.default_rng(seed)
    data = []
    for group in range(3):
        prompt = rng.integers(0, VOCABULARY, 70 + 30 * group)
        inner = rng.integers(0, VOCABULARY, 40)
        for member in range(5):
            rest = rng.integers(0, VOCABULARY, 20 + 35 * member)
            tokens = np.concatenate([prompt, *([inner] if group == 2 and member > 1 else []), rest])
            weights = rng.normal(size=len(tokens) - 1) / 1000
            weights[: len(prompt) - 1] = 0.0
            data.append(
                Datum(
                    inputs=int_array(tokens[:-1]),
                    targets=int_array(tokens[1:]),
                    arrays={"weights": float_array(weights)},
                )
            )
    return data


def gradients(
    lm: LanguageModel, data: list[Datum] | None = None, *, micro_batch_tokens: int = 600, temperature: float = 1.0
) -> dict[str, Tensor]:
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)
    try:
        backend.forward_backward(data or batch(temperature=temperature), CROSS_ENTROPY).result()
        return {name: value.float().cpu() for name, value in backend.gradients().result().items()}
    finally:
        backend.close()


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    assert found.keys() == exact.keys()
    square = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return float((square / sum(float(value.square().sum()) for value in exact.values())) ** 0.5)


@pytest.fixture
def deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_packed_bf16_gradient_is_the_float32_one_within_rounding(temperature: float) -> None:
    exact = gradients(model_on("cpu", torch.float32), temperature=temperature)
    plain = distance(gradients(model_on("cuda", torch.bfloat16, fused=False), temperature=temperature), exact)
    fused = distance(gradients(model_on("cuda", torch.bfloat16), temperature=temperature), exact)
    assert plain < 8 * BF16  # about a dozen roundings in a row, each of them half of that at most
    assert fused < plain  # the forward pass rounds to three bits more, the backward pass as transformers'


def test_large_scores_have_gradients_as_good_as_transformers_own() -> None:
    """Keys that have much in common, as those of Qwen2.5 have: an error of the softmax sums is multiplied by it."""

    def with_biases(device: str, dtype: torch.dtype, *, fused: bool = True) -> LanguageModel:
        lm = model_on(device, dtype, fused=fused)
        with torch.no_grad():
            for layer in lm.model.base_model.layers:
                layer.self_attn.k_proj.bias.fill_(10.0)  # with 30 transformers' own gradients are off by a half
        return lm

    exact = gradients(with_biases("cpu", torch.float32))
    plain = distance(gradients(with_biases("cuda", torch.bfloat16, fused=False)), exact)
    fused = distance(gradients(with_biases("cuda", torch.bfloat16)), exact)
    assert plain > 2 * BF16  # the scores do matter
    assert fused < plain


def test_an_adapters_gradient_is_the_float32_one_within_rounding() -> None:
    def with_adapter(device: str, dtype: torch.dtype, *, fused: bool = True) -> LanguageModel:
        lm = model_on(device, dtype, fused=fused)
        add_lora(lm.model, rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"), seed=0)
        for index, (_, layer) in enumerate(lora_layers(lm.model)):
            noise = torch.randn(layer.up.shape, generator=torch.Generator().manual_seed(index)) / 10
            layer.up.data.copy_(noise.to(dtype))
        return lm

    exact = gradients(with_adapter("cpu", torch.float32))
    plain = distance(gradients(with_adapter("cuda", torch.bfloat16, fused=False)), exact)
    fused = distance(gradients(with_adapter("cuda", torch.bfloat16)), exact)
    assert plain < 12 * BF16
    assert fused < plain


def log_probs(lm: LanguageModel, data: list[Datum], *, micro_batch_tokens: int) -> FloatArray:
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)
    try:
        found = np.concatenate(backend.forward(data, CROSS_ENTROPY).result().logprobs)
    finally:
        backend.close()
    return float_array(found[np.isfinite(found)])


WHOLE, ALONE = 100_000, 1  # tokens of a micro-batch: what is shared is computed once, or every sequence by itself


@pytest.mark.parametrize("fused", [False, True])
def test_a_shared_beginning_gives_the_log_probs_and_gradients_of_sequences_one_by_one(fused: bool) -> None:
    cpu, data = model_on("cpu", torch.float32), groups()
    lm = model_on("cuda", torch.bfloat16, fused=fused)
    exact = log_probs(cpu, data, micro_batch_tokens=ALONE)
    alone, shared = (np.abs(log_probs(lm, data, micro_batch_tokens=size) - exact).mean() for size in (ALONE, WHOLE))
    assert alone < 0.01
    assert shared < 1.2 * alone
    exact_gradients = gradients(cpu, data, micro_batch_tokens=ALONE)
    one_by_one, once = (distance(gradients(lm, data, micro_batch_tokens=n), exact_gradients) for n in (ALONE, WHOLE))
    assert once < max(1.2 * one_by_one, BF16)
    assert one_by_one < 8 * BF16


@pytest.mark.usefixtures("deterministic")
def test_shared_beginnings_repeat_bit_by_bit() -> None:
    found = [gradients(model_on("cuda", torch.bfloat16), groups(), micro_batch_tokens=WHOLE) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_float32_stream_is_nearer_to_float32_than_transformers() -> None:
    data = batch()
    exact = log_probs(model_on("cpu", torch.float32), data, micro_batch_tokens=600)
    plain, fused = (
        np.abs(log_probs(model_on("cuda", torch.bfloat16, fused=fused), data, micro_batch_tokens=600) - exact).mean()
        for fused in (False, True)
    )
    print(f"mean distance of log-probs to float32: transformers {plain:.5f}, fused {fused:.5f}")
    assert fused < plain


def test_float32_on_cuda_is_float32_on_the_cpu() -> None:
    assert distance(gradients(model_on("cuda", torch.float32)), gradients(model_on("cpu", torch.float32))) < 1e-4


def test_micro_batches_do_not_change_the_gradient_beyond_rounding() -> None:
    whole = gradients(model_on("cuda", torch.bfloat16), micro_batch_tokens=10_000)
    assert distance(gradients(model_on("cuda", torch.bfloat16), micro_batch_tokens=300), whole) < 2 * BF16


@pytest.mark.usefixtures("deterministic")
def test_recomputed_layers_give_the_same_gradient() -> None:
    plain, recomputed = model_on("cuda", torch.bfloat16), model_on("cuda", torch.bfloat16)
    recompute_layers(recomputed.model)
    expected, found = gradients(plain), gradients(recomputed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_compiled_layers_give_the_same_gradient_within_rounding() -> None:
    exact = gradients(model_on("cpu", torch.float32))
    compiled = model_on("cuda", torch.bfloat16)
    compile_layers(compiled.model)
    assert distance(gradients(compiled), exact) < 8 * BF16


@pytest.mark.usefixtures("deterministic")
def test_a_deterministic_run_repeats_bit_by_bit() -> None:
    prints = []
    for _ in range(2):
        backend = TorchBackend(model_on("cuda", torch.bfloat16), micro_batch_tokens=600)
        for step in range(4):
            backend.forward_backward(batch(step), CROSS_ENTROPY).result()
            backend.optim_step(Adam(learning_rate=1e-3)).result()
        prints.append(backend.export_weights().result().fingerprint)
        backend.close()
    assert prints[0] == prints[1]


@pytest.mark.parametrize(("source", "target"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_every_number_is_cast_as_torch_casts_it(source: torch.dtype, target: torch.dtype) -> None:
    from headrace.model.cuda.fp16_kernels import cast

    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source).cuda()
    ours, theirs = cast(every[1:].view(-1, 5).t(), target), every[1:].view(-1, 5).t().to(target)  # 65535 = 13107 x 5
    assert ours.shape == theirs.shape
    same = (ours.view(torch.int16) == theirs.contiguous().view(torch.int16)) | (ours.isnan() & theirs.isnan())
    assert bool(same.all())


@pytest.mark.parametrize(("tokens", "width"), [(0, 40), (1, 7), (33, 256), (5000, 200), (16640, 1536)])
def test_sums_over_tokens(tokens: int, width: int) -> None:
    from headrace.model.cuda.reductions import column_sums

    numbers = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).add(0.1).bfloat16().cuda()
    found = column_sums(numbers)
    exact = numbers.double().sum(dim=0)
    assert torch.equal(found, column_sums(numbers))
    assert bool((found.double() - exact).abs().le(exact.abs() / 250 + 1e-3).all())


def test_gradients_add_up_to_the_bit() -> None:
    from headrace.train.cuda_adam import add_up

    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(5000,), (3, 16384), (48,), (1,)]
    sums, more = (
        [
            torch.randn(size, generator=generator, device="cuda").to(dtype)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
        for dtypes in (
            (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16),
        )
    )
    expected = [a.float() + b.float() for a, b in zip(sums, more, strict=True)]
    found = add_up(sums, more)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 4
    assert found[0] is sums[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_the_one_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(size, generator=generator) for name, size in (("a", 5000), ("b", 48), ("c", 16384))}
    ours = {}
    for device in ("cpu", "cuda"):
        named = {name: torch.nn.Parameter(value.clone().to(device, dtype)) for name, value in start.items()}
        optimizer = MasterAdamW(named)
        steps = torch.Generator().manual_seed(1)
        for number in range(4):
            for passes in range(1 + number % 3):  # a half-precision gradient, a sum of two, one more added to it
                for name, parameter in named.items():
                    parameter.grad = torch.randn(start[name].shape, generator=steps).to(device, dtype)
                optimizer.collect()
                assert passes < 3
            norm = optimizer.norm()
            optimizer.update(Adam(learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0), norm=norm)
        ours[device] = ({name: value.cpu() for name, value in optimizer.masters.items()}, norm)
        if dtype == torch.bfloat16:
            for name, parameter in named.items():
                assert torch.equal(parameter, optimizer.masters[name].to(dtype))
    assert ours["cuda"][1] == pytest.approx(ours["cpu"][1], rel=1e-5)
    for name in start:
        torch.testing.assert_close(ours["cuda"][0][name], ours["cpu"][0][name], rtol=1e-5, atol=1e-6)


def test_optimiser_state_goes_from_cuda_to_the_cpu_and_on() -> None:
    named = {"a": torch.nn.Parameter(torch.ones(100, device="cuda", dtype=torch.bfloat16))}
    first = MasterAdamW(named)
    named["a"].grad = torch.full_like(named["a"], 0.5)
    first.collect()
    first.update(Adam(learning_rate=1e-2), norm=1.0)
    other = {"a": torch.nn.Parameter(named["a"].detach().cpu())}
    second = MasterAdamW(other)
    second.load_state_dict({name: value.cpu() for name, value in first.state_dict().items()})
    for parameters, optimizer in ((named, first), (other, second)):
        parameters["a"].grad = torch.full_like(parameters["a"], -0.25)
        optimizer.collect()
        optimizer.update(Adam(learning_rate=1e-2), norm=1.0)
    torch.testing.assert_close(first.masters["a"].cpu(), second.masters["a"], rtol=1e-6, atol=1e-7)


def test_no_room_says_what_to_lower() -> None:
    lm = model_on("cuda", torch.bfloat16)
    backend = TorchBackend(lm, micro_batch_tokens=4_000_000)
    taken = torch.cuda.memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(taken + 0.02, 1.0))
    try:
        with pytest.raises(
            BackendError, match=r"'micro_batch_tokens', which is 4000000, write 'model.recompute = true'"
        ):
            backend.check_memory(512).result()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        backend.close()
    torch.cuda.empty_cache()
    small = TorchBackend(lm, micro_batch_tokens=2048)
    before = small.export_weights().result().fingerprint
    small.check_memory(512).result()
    assert small.export_weights().result().fingerprint == before
    small.close()


@pytest.mark.parametrize("fused", [False, True])
def test_sampled_log_probs_are_the_trainers(fused: bool) -> None:
    lm = model_on("cuda", torch.bfloat16, fused=fused)
    engine = EmbeddedEngine(lm, max_num_seqs=16)
    backend = TorchBackend(lm)
    rng = np.random.default_rng(0)
    prompts = [int_array(rng.integers(0, VOCABULARY, 20)) for _ in range(24)]

    async def sample() -> list[object]:
        requests = [
            SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=60, seed=index, stop_tokens=()))
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    completions = asyncio.run(sample())
    engine.close()
    data = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.concatenate([prompt, completion.tokens])  # type: ignore[attr-defined]
        weights = np.where(np.arange(len(tokens) - 1) >= len(prompt) - 1, 1.0, 0.0)
        data.append(
            Datum(
                inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": float_array(weights)}
            )
        )
    scored = backend.forward(data, CROSS_ENTROPY).result().logprobs
    backend.close()
    differences = np.concatenate(
        [
            np.abs(values[-60:] - completion.sampler_logprobs)  # type: ignore[attr-defined]
            for values, completion in zip(scored, completions, strict=True)
        ]
    )
    print(f"mean |sampler - trainer| = {differences.mean():.5f}, largest {differences.max():.5f}")
    assert differences.mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fingerprint_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    model = model_on("cpu", dtype).model
    here = fingerprint(model.named_parameters())
    assert fingerprint(model.to("cuda").named_parameters()) == here
    with torch.no_grad():
        weights = [layer.mlp.up_proj.weight for layer in model.base_model.layers]
        weights[1][3, 5], weights[2][3, 5] = weights[2][3, 5].clone(), weights[1][3, 5].clone()
    assert fingerprint(model.named_parameters()) != here
