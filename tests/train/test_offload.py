"""The optimiser's state in host memory: its place on the device is freed, and no result changes by a bit."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora
from headrace.model.tiny import make_model, make_tokenizer
from headrace.train.offload import HostOffload
from headrace.train.torch_backend import TorchBackend, dummy_datum
from headrace.types import CROSS_ENTROPY, Adam, ScaleUpdate

R = TypeVar("R")
WORDS = tuple("abcdefghijkl")
STEP = Adam(learning_rate=0.01, reversible=True)


def get(future: "Future[R]") -> R:
    return future.result(200)


def model(dtype: torch.dtype, *, lora: bool = False) -> LanguageModel:
    tokenizer = make_tokenizer(WORDS)
    plain = make_model(vocab_size=20, width=8, layers=2, heads=2, kv_heads=1, context=32, seed=3).to(dtype)
    lm = prepare(plain, tokenizer, source="tiny")
    if lora:
        add_lora(lm.model, rank=2, alpha=4.0, targets=("q_proj", "down_proj"), seed=0)
    return lm


def state_of(backend: TorchBackend) -> dict[str, bytes]:
    """The bytes of weights, masters and moments."""
    state = get(backend.read_state())
    named = {**state.weights, **{f"moments/{name}": tensor for name, tensor in state.moments.items()}}
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


def train(backend: TorchBackend, steps: int, *, offload: bool, first: int = 0) -> None:
    for step in range(first, first + steps):
        get(backend.forward_backward([dummy_datum(12, step, backend.lm)], CROSS_ENTROPY))
        if offload and step % 2:
            get(backend.offload())  # with a gradient that waits
        get(backend.optim_step(STEP))
        if offload:
            get(backend.offload())
            get(backend.offload())
        get(backend.optim_step(ScaleUpdate(share=0.5)))
        if offload:
            get(backend.offload())
            get(backend.forward([dummy_datum(12, step, backend.lm)], CROSS_ENTROPY))
            get(backend.export_weights())
            get(backend.reload())
            get(backend.reload())


def stored(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}


CASES: dict[str, Any] = {
    "half": {"dtype": torch.bfloat16},
    "float32": {"dtype": torch.float32},
    "half-lora": {"dtype": torch.bfloat16, "lora": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_training_with_moves_has_the_bytes_of_training_without(options: dict[str, Any]) -> None:
    backends = [TorchBackend(model(**options), micro_batch_tokens=64) for _ in range(2)]
    for backend, offload in zip(backends, (False, True), strict=True):
        train(backend, 4, offload=offload)
    assert state_of(backends[0]) == state_of(backends[1])
    assert get(backends[0].export_weights()) == get(backends[1].export_weights())
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_what_is_moved_leaves_no_storage_behind(options: dict[str, Any]) -> None:
    backend = TorchBackend(model(**options), micro_batch_tokens=64)
    train(backend, 1, offload=False)
    optimizer, half = backend._optimizer, options["dtype"] == torch.bfloat16
    moments = {
        f"{index}/{key}": value
        for index, state in enumerate(optimizer._adam.state.values())
        for key, value in state.items()
        if key != "step"
    }
    assert moments
    before = state_of(backend)
    get(backend.offload())
    assert set(stored(moments).values()) == {0}
    if half:
        assert set(stored(optimizer.masters).values()) == {0}
        assert {leaf.untyped_storage().nbytes() for leaf in optimizer._leaves.values()} == {0}, "they share a storage"
    assert all(size > 0 for size in stored(optimizer.parameters).values()), "weights stay"
    assert optimizer.is_offloaded
    assert state_of(backend) == before, "what is moved can be read"
    get(backend.reload())
    assert not optimizer.is_offloaded
    assert all(size > 0 for size in stored({**moments, **optimizer.masters}).values())
    assert state_of(backend) == before
    backend.close()


def test_a_state_that_is_moved_can_be_saved_and_replaced(tmp_path: Path) -> None:
    backend, other = (TorchBackend(model(torch.bfloat16), micro_batch_tokens=64) for _ in range(2))
    train(backend, 2, offload=False)
    get(backend.save_state(tmp_path / "there"))
    get(backend.offload())
    get(backend.save_state(tmp_path / "moved"))
    assert backend._optimizer.is_offloaded, "a checkpoint while others use the device needs no room on it"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "moved" / name).read_bytes()
    train(other, 1, offload=False)
    get(other.offload())
    get(other.load_state(tmp_path / "moved"))
    train(other, 2, offload=True, first=2)
    train(backend, 2, offload=False, first=2)
    assert state_of(other) == state_of(backend)
    backend.close()
    other.close()


def test_a_state_before_the_first_update_can_be_moved() -> None:
    backend, plain = (TorchBackend(model(torch.float32), micro_batch_tokens=64) for _ in range(2))
    get(backend.offload())
    assert not backend._optimizer.is_offloaded, "float32 weights are their own masters, and there are no moments yet"
    train(backend, 1, offload=True)
    train(plain, 1, offload=False)
    assert state_of(backend) == state_of(plain)
    backend.close()
    plain.close()


def test_tensors_of_any_layout_come_back_bit_by_bit() -> None:
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    turned, part, single = whole.T, whole[1:3, ::2], torch.tensor([float("nan"), -0.0])
    values = [tensor.clone() for tensor in (turned, part, single)]
    host = HostOffload()
    host.offload([turned, part, single])
    assert host.num_bytes == whole.nbytes + single.nbytes, "a storage that two tensors share is moved once"
    assert whole.untyped_storage().nbytes() == 0
    for tensor, value in zip((turned, part, single), values, strict=True):
        assert torch.equal(host.value(tensor).nan_to_num(7.0), value.nan_to_num(7.0))
    host.reload()
    assert host.num_bytes == 0
    for tensor, value in zip((turned, part), values[:2], strict=True):
        assert torch.equal(tensor, value)
    assert single.view(torch.int32).tolist() == values[2].view(torch.int32).tolist()
