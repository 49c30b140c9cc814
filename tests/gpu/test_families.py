"""Every supported type in bfloat16: packed training, chunked prefill, decoding, adapters, resume, against transformers.

What is exact here is transformers' own model in float32, with the bfloat16 model's weights; how far transformers' own
bfloat16 model is from it says what half precision costs a model of this shape, and bounds how far ours may be. All
three send a token to the same experts, those that the float32 model chose, because a choice that rounding turns is a
jump that no bound on rounding would cover.

With HEADRACE_FAMILIES_ON=cpu all of it runs on a CPU, which tests the tests.
"""

import asyncio
import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config.schema import ALL_LINEAR
from headrace.infer.engine import EmbeddedEngine
from headrace.model import experts, head, load
from headrace.model.attention import Packed, make_packed
from headrace.model.experts import Routing, prepare_experts, routed, routing_shape
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora, lora_layers
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Completion, Datum, SampleRequest, SamplingParams, float_array, int_array
from support.model_variants import VARIANTS, VOCABULARY
from support.model_variants import make as make_small

DEVICE = torch.device(os.environ.get("HEADRACE_FAMILIES_ON", "cuda"))
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"
)
BF16 = torch.bfloat16
EXACT_BUFFERS = ("inv_freq", "e_score_correction_bias")  # float32 in a bfloat16 model that was loaded from files
MIXTURES = [name for name in VARIANTS if "experts" in repr(VARIANTS[name][1])]
# a prompt of 23 tokens, shared by answers of 30 and 7, and sequences by themselves, one longer than a chunk of 64
LENGTHS, PARENTS = (23, 30, 7, 90, 1, 5), (None, 0, 0, None, None, None)
TOKENS = [(7 * i + i * i + i // 11) % VOCABULARY for i in range(sum(LENGTHS))]
ALTERNATIVES = 3  # tokens at every position whose log-probs are compared, the following one among them


@pytest.fixture(autouse=True)
def _every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type is compared here before it is listed as one that runs on CUDA."""
    monkeypatch.setattr(load, "check_device", lambda *_: None)


# --- models ----------------------------------------------------------------------------------------------------------


def make(variant: str) -> Any:
    """The small model of a variant; delta nets with states as wide as kernels want.

    Their convolutions are strong: behind the SiLU queries and keys are then rarely orthogonal, which would leave the
    norm behind them nothing but rounding.
    """
    net = "linear_key_head_dim" in VARIANTS[variant][1]
    widths = {"linear_key_head_dim": 32, "linear_value_head_dim": 16 if "two taps" in variant else 32}
    model = make_small(variant, **(widths if net else {}))
    if net:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("conv1d.weight"):
                    parameter.mul_(8.0)
    return model


def half(model: Any) -> Any:
    """Round a model as loading it in bfloat16 does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not any(exact in name for exact in EXACT_BUFFERS):
                setattr(module, name, buffer.to(BF16))
    return model


def widen(model: Any) -> Any:
    return model.float()


def their_model(variant: str, dtype: torch.dtype) -> Any:
    """Transformers' own, but for routers that can be told what to choose; experts are its loop over them."""
    model = half(make(variant))
    model = (widen(model) if dtype == torch.float32 else model).to(DEVICE)
    capped = getattr(model.config, "attn_logit_softcapping", None)  # which transformers' sdpa leaves out
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    if routing_of(model):
        prepare_experts(model)
        model.config._experts_implementation = "eager"
    return model


def our_model(variant: str, dtype: torch.dtype = BF16) -> LanguageModel:
    model = half(make(variant))
    lm = prepare((widen(model) if dtype == torch.float32 else model).to(DEVICE), None, source=variant)
    if DEVICE.type == "cuda" and dtype == BF16:
        from headrace.model.cuda.layers import fuse_layers  # as a run does

        fuse_layers(lm.model)
    return lm


def routing_of(model: Any) -> bool:
    routers = (*experts.SOFTMAX_ROUTERS, *experts.LOGIT_ROUTERS, *experts.SIGMOID_ROUTERS)
    return any(type(module).__name__ in routers for module in model.modules())


# --- what is compared ------------------------------------------------------------------------------------------------


def rows_of_sequences() -> list[list[int]]:
    """The packed rows of each sequence, the shared prompt's first."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    spans = [list(range(starts[s], starts[s + 1])) for s in range(len(LENGTHS))]
    return [[*spans[0], *spans[1]], [*spans[0], *spans[2]], *spans[3:]]


SEQUENCES = [[TOKENS[row] for row in rows] for rows in rows_of_sequences()]
NOISE = torch.Generator().manual_seed(5)
TARGETS = [torch.randint(0, VOCABULARY, (len(sequence), ALTERNATIVES), generator=NOISE) for sequence in SEQUENCES]
WEIGHTS = [torch.randn(len(sequence), ALTERNATIVES, generator=NOISE) for sequence in SEQUENCES]


def their_hidden(model: Any, sequence: Sequence[int], recorded: Tensor | None) -> tuple[Tensor, Routing]:
    """Log-probs over the vocabulary [T, V], with the choices that were replayed or made."""
    routing = Routing(recorded=recorded)
    tokens = torch.tensor([list(sequence)], device=DEVICE)
    with routed(Packed((len(sequence),), routing=routing)):
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1), routing


def choices_of(routing: Routing) -> Tensor | None:
    """What the routers chose by themselves, [T, routers, K]."""
    layers = [own_TK for _, (_, own_TK) in sorted(routing._layers.items())]
    return torch.stack(layers, dim=1) if layers else None


def theirs(variant: str, dtype: torch.dtype, recorded: Sequence[Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
    """The chosen log-probs of every sequence by itself, and the gradients of their weighted sum."""
    model = their_model(variant, dtype)
    picked = []
    for sequence, targets, weights, given in zip(SEQUENCES, TARGETS, WEIGHTS, recorded, strict=True):
        logp_TK = their_hidden(model, sequence, given)[0].gather(1, targets.to(DEVICE))
        (logp_TK * weights.to(DEVICE)).sum().backward()
        picked.append(logp_TK.detach())
    return torch.cat(picked), gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def recorded_by(variant: str) -> list[Tensor | None]:
    model = their_model(variant, torch.float32)
    with torch.no_grad():
        return [choices_of(their_hidden(model, sequence, None)[1]) for sequence in SEQUENCES]


def our_logprobs(
    lm: LanguageModel, tokens: Sequence[int], positions: Sequence[int], context: Packed, targets: Tensor, rows: Tensor
) -> Tensor:
    hidden = lm.hidden(torch.tensor(tokens, device=DEVICE), torch.tensor(positions, device=DEVICE), context)
    wanted = head.Targets(targets.to(DEVICE))
    picked, _ = head.logprobs(hidden[rows.to(DEVICE)], lm.head_weight(), wanted, chunk_tokens=64, rule=lm.logit_rule)
    return picked


def packed_logprobs(lm: LanguageModel, recorded: Sequence[Tensor | None]) -> Tensor:
    """The same log-probs as `theirs` from one packed pass, in which the shared prompt is computed once."""
    rows = rows_of_sequences()
    routing = None
    if routing_shape(lm.model) is not None:
        laid_out = [torch.empty(0)] * len(TOKENS)
        for of, given in zip(rows, recorded, strict=True):
            assert given is not None
            for place, row in enumerate(of):
                laid_out[row] = given[place]
        routing = Routing(recorded=torch.stack(laid_out))
    context = make_packed(LENGTHS, DEVICE, PARENTS)
    context = Packed(*(getattr(context, name) for name in context.__slots__ if name != "routing"), routing=routing)
    starts = [0 if parent is None else LENGTHS[parent] for parent in PARENTS]
    positions = [start + i for start, length in zip(starts, LENGTHS, strict=True) for i in range(length)]
    flat = torch.tensor([row for of in rows for row in of])
    return our_logprobs(lm, TOKENS, positions, context, torch.cat(TARGETS), flat)


def alone_logprobs(lm: LanguageModel, recorded: Sequence[Tensor | None]) -> Tensor:
    picked = []
    for sequence, targets, given in zip(SEQUENCES, TARGETS, recorded, strict=True):
        routing = None if given is None else Routing(recorded=given)
        context = Packed((len(sequence),), routing=routing)
        places = torch.arange(len(sequence))
        picked.append(our_logprobs(lm, sequence, places.tolist(), context, targets, places))
    return torch.cat(picked)


def rms(difference: Tensor) -> float:
    return float(difference.detach().float().square().mean().sqrt())


def relative(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """How far gradients are from the exact ones, relative to the norm of all of these."""
    difference = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (difference / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def by_parameter(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - exact[name]).norm() / (exact[name].norm() + 1e-6)) for name in exact}


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_values_and_gradients_are_as_exact_as_transformers_own(variant: str) -> None:
    recorded = recorded_by(variant)
    exact, exact_grads = theirs(variant, torch.float32, recorded)
    their_half, their_grads = theirs(variant, BF16, recorded)
    lm = our_model(variant)
    packed = packed_logprobs(lm, recorded)
    (packed * torch.cat(WEIGHTS).to(DEVICE)).sum().backward()
    with torch.no_grad():
        alone = alone_logprobs(lm, recorded)
    rounding, error, apart = rms(their_half - exact), rms(packed - exact), rms(packed - alone)
    grads = gradients(lm.model)
    grads.setdefault("lm_head.weight", torch.zeros(0))
    found = {name: grads[name] for name in exact_grads}
    grad_rounding, grad_error = relative(their_grads, exact_grads), relative(found, exact_grads)
    print(
        f"{variant}: log-probs {error:.4f} (transformers {rounding:.4f}, packed to alone {apart:.4f}), "
        f"gradients {grad_error:.4f} (transformers {grad_rounding:.4f})"
    )
    assert exact.std() > 0.1
    assert error < 1.5 * rounding + 2e-3
    assert apart < 1.5 * rounding + 2e-3
    assert grad_error < 1.5 * grad_rounding + 5e-3
    mine, its = by_parameter(found, exact_grads), by_parameter(their_grads, exact_grads)
    worst = {name: (mine[name], its[name]) for name in mine if mine[name] > 3 * its[name] + 0.08}
    assert not worst


def test_a_leak_between_sequences_would_be_seen() -> None:
    """The bound above is far below what one sequence that sees its neighbour does to the log-probs."""
    for variant in ("qwen3", "qwen3_5_text", "nemotron_h, without experts, biases", "lfm2"):
        lm = our_model(variant)
        tokens = torch.tensor(TOKENS, device=DEVICE)
        with torch.no_grad():
            pair = [
                lm.hidden(tokens[:60], torch.arange(60, device=DEVICE) % 30, Packed(lengths))[30:]
                for lengths in ((30, 30), (60,))
            ]
            ours, leaked = (torch.log_softmax(states.float() @ lm.head_weight().T.float(), -1) for states in pair)
        assert rms(ours - leaked) > 0.05, variant


# --- sampling --------------------------------------------------------------------------------------------------------


def sample(lm: LanguageModel, *, chunk: int) -> list[tuple[list[int], Completion]]:
    """Prompts longer than a chunk, one shared by two requests, decoded past 64 cached positions, in one batch."""
    prompts = [SEQUENCES[2], SEQUENCES[2], SEQUENCES[0][:23], SEQUENCES[3], SEQUENCES[4]]

    async def play() -> list[Completion]:
        engine = EmbeddedEngine(lm, max_num_seqs=8, prefill_chunk_tokens=chunk, prefill_tokens=2 * chunk)
        try:
            params = [SamplingParams(max_tokens=24, seed=index, stop_tokens=()) for index in range(len(prompts))]
            return await asyncio.gather(
                *(
                    engine.sample(SampleRequest(prompt=int_array(prompt), params=param, score_from=1))
                    for prompt, param in zip(prompts, params, strict=True)
                )
            )
        finally:
            engine.close()

    return list(zip(prompts, asyncio.run(play()), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_in_chunks_has_the_log_probs_of_the_trainer(variant: str) -> None:
    """Those of sampled tokens, and of prompts, which were prefilled in chunks of 16, with the experts of sampling."""
    lm = our_model(variant)
    exact_model, half_model = (their_model(variant, dtype) for dtype in (torch.float32, BF16))
    ours, trained, exact, their_half = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    routers = routing_shape(lm.model)
    for prompt, done in sample(lm, chunk=16):
        whole = [*prompt, *done.tokens.tolist()]
        assert len(done.tokens) == 24
        assert (done.experts is not None) == (routers is not None)
        recorded = None
        if done.experts is not None:
            assert done.experts.shape == (len(whole) - 1, *routers)  # type: ignore[misc]
            recorded = torch.from_numpy(done.experts.copy()).long().to(DEVICE)
        prefix = [] if done.prefix_logprobs is None else done.prefix_logprobs.tolist()
        sampled = torch.tensor([*prefix, *done.raw_logprobs.tolist()])
        first, following = len(whole) - len(sampled) - 1, torch.tensor(whole[1:])[:, None]
        with torch.no_grad():
            places = torch.arange(len(whole) - 1)
            routing = None if recorded is None else Routing(recorded=recorded)
            context = Packed((len(whole) - 1,), routing=routing)
            mine = our_logprobs(lm, whole[:-1], places.tolist(), context, following, places)
            others = [
                their_hidden(model, whole[:-1], recorded)[0].gather(1, following.to(DEVICE))
                for model in (exact_model, half_model)
            ]
        ours.append(sampled)
        for store, value in zip((trained, exact, their_half), (mine, *others), strict=True):
            store.append(value[first:, 0].float().cpu())
    joined = [torch.cat(parts) for parts in (ours, trained, exact, their_half)]
    rounding, of_trainer = (float((part - joined[2]).abs().mean()) for part in (joined[3], joined[1]))
    to_trainer, error = (float((joined[0] - part).abs().mean()) for part in joined[1:3])
    print(
        f"{variant}: sampler to trainer {to_trainer:.4f}, to float32 {error:.4f} (trainer {of_trainer:.4f}, "
        f"transformers {rounding:.4f})"
    )
    assert len(joined[0]) > 5 * 24 + 90
    assert error < 1.5 * rounding + 2e-3
    assert to_trainer < 1.5 * max(rounding, of_trainer) + 2e-3


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(variant: str, dtype: torch.dtype) -> LanguageModel:
    """Adapters on all linear layers, of a mixture on routers and experts too, that change what the model computes."""
    lm = our_model(variant, dtype)
    mixture = routing_shape(lm.model) is not None
    add_lora(lm.model, rank=3, alpha=5.0, targets=(*ALL_LINEAR, *(("router", "experts") if mixture else ())), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.down.copy_(layer.down.to(BF16))  # the same numbers in both precisions
            layer.up.copy_((0.15 * torch.randn(layer.up.shape, generator=generator)).to(BF16))
    return lm


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_are_as_exact_as_the_model(variant: str) -> None:
    """Against the same adapted model in float32, which tests on a CPU compare with peft."""
    recorded = recorded_by(variant)
    exact_lm, lm = adapted(variant, torch.float32), adapted(variant, BF16)
    results = []
    for model in (exact_lm, lm):
        picked = packed_logprobs(model, recorded)
        (picked * torch.cat(WEIGHTS).to(DEVICE)).sum().backward()
        results.append((picked, gradients(model.model)))
    (exact, exact_grads), (packed, grads) = results
    assert grads.keys() == exact_grads.keys() == {n for n, p in lm.model.named_parameters() if p.requires_grad}
    half_model, float_model = (their_model(variant, dtype) for dtype in (BF16, torch.float32))
    with torch.no_grad():  # how sensitive this shape is to rounding
        base = [
            torch.cat(
                [
                    their_hidden(model, sequence, given)[0].gather(1, targets.to(DEVICE))
                    for sequence, targets, given in zip(SEQUENCES, TARGETS, recorded, strict=True)
                ]
            )
            for model in (half_model, float_model)
        ]
    rounding, error, effect = rms(base[0] - base[1]), rms(packed - exact), rms(exact - base[1])
    grad_error = relative(grads, exact_grads)
    print(f"{variant}: {error:.4f} (transformers without adapters {rounding:.4f}), gradients {grad_error:.4f}")
    assert effect > 0.05
    assert error < 2 * rounding + 0.01
    assert grad_error < 0.25


# --- steps and resuming ----------------------------------------------------------------------------------------------

STEPPED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "qwen3_next", "nemotron_h", "lfm2", "gemma4_text")


def batch(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for size in rng.integers(5, 90, 8):
        tokens = rng.integers(0, VOCABULARY, size + 1)
        weights = rng.normal(size=size) / 300
        arrays = {"weights": float_array(weights)}
        data.append(Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays=arrays))
    return data


@contextmanager
def backend_of(lm: LanguageModel) -> Iterator[TorchBackend]:
    backend = TorchBackend(lm, micro_batch_tokens=200)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("variant", STEPPED)
def test_steps_follow_float32_and_a_saved_state_goes_on_exactly(variant: str, tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: object) -> None: ...

    losses = {}
    for dtype in (torch.float32, BF16):
        plain = our_model(variant, dtype)
        lm = LanguageModel(model=plain.model, tokenizer=Tokenizer(), eos_tokens=(), source=variant)
        other = LanguageModel(model=copy.deepcopy(lm.model), tokenizer=Tokenizer(), eos_tokens=(), source=variant)
        with backend_of(lm) as backend, backend_of(other) as resumed:
            found = []
            for step in range(3):
                found.append(backend.forward_backward(batch(step % 2), CROSS_ENTROPY).result().loss)
                backend.optim_step(Adam(learning_rate=2e-3)).result()
            losses[dtype] = np.array(found)
            if dtype == BF16:
                backend.save_state(tmp_path).result()
                resumed.load_state(tmp_path).result()
                prints = [each.export_weights().result().fingerprint for each in (backend, resumed)]
                assert prints[0] == prints[1]
                again = [each.forward(batch(5), CROSS_ENTROPY).result().loss for each in (backend, resumed)]
                assert again[0] == pytest.approx(again[1], rel=1e-6)
    scale = np.abs(losses[torch.float32]).max()
    assert losses[BF16][0] == pytest.approx(losses[torch.float32][0], abs=0.03)  # the steps behind it add up
    np.testing.assert_allclose(losses[BF16], losses[torch.float32], atol=0.2 * scale)


@pytest.mark.filterwarnings("ignore")  # of products, whose library was set up without a fixed workspace
@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_5_moe_text"])
def test_a_deterministic_step_repeats_itself(variant: str) -> None:
    """The same bits of all gradients, twice, of a mixture and of a hybrid."""
    recorded, prints = recorded_by(variant), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            lm = our_model(variant)
            (packed_logprobs(lm, recorded) * torch.cat(WEIGHTS).to(DEVICE)).sum().backward()
            prints.append({name: gradient.cpu() for name, gradient in gradients(lm.model).items()})
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in prints[0] if not torch.equal(prints[0][name], prints[1][name])] == []
