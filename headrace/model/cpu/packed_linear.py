"""Matrix products on the CPU with weights that oneDNN packs once, not at every call.

A weight is reordered when it is first used and again when it has changed; the packed copy is an attribute of the tensor
it was made from and dies with it. A change is detected by torch's version counter of the tensor and, because not every
way of writing raises that (fused optimisers do not, nor does `.data`), by a few of its numbers. The engine, for which
comparing numbers would be too slow, calls `invalidate_packed` when it loads weights.

With few rows that is two to five times as fast, because nothing is rearranged per call, and a row has the same bits
whatever the other rows are. Where oneDNN cannot (another device or type, a build without it,
`torch.backends.mkldnn.flags(enabled=False)`), the product is torch's own.

Shape letters: T rows, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST = 2**16  # elements of a weight; below, the call costs more than the packing saves
MANY = 256  # rows
ATTRIBUTE = "_headrace_packed"
INVALIDATED = "_headrace_invalidated"  # how often `invalidate_packed` was called for a weight


class PackedLinear(nn.Linear):
    """A linear layer whose product goes through `linear`; parameters, names and shapes are the plain layer's."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Make every plain linear layer of the model a `PackedLinear`, in place; parameters stay the same objects.

    A weight that torchao has quantised is a tensor of another type and has kernels of its own.
    """
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter:
            module.__class__ = PackedLinear


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias for x [..., I], differentiable."""
    if not _applies(weight_OI):
        return F.linear(x, weight_OI, bias_O)
    if torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad):
        result: Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return result
    packed = packed_weight(weight_OI)
    assert packed is not None
    return _product(x, packed, bias_O)


def packed_weight(weight_OI: Tensor) -> Tensor | None:
    """Return the packed copy of a weight as it is now, or None if plain products are to be used."""
    if not _applies(weight_OI):
        return None
    state = _state(weight_OI)
    copy: PackedCopy | None = getattr(weight_OI, ATTRIBUTE, None)
    if copy is not None and copy.state == state and copy.matches(weight_OI):
        return copy.packed
    copy = PackedCopy(state, _some_numbers(weight_OI), _pack(weight_OI.detach()))
    setattr(weight_OI, ATTRIBUTE, copy)
    return copy.packed


def detached(weight_OI: Tensor) -> Tensor:
    """Detach a weight and carry over its packed copy, if there is one.

    A copy that is packed for the detached tensor dies with it.
    """
    copy: PackedCopy | None = getattr(weight_OI, ATTRIBUTE, None)
    plain = weight_OI.detach()
    if copy is not None and copy.state == _state(weight_OI) and copy.matches(weight_OI):
        setattr(plain, ATTRIBUTE, replace(copy, state=_state(plain)))
    return plain


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """A packed copy of a weight."""

    state: tuple[int, int | None, int]  # `_state` of the weight when it was packed
    numbers: list[float]  # `_some_numbers` of the weight when it was packed
    packed: Tensor

    def matches(self, weight: Tensor) -> bool:
        """Compare a few numbers of the weight with those at packing.

        Skipped in inference mode, where the engine calls `invalidate_packed` instead.
        """
        return torch.is_inference_mode_enabled() or self.numbers == _some_numbers(weight)


def linear_backward_input(grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """Compute grad @ weight, not differentiable; for one use oneDNN reads the weight unpacked."""
    return _product(grad_TO, weight_OI.detach().T, None) if _applies(weight_OI) else grad_TO @ weight_OI


def _applies(weight_OI: Tensor) -> bool:
    if weight_OI.dtype != torch.float32 or weight_OI.device.type != "cpu" or weight_OI.numel() < SMALLEST:
        return False
    return bool(torch.backends.mkldnn.enabled) and available()


@cache
def available() -> bool:
    """Tell whether this torch has the operators, and they compute right results."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 24, generator=generator), torch.randn(40, 24, generator=generator)
    try:
        with torch.no_grad():
            product = _product(x, _pack(weight), None)
    except (AttributeError, NotImplementedError, RuntimeError):  # builds differ in what they register
        return False
    return torch.allclose(product, x @ weight.T, rtol=1e-4, atol=1e-4)


def invalidate_packed(model: nn.Module) -> None:
    """Drop the packed copies of a model's weights, which may have changed; they are packed again at their next use."""
    for parameter in model.parameters():
        setattr(parameter, INVALIDATED, getattr(parameter, INVALIDATED, 0) + 1)
        if hasattr(parameter, ATTRIBUTE):
            delattr(parameter, ATTRIBUTE)


class FusedLinear:
    """Computes several linear layers of the same input as one product, without a gradient: outputs side by side.

    Changes that torch's version counter does not show take effect after `invalidate_packed` of the model.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = tuple(layers)
        self._state: Any = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        state = [_state(parameter) for layer in self._layers for parameter in layer.parameters()]
        if state != self._state:
            self._refresh()
            self._state = state
        if self._packed is not None:
            return _product(x, self._packed, self._bias)
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def _refresh(self) -> None:
        joined = torch.cat([layer.weight.detach() for layer in self._layers])
        biases = [layer.bias for layer in self._layers]
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        packed = packed_weight(joined)
        self._weight, self._packed = (joined, None) if packed is None else (None, packed)


def _some_numbers(weight: Tensor) -> list[float]:
    """Return a few numbers of a weight. An optimiser changes all of them, so a few show the change."""
    flat = weight.detach().flatten()
    numbers: list[float] = flat[:: max(1, len(flat) // 8)].tolist()
    return numbers


def _state(weight: Tensor) -> tuple[int, int | None, int]:
    """Return a value that changes when the weight does, or may have changed."""
    return weight.data_ptr(), None if weight.is_inference() else weight._version, getattr(weight, INVALIDATED, 0)


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
    return packed


def _product(x: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias_O, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # with many rows oneDNN packs as it goes, at a few percent of the time and without a copy that stays
        ctx.save_for_backward(x, weight_OI)
        ctx.has_bias = bias_O is not None
        few = x.numel() < MANY * x.shape[-1]
        packed = packed_weight(weight_OI) if few else weight_OI.detach()
        assert packed is not None
        return _product(x, packed, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = linear_backward_input(grad, weight_OI) if wants_x else None
        grad_weight = flat.T @ x.reshape(-1, x.shape[-1]) if wants_weight else None
        grad_bias = flat.sum(dim=0) if wants_bias and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias
