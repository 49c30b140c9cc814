"""The one-device backend: the gradient is that of plain autograd however it is split, and states continue exactly.

What every backend must do (order, failures, Discard) is in `tests/contracts/test_backend.py`; this is the rest.
"""

import inspect
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DrawFn, composite, integers, lists, permutations, sampled_from
from peft import PeftModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from headrace.algo.loss_signature import LossOut, Unit, loss_inputs, loss_unit
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.units import as_pairs
from headrace.errors import BackendError, NoGradientError
from headrace.metrics import Mean
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import add_lora
from headrace.model.tiny import make_model, make_tokenizer, save_tiny
from headrace.train import torch_backend
from headrace.train.torch_backend import TorchBackend, create_backend
from headrace.types import CROSS_ENTROPY, Adam, Datum, DiscardGradient, LossSpec, SharedWeights, float_array, int_array

R = TypeVar("R")
WORDS = tuple("abcdefghijkl")
VOCABULARY = 20  # eight special tokens and the words
SHAPE = {"width": 8, "layers": 2, "heads": 2, "kv_heads": 1, "context": 32, "seed": 3}
STEP = Adam(learning_rate=0.01)


def get(future: "Future[R]") -> R:
    return future.result(200)


def plain_model(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> LlamaForCausalLM:
    model = make_model(vocab_size=VOCABULARY, **SHAPE)
    if not tied:
        model.config.tie_word_embeddings = False
        weight = torch.randn(VOCABULARY, 8, generator=torch.Generator().manual_seed(8)) * 0.5
        model.lm_head.weight = torch.nn.Parameter(weight)
    return model.to(dtype)


def language_model(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> LanguageModel:
    return prepare(plain_model(dtype, tied=tied), make_tokenizer(WORDS), source="tiny")


@contextmanager
def backend_of(lm: LanguageModel, **options: Any) -> Iterator[TorchBackend]:
    backend = TorchBackend(lm, **options)
    try:
        yield backend
    finally:
        backend.close()


def datum(length: int, seed: int, *, alternatives: int = 0, temperature: float = 1.0, sparse: bool = True) -> Datum:
    rng = np.random.default_rng(seed)
    shape = (length, alternatives) if alternatives else (length,)
    weights = rng.normal(size=shape)
    if sparse:
        weights[rng.random(length) < 0.4] = 0.0
    return Datum(
        inputs=int_array(rng.integers(0, VOCABULARY, length)),
        targets=int_array(rng.integers(0, VOCABULARY, shape)),
        arrays={
            "weights": float_array(weights),
            "advantages": float_array(rng.normal(size=shape)),
            "sampler_logprobs": float_array(-3.0 + 0.3 * rng.normal(size=shape)),
            "reference_logprobs": float_array(-3.0 + 0.3 * rng.normal(size=shape)),
        },
        temperature=temperature,
    )


DATA = (datum(7, 0), datum(3, 1), datum(11, 2), datum(5, 3))


@loss_unit(Unit.SEQUENCE)
def squared_sums(policy_logprobs_T: Tensor, entropy_T: Tensor, weights_T: Tensor, segments_T: Tensor) -> LossOut:
    """sum over sequences of (sum_t w_t logp_t)^2 + 0.1 sum_t w_t H_t: wrong if a sequence is split or mixed."""
    sums_S = torch.zeros(64, dtype=policy_logprobs_T.dtype).index_add(0, segments_T, weights_T * policy_logprobs_T)
    loss = (sums_S**2).sum() + 0.1 * (weights_T * entropy_T).sum()
    return LossOut(loss=loss, metrics={"loss/tokens": Mean(len(weights_T), 1)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    loss: float
    of: dict[str, Tensor]  # by parameter


LOSS_SPECS: dict[str, LossSpec] = {
    "cross_entropy": CROSS_ENTROPY,
    "importance_sampling": LossSpec(fn="importance_sampling"),
    "ppo": LossSpec(fn="ppo", params={"clip_low": 0.3, "clip_high": 0.4}),
    "ppo with entropy": LossSpec(fn="ppo + entropy_bonus"),
    "gspo": LossSpec(fn="gspo", params={"clip_low": 0.5, "clip_high": 0.5}),
    "squared sums": LossSpec(fn=squared_sums),
}


def plain_gradient(dtype: torch.dtype, data: Sequence[Datum], spec: LossSpec, *, tied: bool = True) -> Gradient:
    """Every sequence alone through transformers' own forward, full logits, torch's autograd, one call of the loss."""
    model: Any = plain_model(dtype, tied=tied)
    if dtype == torch.float64:  # transformers' norms would round to float32; its attention stays its own
        model = prepare(model, make_tokenizer(WORDS), source="plain").model
    model.set_attn_implementation("sdpa")
    picked, entropies = [], []
    for one in data:
        logits = model(input_ids=torch.tensor(one.inputs).long()[None], use_cache=False).logits[0]
        logp = torch.log_softmax(logits / one.temperature, dim=-1)
        targets = torch.tensor(one.targets).long().reshape(one.num_tokens, -1)
        picked.append(logp.gather(1, targets).reshape(one.targets.shape))
        entropies.append(-(logp.exp() * logp).sum(-1))
    fn = find_loss(spec.fn)
    asked = loss_inputs(fn)
    named = {"policy_logprobs": torch.cat(picked)}
    for name in asked.required:
        named[name] = torch.from_numpy(np.concatenate([one.arrays[name] for one in data])).to(dtype)
    if asked.wants_entropy:
        named["entropy"] = torch.cat(entropies)
    if asked.wants_segments:
        counts = torch.tensor([one.num_tokens for one in data])
        named["segments"] = torch.repeat_interleave(torch.arange(len(data)), counts)
    out = fn(**{f"{name}_T": value for name, value in named.items()}, **spec.params)
    out.loss.backward()
    return Gradient(loss=float(out.loss.detach()), of={name: p.grad for name, p in model.named_parameters()})


def gradient_of(backend: TorchBackend, data: Sequence[Datum], spec: LossSpec) -> Gradient:
    out = get(backend.forward_backward(data, spec))
    return Gradient(loss=out.loss, of=take_gradient(backend))


def take_gradient(backend: TorchBackend) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in backend._optimizer.gradients.items()}
    get(backend.optim_step(DiscardGradient()))
    return found


def distance(left: Gradient, right: Gradient) -> float:
    """|left - right| / |right| over all parameters together."""
    assert left.of.keys() == right.of.keys()
    off = sum(float(((left.of[name] - value).double() ** 2).sum()) for name, value in right.of.items())
    norm = sum(float((value.double() ** 2).sum()) for value in right.of.values())
    return 0.0 if off == 0.0 else float((off / norm) ** 0.5)  # everything clipped: both are exactly zero


# --- the gradient ----------------------------------------------------------------------------------------------------


@composite
def batches(draw: DrawFn) -> tuple[Datum, ...]:
    kinds = draw(lists(integers(1, 12), min_size=1, max_size=5))
    temperature = draw(sampled_from([1.0, 0.6]))
    seeds = draw(integers(0, 2**20))
    return tuple(datum(length, seeds + index, temperature=temperature) for index, length in enumerate(kinds))


@settings(max_examples=25, deadline=None)
@given(
    data=batches(),
    name=sampled_from(sorted(LOSS_SPECS)),
    budget=integers(1, 60),
    chunk=integers(1, 20),
    tied=sampled_from([True, False]),
    order=permutations(range(5)),
)
def test_no_split_order_or_chunk_changes_the_gradient(
    data: tuple[Datum, ...], name: str, budget: int, chunk: int, tied: bool, order: list[int]
) -> None:
    """In float64 it is that of plain autograd through full logits, to 1e-12 of its norm."""
    if not any(one.arrays["weights"].any() for one in data):
        data = (*data[:4], datum(4, 0, sparse=False))
    expected = plain_gradient(torch.float64, data, LOSS_SPECS[name], tied=tied)
    shuffled = [data[index] for index in order if index < len(data)]
    lm = language_model(torch.float64, tied=tied)
    with backend_of(lm, micro_batch_tokens=budget, chunk_tokens=chunk) as split, backend_of(lm) as whole:
        for found in (gradient_of(split, shuffled, LOSS_SPECS[name]), gradient_of(whole, data, LOSS_SPECS[name])):
            assert distance(found, expected) < 1e-12
            assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", LOSS_SPECS)
def test_in_float32_a_split_changes_the_gradient_by_rounding_only(name: str) -> None:
    exact = plain_gradient(torch.float64, DATA, LOSS_SPECS[name])
    lm = language_model()
    found = []
    for budget, chunk in ((1, 1), (12, 4), (1000, 256)):
        with backend_of(lm, micro_batch_tokens=budget, chunk_tokens=chunk) as backend:
            found.append(gradient_of(backend, DATA, LOSS_SPECS[name]))
    theirs = distance(plain_gradient(torch.float32, DATA, LOSS_SPECS[name]), exact)
    assert 0 < theirs < 1e-5
    for gradient in found:
        assert distance(gradient, exact) < 4 * theirs + 1e-6  # as good as torch's own float32, to a small factor


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_the_fused_and_the_whole_path_agree(name: str) -> None:
    """The same function, once as a sum over tokens and once declared a sum over sequences."""
    spec = LOSS_SPECS[name]

    def declared(*arguments: Any, **numbers: Any) -> LossOut:
        return LOSSES[name](*arguments, **numbers)

    declared.__signature__ = inspect.signature(LOSSES[name])  # type: ignore[attr-defined]
    with backend_of(language_model(torch.float64), micro_batch_tokens=12, chunk_tokens=3) as backend:
        fused = gradient_of(backend, DATA, spec)
        whole = gradient_of(backend, DATA, replace(spec, fn=loss_unit(Unit.SEQUENCE)(declared)))
    assert distance(whole, fused) < 1e-12
    assert whole.loss == pytest.approx(fused.loss, rel=1e-12)


def test_several_targets_per_token_are_soft_targets() -> None:
    data = [datum(6, 1, alternatives=3), datum(4, 2, alternatives=3, temperature=0.7)]
    expected = plain_gradient(torch.float64, data, CROSS_ENTROPY)
    with backend_of(language_model(torch.float64), micro_batch_tokens=6, chunk_tokens=2) as backend:
        assert distance(gradient_of(backend, data, CROSS_ENTROPY), expected) < 1e-12
        logprobs = get(backend.forward(data, CROSS_ENTROPY)).logprobs
    for one, found in zip(data, logprobs, strict=True):
        rows = one.arrays["weights"].any(axis=1)
        assert found.shape == one.targets.shape
        assert np.isfinite(found[rows]).all()
        assert np.isnan(found[~rows]).all()


def test_pairs_are_never_split() -> None:
    pairs = as_pairs([datum(5, 0, sparse=False), datum(3, 1, sparse=False)], [DATA[2], datum(4, 2, sparse=False)])
    found = []
    for budget, order in ((1, (0, 1, 2, 3)), (16, (3, 0, 2, 1)), (1000, (0, 1, 2, 3))):
        with backend_of(language_model(torch.float64), micro_batch_tokens=budget) as backend:
            found.append(gradient_of(backend, [pairs[index] for index in order], LossSpec(fn="dpo")))
    assert distance(found[0], found[2]) < 1e-12
    assert distance(found[1], found[2]) < 1e-12


def test_calls_add_up_to_one_call() -> None:
    with backend_of(language_model(torch.float64)) as backend:
        together = gradient_of(backend, DATA, CROSS_ENTROPY)
        get(backend.forward_backward(DATA[:1], CROSS_ENTROPY))
        get(backend.forward(DATA, CROSS_ENTROPY))
        apart = gradient_of(backend, DATA[1:], CROSS_ENTROPY)
    assert distance(apart, together) < 1e-12


def test_a_neighbour_in_the_micro_batch_changes_no_bit() -> None:
    """The others' log-probs, and the gradient of the others' loss."""
    silent = replace(DATA[1], arrays={**DATA[1].arrays, "weights": float_array(np.zeros(3))})
    other = replace(silent, inputs=int_array((DATA[1].inputs + 5) % VOCABULARY))
    results = []
    for neighbour in (silent, other):
        with backend_of(language_model()) as backend:
            out = get(backend.forward_backward([DATA[0], neighbour, DATA[2]], CROSS_ENTROPY))
            results.append((out, take_gradient(backend)))
    (left, left_gradient), (right, right_gradient) = results
    for one, two in zip(left.logprobs, right.logprobs, strict=True):
        assert np.array_equal(one, two, equal_nan=True)
    assert np.isnan(left.logprobs[1]).all()
    for name, value in left_gradient.items():
        assert torch.equal(value, right_gradient[name]), name


@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_changes_no_bit_of_the_gradient(lora: bool) -> None:
    found = []
    for recompute in (False, True):
        lm = language_model()
        if lora:
            add_lora(lm.model, rank=2, alpha=4.0, targets=("q_proj", "up_proj", "lm_head"), seed=0)
        if recompute:
            recompute_layers(lm.model)
        with backend_of(lm) as backend:
            get(backend.forward_backward(DATA, CROSS_ENTROPY))
            get(backend.optim_step(STEP))  # B is zero before
            found.append(gradient_of(backend, DATA, LOSS_SPECS["ppo"]))
    assert found[0].loss == found[1].loss
    for name, value in found[0].of.items():
        assert torch.equal(value, found[1].of[name]), name
        assert value.any()


# --- what goes through the head --------------------------------------------------------------------------------------


def expected_logprobs(one: Datum) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = plain_model()(input_ids=torch.tensor(one.inputs).long()[None]).logits[0] / one.temperature
    return torch.log_softmax(logits, -1)[torch.arange(one.num_tokens), one.targets.tolist()].numpy()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("unit", [Unit.TOKEN, Unit.SEQUENCE])
def test_only_weighted_tokens_go_through_the_head(everything: bool, unit: Unit) -> None:
    seen: list[int] = []

    @loss_unit(unit)
    def counted(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
        seen.append(len(policy_logprobs_T))
        return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)

    data = [*DATA, datum(6, 9, temperature=0.5)]
    with backend_of(language_model(), micro_batch_tokens=16, chunk_tokens=4, score_everything=everything) as backend:
        out = get(backend.forward(data, LossSpec(fn=counted)))
        assert sum(seen) == sum(one.num_tokens if everything else (one.arrays["weights"] != 0).sum() for one in data)
        assert get(backend.forward_backward(data, LossSpec(fn=counted))).loss == pytest.approx(out.loss)
    for one, logprobs in zip(data, out.logprobs, strict=True):
        asked = np.full(one.num_tokens, True) if everything else one.arrays["weights"] != 0
        assert not asked.all() or everything
        assert np.array_equal(np.isnan(logprobs), ~asked)
        assert np.allclose(logprobs[asked], expected_logprobs(one)[asked], rtol=1e-5, atol=1e-5)


def test_a_batch_without_weights_is_a_gradient_of_zero() -> None:
    silent = [replace(one, arrays={**one.arrays, "weights": float_array(np.zeros(one.num_tokens))}) for one in DATA]
    with backend_of(language_model()) as backend:
        before = get(backend.export_weights())
        out = get(backend.forward_backward(silent, CROSS_ENTROPY))
        assert out.loss == 0.0
        assert all(np.isnan(logprobs).all() for logprobs in out.logprobs)
        step = get(backend.optim_step(Adam(learning_rate=0.1)))
        assert (step.grad_norm, step.updated, step.num_updates) == (0.0, True, 1)
        assert get(backend.export_weights()) == before


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *[leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]])
        return out


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_micro_batchs_logits_never_exist_at_once(name: str) -> None:
    vocabulary, chunk = 300, 16
    shape = {**SHAPE, "context": 256}
    lm = prepare(make_model(vocab_size=vocabulary, **shape), make_tokenizer(WORDS), source="tiny")
    data = [datum(100, index, sparse=False) for index in range(2)]
    backend = TorchBackend(lm, chunk_tokens=chunk)
    with Largest() as largest:  # a mode holds for this thread only, so the work is done on it
        backend._run(data, LOSS_SPECS[name], want_gradient=True)
    backend.close()
    weights = max(parameter.numel() for parameter in lm.model.parameters())
    assert largest.numel == max(chunk * vocabulary, weights, 2 * 100 * 4 * 8)  # 4 * 8: inside of the MLP
    assert largest.numel < 200 * vocabulary / 4


# --- updates ---------------------------------------------------------------------------------------------------------


def test_steps_equal_torchs_adamw_on_the_plain_model() -> None:
    """Gradient, clipping, decay and update over four steps of changing rates, in float64."""
    lm = language_model(torch.float64)
    theirs: Any = prepare(plain_model(torch.float64), make_tokenizer(WORDS), source="plain").model
    theirs.set_attn_implementation("sdpa")
    reference = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    with backend_of(lm, micro_batch_tokens=10, chunk_tokens=3) as backend:
        for step, rate in enumerate((0.02, 0.01, 0.005, 0.02)):
            batch = [datum(8, 10 * step + index) for index in range(3)]
            reference.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for one in batch:
                logp = torch.log_softmax(theirs(input_ids=torch.tensor(one.inputs).long()[None]).logits[0], -1)
                picked = logp[torch.arange(8), one.targets.tolist()]
                loss = loss - (torch.tensor(one.arrays["weights"]).double() * picked).sum()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
            reference.param_groups[0]["lr"] = rate
            reference.step()
            out = get(backend.forward_backward(batch, CROSS_ENTROPY))
            update = get(backend.optim_step(Adam(learning_rate=rate, weight_decay=0.1, clip_norm=0.5)))
            assert out.loss == pytest.approx(loss.item(), rel=1e-10)
            assert update.grad_norm == pytest.approx(norm, rel=1e-10)
            assert norm > 0.5
    for (name, ours), parameter in zip(lm.model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, parameter, rtol=1e-9, atol=1e-10), name
        assert not torch.allclose(ours, dict(plain_model(torch.float64).named_parameters())[name], atol=1e-3)


def exploding(factor: float) -> LossSpec:
    def multiplied(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
        return LossOut(loss=(weights_T * policy_logprobs_T * factor).sum(), metrics={})

    return LossSpec(fn=multiplied)


def state_bytes(backend: TorchBackend, folder: Path) -> dict[str, bytes]:
    get(backend.save_state(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def goes_on_alike(backend: TorchBackend, other: TorchBackend, folder: Path, *, num_updates: int) -> None:
    """Nothing is left of the gradient that was given up: the next update is that of a backend that never saw it."""
    with pytest.raises(NoGradientError):
        get(backend.optim_step(STEP))
    for one in (backend, other):
        get(one.forward_backward(DATA, CROSS_ENTROPY))
        assert get(one.optim_step(STEP)).num_updates == num_updates
    assert state_bytes(backend, folder / "mine") == state_bytes(other, folder / "theirs")


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e6], ids=["inf", "nan", "above max_norm"])
def test_a_skipped_gradient_leaves_every_byte_and_is_gone(factor: float, tmp_path: Path) -> None:
    with backend_of(language_model()) as backend, backend_of(language_model()) as other:
        for one in (backend, other):
            get(one.forward_backward(DATA, CROSS_ENTROPY))
            get(one.optim_step(STEP))
        before = state_bytes(backend, tmp_path / "before")
        get(backend.forward_backward(DATA, exploding(factor)))
        skipped = get(backend.optim_step(Adam(learning_rate=0.01, max_norm=1e4)))
        assert (skipped.updated, skipped.num_updates) == (False, 1)
        assert not skipped.grad_norm <= 1e4
        assert state_bytes(backend, tmp_path / "after") == before
        goes_on_alike(backend, other, tmp_path, num_updates=2)


@pytest.mark.parametrize("verb", ["norm", "update"])
def test_a_gradient_whose_update_fails_is_gone(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **more: object) -> None:
        raise MemoryError("no room")

    with backend_of(language_model()) as backend, backend_of(language_model()) as other:
        get(backend.forward_backward(DATA, CROSS_ENTROPY))
        with monkeypatch.context() as patched:
            patched.setattr(backend._optimizer, verb, fails)
            with pytest.raises(BackendError, match="optim_step failed: MemoryError: no room"):
                get(backend.optim_step(STEP))
        goes_on_alike(backend, other, tmp_path, num_updates=1)


def test_half_precision_modules_train_with_float32_masters() -> None:
    def run(dtype: torch.dtype, rate: float) -> tuple[list[float], LanguageModel]:
        lm, losses = language_model(dtype), []
        with backend_of(lm, micro_batch_tokens=12, chunk_tokens=4) as backend:
            for _ in range(30):
                losses.append(get(backend.forward_backward(DATA[:2], LossSpec(fn=positive))).loss)
                get(backend.optim_step(Adam(learning_rate=rate)))
        return losses, lm

    half, lm = run(torch.bfloat16, 1e-3)
    full, _ = run(torch.float32, 1e-3)
    assert lm.dtype == torch.bfloat16
    # a rate of 1e-3 is below bfloat16's resolution of most weights (1/256 of each): without masters nothing moves
    assert full[0] - full[-1] > 2.0
    assert half[0] - half[-1] == pytest.approx(full[0] - full[-1], rel=0.1)


def positive(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
    return LossOut(loss=-(weights_T.abs() * policy_logprobs_T).sum(), metrics={})


@pytest.mark.parametrize("name", ["cross_entropy", "squared sums"])
def test_an_adapter_on_a_half_precision_head_trains(name: str) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        lm = language_model(dtype)
        add_lora(lm.model, rank=2, alpha=4.0, targets=("lm_head",), seed=0)
        with backend_of(lm, chunk_tokens=2) as backend:
            found.append(gradient_of(backend, DATA, LOSS_SPECS[name]))
    assert found[0].of["lm_head.up"].dtype == torch.float32
    assert distance(found[0], found[1]) < 0.05


# --- failures --------------------------------------------------------------------------------------------------------


def changed(**arrays: Any) -> Datum:
    return replace(DATA[0], arrays={**DATA[0].arrays, **{name: float_array(value) for name, value in arrays.items()}})


BAD: dict[str, tuple[Sequence[Datum], LossSpec, str]] = {
    "an unknown loss": (DATA, LossSpec(fn="cross_entropi"), "cross_entropy"),
    "an unknown number": (DATA, LossSpec(fn="ppo", params={"clip": 0.1}), "clip"),
    "a missing array": ([replace(DATA[0], arrays={"weights": DATA[0].arrays["weights"]})], LossSpec(fn="ppo"), "advan"),
    "an input outside of the vocabulary": ([replace(DATA[1], inputs=int_array([0, 20, 1]))], CROSS_ENTROPY, "inputs"),
    "a negative target": ([replace(DATA[1], targets=int_array([0, -1, 1]))], CROSS_ENTROPY, "targets"),
    "a long sequence": ([DATA[0], datum(33, 0)], CROSS_ENTROPY, "datum 1 has 33 tokens; the model's context is 32"),
    "no tokens": ([DATA[0], datum(0, 0)], CROSS_ENTROPY, "datum 1 has no tokens"),
    "no temperature": ([datum(3, 0, temperature=0.0)], CROSS_ENTROPY, "temperature is 0.0"),
    "several targets and one": ([DATA[0], datum(3, 0, alternatives=2)], CROSS_ENTROPY, "mixed"),
    "an array that is not finite": ([changed(advantages=[np.nan] * 7)], LossSpec(fn="ppo"), "'advantages'"),
    "an optional array on some data": (
        [changed(sequence_ratio_mask=[1.0] * 7), DATA[1]],
        LossSpec(fn="gspo"),
        "'sequence_ratio_mask'",
    ),
    "a loss of a scalar head": (DATA, LossSpec(fn="bradley_terry"), "scalar head|data do not have"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_cannot_be_met_says_why_and_nothing_is_touched(case: str, tmp_path: Path) -> None:
    data, spec, message = BAD[case]
    with backend_of(language_model()) as backend:
        before = state_bytes(backend, tmp_path / "before")
        for verb in (backend.forward, backend.forward_backward):
            with pytest.raises(BackendError, match=message):
                get(verb(data, spec))
        with pytest.raises(NoGradientError):
            get(backend.optim_step(STEP))
        assert state_bytes(backend, tmp_path / "after") == before
        get(backend.forward_backward(DATA, CROSS_ENTROPY))
        assert get(backend.optim_step(STEP)).updated


def test_a_failure_in_the_middle_leaves_no_half_gradient() -> None:
    calls: list[int] = []

    @loss_unit(Unit.SEQUENCE)
    def failing(policy_logprobs_T: Tensor, weights_T: Tensor) -> LossOut:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the third micro-batch")
        return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)

    with backend_of(language_model(), micro_batch_tokens=1) as backend:
        expected = gradient_of(backend, DATA, CROSS_ENTROPY)
        get(backend.forward_backward(DATA, CROSS_ENTROPY))
        with pytest.raises(BackendError, match="forward_backward failed: ValueError: the third micro-batch"):
            get(backend.forward_backward(DATA, LossSpec(fn=failing)))
        with pytest.raises(NoGradientError):
            get(backend.optim_step(STEP))
        again = gradient_of(backend, DATA, CROSS_ENTROPY)
    assert all(torch.equal(value, again.of[name]) for name, value in expected.of.items())


def test_requests_run_one_after_another_on_one_thread_in_the_order_they_were_made() -> None:
    threads: list[str] = []
    order: list[float] = []

    def noted(policy_logprobs_T: Tensor, weights_T: Tensor, *, number: float = 0.0) -> LossOut:
        threads.append(threading.current_thread().name)
        order.append(number)
        return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)

    with backend_of(language_model()) as backend:
        verbs = [backend.forward, backend.forward_backward] * 5
        futures = [verb(DATA, LossSpec(fn=noted, params={"number": i})) for i, verb in enumerate(verbs)]
        assert len({get(future).loss for future in futures}) == 1
    assert order == list(range(10))
    assert len(set(threads)) == 1
    assert threads[0] != threading.current_thread().name


# --- states ----------------------------------------------------------------------------------------------------------


def lora_model(targets: Sequence[str] = ("q_proj", "down_proj", "lm_head"), *, tied: bool = True) -> LanguageModel:
    lm = language_model(tied=tied)
    add_lora(lm.model, rank=2, alpha=4.0, targets=targets, seed=1)
    return lm


MODELS = {
    "full": language_model,
    "full, untied": lambda: language_model(tied=False),
    "bfloat16": lambda: language_model(torch.bfloat16),
    "lora": lambda: lora_model(("q_proj", "down_proj")),
    "lora with the head": lora_model,
    "lora with an untied head": lambda: lora_model(tied=False),
}


def train(backend: TorchBackend, seeds: Sequence[int]) -> None:
    for seed in seeds:
        get(backend.forward_backward([datum(9, seed), datum(4, seed + 50)], LOSS_SPECS["ppo"]))
        get(backend.optim_step(Adam(learning_rate=0.02, weight_decay=0.01)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_state_continues_byte_for_byte(kind: str, tmp_path: Path) -> None:
    with backend_of(MODELS[kind]()) as first, backend_of(MODELS[kind]()) as second:
        train(first, range(3))
        saved = state_bytes(first, tmp_path / "saved")
        train(first, range(3, 6))
        get(second.load_state(tmp_path / "saved"))
        assert state_bytes(second, tmp_path / "loaded") == saved
        train(second, range(3, 6))
        ours, theirs = state_bytes(first, tmp_path / "first"), state_bytes(second, tmp_path / "second")
        assert get(first.export_weights()) == get(second.export_weights())
        assert (
            get(first.optim_step(DiscardGradient())).num_updates
            == get(second.optim_step(DiscardGradient())).num_updates
            == 6
        )
    assert ours == theirs
    assert ours["model.safetensors"] != saved["model.safetensors"]
    assert ours["optimizer.safetensors"] != saved["optimizer.safetensors"]


TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def our_logits(lm: LanguageModel) -> Tensor:
    with torch.no_grad():
        return lm.hidden(TOKENS, torch.arange(8), Packed((8,))) @ lm.head_weight().T


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "bfloat16"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_saved_folder_is_a_hugging_face_model_and_its_adapter_pefts(kind: str, tmp_path: Path) -> None:
    lm = MODELS[kind]()
    with backend_of(lm) as backend:
        train(backend, range(3))
        get(backend.save_state(tmp_path / "state"))
    ours = our_logits(lm)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "state")
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=TOKENS[None]).logits[0], ours, rtol=1e-5, atol=1e-5)
    tied = kind in ("full", "lora")  # a head with an adapter of its own is no longer the embedding
    assert json.loads((tmp_path / "state" / "config.json").read_text())["tie_word_embeddings"] == tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(tmp_path / "state")("a b l")["input_ids"] == [8, 9, 19]
    base = plain_model(tied="untied" not in kind)
    with torch.no_grad():
        assert not torch.allclose(base(input_ids=TOKENS[None]).logits[0], ours, atol=0.05)
        if "lora" in kind:
            adapted = PeftModel.from_pretrained(base, tmp_path / "state" / "adapter").eval()
            assert torch.allclose(adapted(input_ids=TOKENS[None]).logits[0], ours, rtol=1e-5, atol=1e-5)
    assert lm.model.config.tie_word_embeddings == ("untied" not in kind)


def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state before the steps, and a second save waits for the first."""
    may_write, plain = threading.Event(), torch_backend.write_copy

    def write_copy(folder: Path, *others: Any) -> None:
        assert may_write.wait(60)
        plain(folder, *others)

    with backend_of(lora_model()) as backend, backend_of(lora_model()) as other:
        for one in (backend, other):
            train(one, [1])
        before = state_bytes(other, tmp_path / "before")
        monkeypatch.setattr(torch_backend, "write_copy", write_copy)
        first = backend.save_state(tmp_path / "first")
        train(backend, [2])
        assert not first.done()
        second = backend.save_state(tmp_path / "second")
        behind = backend.forward(DATA, CROSS_ENTROPY)
        may_write.set()
        get(behind)
        assert first.done()
        get(second)
        train(other, [2])
        after = state_bytes(other, tmp_path / "after")
    for name, expected in (("first", before), ("second", after)):
        written = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}
        assert written == expected


def test_states_of_other_models_are_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    wide = prepare(make_model(vocab_size=VOCABULARY, **{**SHAPE, "width": 16}), make_tokenizer(WORDS), source="wide")
    deep = prepare(make_model(vocab_size=VOCABULARY, **{**SHAPE, "layers": 1}), make_tokenizer(WORDS), source="deep")
    models = {"shape": wide, "lacks the weights": deep, "with LoRA": lora_model(), "optimizer": language_model()}
    for name, lm in models.items():
        with backend_of(lm) as other:
            train(other, [7])
            get(other.save_state(tmp_path / name))
    whole = (tmp_path / "optimizer" / "optimizer.safetensors").read_bytes()
    (tmp_path / "optimizer" / "optimizer.safetensors").write_bytes(whole[: len(whole) // 2])
    with backend_of(language_model()) as backend:
        train(backend, [1])
        before = state_bytes(backend, tmp_path / "before")
        for name in models:
            with pytest.raises(BackendError, match=name if name != "optimizer" else "load_state failed"):
                get(backend.load_state(tmp_path / name))
            assert state_bytes(backend, tmp_path / "after") == before, name


def test_an_adapters_state_is_refused_over_another_base(tmp_path: Path) -> None:
    other = lora_model()
    with torch.no_grad():
        other.model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.5
    with backend_of(lora_model()) as first, backend_of(other) as second:
        train(first, [0])
        get(first.save_state(tmp_path / "state"))
        before = state_bytes(second, tmp_path / "before")
        with pytest.raises(BackendError, match=r"other frozen weights: set model\.path"):
            get(second.load_state(tmp_path / "state"))
        assert state_bytes(second, tmp_path / "after") == before


def test_the_fingerprint_is_that_of_the_weights(tmp_path: Path) -> None:
    with backend_of(language_model()) as first, backend_of(language_model()) as second:
        start = get(first.export_weights())
        assert isinstance(start, SharedWeights)
        train(first, [0])
        assert get(first.export_weights()) != start == get(second.export_weights())
        get(first.save_state(tmp_path))
        get(second.load_state(tmp_path))
        assert get(second.export_weights()) == get(first.export_weights())


def test_one_call_makes_the_same_backend_as_the_steps(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", words=WORDS, **SHAPE)
    made = create_backend(
        str(tmp_path / "tiny"), device="cpu", lora_rank=2, lora_alpha=4.0, lora_targets=("q_proj",), recompute=True
    )
    lm = language_model()
    add_lora(lm.model, rank=2, alpha=4.0, targets=("q_proj",), seed=0)
    with backend_of(lm) as steps:
        for one in (made, steps):
            train(one, range(2))
        assert get(made.export_weights()) == get(steps.export_weights())
    made.close()


def test_a_shared_beginning_is_computed_once_and_changes_no_gradient() -> None:
    """Episodes of a group: prompt once, completions behind it; float64, so only rounding may differ."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, VOCABULARY, size=24)
    data = []
    for length in (8, 8, 4, 9):
        tokens = int_array(np.concatenate([prompt, rng.integers(0, VOCABULARY, size=length)]))
        weights = np.concatenate([np.zeros(len(prompt) - 1), rng.normal(size=length)])
        data.append(Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(weights)}))
    found, computed = [], []
    for budget in (1000, 1):  # all in one micro-batch, and each alone
        backend = TorchBackend(language_model(torch.float64), micro_batch_tokens=budget)
        hidden = type(backend.lm).hidden
        sizes: list[int] = []

        def counted(lm, tokens_T, *rest, sizes=sizes, hidden=hidden, **more):
            sizes.append(len(tokens_T))
            return hidden(lm, tokens_T, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(backend.lm), "hidden", counted)
            out = backend.forward_backward(data, CROSS_ENTROPY).result()
            found.append((out.loss, backend.gradients().result()))
        computed.append(sum(sizes))
        backend.close()
    assert computed == [24 + (8 - 1) * 2 + (4 - 1) + (9 - 1), sum(datum.num_tokens for datum in data)]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shards_first", [True, False])
def test_saving_over_an_older_save_leaves_nothing_of_it(
    shards_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LlamaForCausalLM.save_pretrained

    def save(lora: bool, *, sharded: bool, fill: float) -> None:
        lm = language_model()
        with torch.no_grad():
            lm.model.base_model.embed_tokens.weight.fill_(fill)
        if lora:
            add_lora(lm.model, rank=2, alpha=2.0, targets=("q_proj",), seed=0)
        size = "2KB" if sharded else "50GB"
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", partialmethod(real, max_shard_size=size))
        with backend_of(lm) as backend:
            get(backend.save_state(tmp_path))

    save(True, sharded=shards_first, fill=1.0)
    assert (tmp_path / "model.safetensors.index.json").is_file() == shards_first
    assert (tmp_path / "adapter").is_dir()
    save(False, sharded=not shards_first, fill=2.0)
    assert (tmp_path / "model.safetensors.index.json").is_file() != shards_first
    assert (tmp_path / "model.safetensors").is_file() == shards_first
    assert not (tmp_path / "adapter").exists()
    assert not (tmp_path / "lora.safetensors").exists()
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bool((read.get_input_embeddings().weight == 2.0).all())
    with backend_of(language_model()) as backend:
        get(backend.load_state(tmp_path))
        assert bool((backend.lm.model.base_model.embed_tokens.weight == 2.0).all())
