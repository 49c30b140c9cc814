"""Weights in eight or four bits, for models that are only read: less memory, at some error in every log-prob.

Weight-only and symmetric: each row of a weight is cut into groups, and a group is whole numbers times one scale, the
largest of its magnitudes being the largest number. Products are computed from weights made anew for each call, so only
one layer's are there at a time. Embedding and head keep their precision: that is where errors show most. Plain torch:
it runs wherever torch does, and is not faster than the full weights. Packages that do the same are `quantizers.py`.

Shape letters: O outputs, I inputs, G groups of a row, W inputs of a group.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.model.lora import LoraLinear

Bits = Literal[8, 4]
GROUP = {8: 128, 4: 32}  # inputs that share a scale, at most
SMALLEST_GROUP = 16
LEVELS = {8: 127, 4: 7}


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is whole numbers and scales; four-bit numbers lie two in a byte."""

    def __init__(self, layer: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.bits, self.in_features, self.out_features = bits, layer.in_features, layer.out_features
        numbers_OI, scales_OG = quantize(layer.weight.detach(), bits)
        self.register_buffer("numbers", _packed(numbers_OI) if bits == 4 else numbers_OI)
        self.register_buffer("scales", scales_OG)
        bias = layer.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def weight(self) -> Tensor:
        """[O, I], as near as it comes."""
        numbers: Any = self.numbers
        scales: Any = self.scales
        whole = _unpacked(numbers, self.in_features) if self.bits == 4 else numbers
        grouped = whole.view(self.out_features, scales.shape[1], -1).to(scales.dtype) * scales[:, :, None]
        weight: Tensor = grouped.view(self.out_features, self.in_features)
        return weight


def group_width(inputs: int, bits: Bits) -> int:
    """The widest group that divides the inputs; the whole row where only narrow ones do."""
    width = math.gcd(inputs, GROUP[bits])
    return width if width >= SMALLEST_GROUP else inputs


def quantize(weight_OI: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Whole numbers [O, I] (int8) and scales [O, G] of the weight's own type. No weight is off by more than half a
    scale, which is (largest magnitude of its group) / (2 ** (bits - 1) - 1)."""
    outputs, inputs = weight_OI.shape
    width = group_width(inputs, bits)
    grouped = weight_OI.float().view(outputs, inputs // width, width)
    scales_OG = (grouped.abs().amax(dim=2) / LEVELS[bits]).clamp_min(torch.finfo(torch.float32).tiny)
    scales_OG = scales_OG.to(weight_OI.dtype)
    numbers = (grouped / scales_OG.float()[:, :, None]).round().clamp_(-LEVELS[bits], LEVELS[bits])
    return numbers.to(torch.int8).view(outputs, inputs), scales_OG


def _packed(numbers_OI: Tensor) -> Tensor:
    """Two numbers of -7 to 7 in a byte; an odd one is filled up."""
    even = F.pad(numbers_OI, (0, numbers_OI.shape[1] % 2)) + 8
    return (even[:, ::2] | (even[:, 1::2] << 4)).to(torch.uint8)


def _unpacked(packed: Tensor, inputs: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1)
    return both[:, :inputs].to(torch.int8) - 8


def quantize_model(
    model: nn.Module, bits: Bits, make: Callable[[nn.Linear, Bits], nn.Module] = QuantizedLinear
) -> None:
    """Exchange every linear layer but the head, in place."""
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name in linears:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if leaf != "lm_head" and not isinstance(parent, LoraLinear):
            setattr(parent, leaf, make(getattr(parent, leaf), bits))


def model_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, each counted once."""
    tensors = {id(part): part for each in (*model.parameters(), *model.buffers()) for part in _parts(each)}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _parts(tensor: Any) -> Iterator[Tensor]:
    """What a tensor is made of: one of a type of its own, as torchao's are, tells the shape and type it stands for."""
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if type(inner) is not Tensor and hasattr(inner, "__tensor_flatten__"):
        for name in inner.__tensor_flatten__()[0]:
            yield from _parts(getattr(inner, name))
    else:
        yield tensor
