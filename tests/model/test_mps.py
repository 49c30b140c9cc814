"""Apple's GPU without a Mac: the choice of device and dtype with torch told that it has one, and no float64 there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import ConfigError
from headrace.infer.sampling import inverse_cdf, truncate_distribution
from headrace.model import device as device_module
from headrace.model.device import choose_device, choose_dtype, wide, wide_dtype
from headrace.model.memory import choose_placement
from headrace.train.micro_batch import MicroBatchOutput
from headrace.types import SamplingParams


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_it_is_chosen_where_torch_has_it(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == choose_device("mps") == "mps"
    assert choose_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == "cuda"


def test_it_is_not_chosen_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="'mps' but torch sees none"):
        choose_device("mps")


def test_it_computes_in_float32_and_refuses_float64() -> None:
    assert choose_dtype("auto", "mps") == torch.float32
    with pytest.raises(ConfigError, match="'float64', which Apple's GPU"):
        choose_dtype("float64", "mps")
    for name in ("auto", "mps"):
        with pytest.raises(ConfigError, match="'float64', which Apple's GPU"):
            choose_placement(device=name, dtype="float64", gpus=(), mps=True)
    assert choose_placement(device="auto", dtype="float64", gpus=("x",), mps=True).device == "cuda"


def test_the_doctor_would_use_it_and_names_the_fallback() -> None:
    placed = choose_placement(device="auto", dtype="auto", gpus=(), mps=True)
    assert (placed.device, placed.dtype) == ("mps", "float32")
    assert "Apple's GPU; sums that are float64 elsewhere are float32 there" in placed.device_reason


def test_the_widest_float_of_a_device() -> None:
    assert wide_dtype(torch.device("mps")) == torch.float32
    assert wide_dtype(torch.device("cuda")) == wide_dtype(torch.device("cpu")) == torch.float64
    assert wide(torch.ones(1)).dtype == torch.float64


class NoFloat64(TorchDispatchMode):
    """Fail on any tensor in float64, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                raise TypeError(f"{func} gave float64, which MPS does not have")
        return out


@pytest.fixture
def as_on_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_module, "wide_dtype", lambda device: torch.float32)
    with NoFloat64():
        yield


def test_sampling_and_losses_need_no_float64_there(as_on_mps: None) -> None:
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).repeat(3, 1)
    assert inverse_cdf(weights, torch.tensor([0.05, 0.5, 0.99])).tolist() == [0, 2, 3]
    kept = truncate_distribution(weights[0], SamplingParams(max_tokens=1, top_p=0.8))
    assert (kept > 0).tolist() == [False, False, True, True]
    out = MicroBatchOutput(losses=[torch.tensor(1.5), torch.tensor(2.0)], metrics=(), values=torch.zeros(1))
    assert out.total() == 3.5
    with pytest.raises(TypeError, match="MPS"):  # the guard itself
        torch.ones(1).double()
