"""Quantise weights to eight or four bits, for models that only score: less memory, at some error in every log-prob.

torchao and bitsandbytes quantise while transformers loads a model: `package_config` makes the `quantization_config` of
`from_pretrained`. `QuantizedLinear` is plain torch and runs wherever torch does, no faster than full weights: each row
of a weight is cut into groups, a group is integers times one scale, and the weight is computed anew for each product,
so one layer's weight is in memory at a time. Embedding and head keep their precision: errors show most there.

Shape letters: O outputs, I inputs, G groups of a row, W inputs of a group.
"""

import importlib.util
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from headrace.errors import ModelError
from headrace.model.lora import LoraLinear

Bits = Literal[8, 4]
Package = Literal["torchao", "bitsandbytes"]
Quantizer = Literal["torchao", "bitsandbytes", "plain"]
PACKAGES: tuple[Package, ...] = ("torchao", "bitsandbytes")
# where "auto" looks, in this order; with eight bits bitsandbytes rounds activations too, and plain torch is more exact
AUTO: dict[Bits, tuple[Package, ...]] = {8: ("torchao",), 4: ("torchao", "bitsandbytes")}
GROUP = {8: 128, 4: 32}  # inputs that share a scale, at most
SMALLEST_GROUP = 16
LEVELS = {8: 127, 4: 7}
HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    bits: Bits
    quantizer: Quantizer | Literal["auto"] = "auto"  # "auto": the first installed package that can, else plain torch


def choose_quantizer(quantization: Quantization, *, device: torch.device, dtype: torch.dtype) -> Quantizer:
    """Choose the package that quantises a model on this device and in this dtype, or plain torch.

    Raises ModelError when a package that the settings name is not installed, or cannot.
    """
    if quantization.quantizer == "plain":
        return "plain"
    for package in AUTO[quantization.bits] if quantization.quantizer == "auto" else (quantization.quantizer,):
        problem = _problem(package, quantization.bits, device=device, dtype=dtype)
        if problem is None:
            return package
        if quantization.quantizer != "auto":
            raise ModelError(f"{package} cannot keep {quantization.bits}-bit weights: {problem}")
    return "plain"


def _problem(package: Package, bits: Bits, *, device: torch.device, dtype: torch.dtype) -> str | None:
    if not _is_installed(package):
        return f"it is not installed: pip install 'headrace[{package}]'"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    if package == "torchao" and bits == 4 and device.type == "cuda":
        dtypes = (torch.bfloat16,)  # all that its kernel multiplies with
    if device.type not in ("cpu", "cuda") or dtype not in dtypes:
        return f"it does not work on {device.type} in {str(dtype).removeprefix('torch.')}"
    return None


def _is_installed(package: Package) -> bool:
    return sys.modules.get(package, package) is not None and importlib.util.find_spec(package) is not None


def package_config(package: Package, bits: Bits, *, device: torch.device, dtype: torch.dtype, config: Any) -> Any:
    """Make the `quantization_config` with which transformers loads a model of `config`.

    The head and the layers whose shape the package does not take are left as they are.
    """
    if package == "bitsandbytes":
        # its 8-bit product warns at every call that it rounds activations
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        # NF4: 64 inputs share a scale; a CPU's kernel computes 32 outputs at a time
        misfits = _misfits(config, inputs=64, outputs=32 if device.type == "cpu" else 1) if bits == 4 else []
        return BitsAndBytesConfig(
            load_in_8bit=bits == 8,
            load_in_4bit=bits == 4,
            llm_int8_skip_modules=[HEAD, *misfits],
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
        )
    from torchao import quantization

    if bits == 8:
        return TorchAoConfig(
            quantization.Int8WeightOnlyConfig(set_inductor_config=False), modules_to_not_convert=[HEAD]
        )
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        four_bits = PrototypeInt4WeightOnlyConfig(group_size=GROUP[4], set_inductor_config=False)
        misfits = _misfits(config, inputs=GROUP[4], outputs=16)
    else:
        four_bits = quantization.Int4WeightOnlyConfig(
            group_size=GROUP[4], int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
        misfits = _misfits(config, inputs=1024, outputs=16)  # other inputs are padded, which costs what four bits save
    return TorchAoConfig(four_bits, modules_to_not_convert=[HEAD, *misfits])


def _misfits(config: Any, *, inputs: int, outputs: int = 1) -> list[str]:
    """Name the linear layers whose inputs or outputs are no multiple of these."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linears = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return [name for name, layer in linears if layer.in_features % inputs or layer.out_features % outputs]


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is kept as integers and scales; four-bit integers lie two in a byte."""

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
        """Compute the weight [O, I] from integers and scales."""
        numbers: Any = self.numbers
        scales: Any = self.scales
        whole = _unpacked(numbers, self.in_features) if self.bits == 4 else numbers
        grouped = whole.view(self.out_features, scales.shape[1], -1).to(scales.dtype) * scales[:, :, None]
        weight: Tensor = grouped.view(self.out_features, self.in_features)
        return weight


def group_width(inputs: int, bits: Bits) -> int:
    """Return the widest group that divides the inputs, or the whole row where only narrow ones do."""
    width = math.gcd(inputs, GROUP[bits])
    return width if width >= SMALLEST_GROUP else inputs


def quantize(weight_OI: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return integers [O, I] (int8) and scales [O, G] in the weight's dtype. No weight is off by more than half a
    scale, which is (largest magnitude of its group) / (2 ** (bits - 1) - 1)."""
    outputs, inputs = weight_OI.shape
    width = group_width(inputs, bits)
    grouped = weight_OI.float().view(outputs, inputs // width, width)
    scales_OG = (grouped.abs().amax(dim=2) / LEVELS[bits]).clamp_min(torch.finfo(torch.float32).tiny)
    scales_OG = scales_OG.to(weight_OI.dtype)
    numbers = (grouped / scales_OG.float()[:, :, None]).round().clamp_(-LEVELS[bits], LEVELS[bits])
    return numbers.to(torch.int8).view(outputs, inputs), scales_OG


def _packed(numbers_OI: Tensor) -> Tensor:
    """Put two integers of -7 to 7 in a byte; a row of odd length is padded."""
    even = F.pad(numbers_OI, (0, numbers_OI.shape[1] % 2)) + 8
    return (even[:, ::2] | (even[:, 1::2] << 4)).to(torch.uint8)


def _unpacked(packed: Tensor, inputs: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1)
    return both[:, :inputs].to(torch.int8) - 8


def quantize_model(model: nn.Module, bits: Bits) -> int:
    """Quantise every linear layer but the head and those that a package quantised, in place; return how many."""
    linears = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and has_plain_weight(layer)
    ]
    exchanged = 0
    for name in linears:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if leaf != HEAD and not isinstance(parent, LoraLinear):
            setattr(parent, leaf, QuantizedLinear(getattr(parent, leaf), bits))
            exchanged += 1
    return exchanged


def has_plain_weight(layer: nn.Linear) -> bool:
    """Tell whether the weight is an ordinary parameter, not a package's quantised tensor."""
    return type(layer.weight) is nn.Parameter


def model_bytes(model: nn.Module) -> int:
    """Add up the bytes of parameters and buffers, each counted once."""
    stored = {id(part): part for tensor in (*model.parameters(), *model.buffers()) for part in _parts(tensor)}
    return sum(part.numel() * part.element_size() for part in stored.values())


def _parts(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the data: torchao's tensor reports the shape and dtype that it stands for, and
    bitsandbytes' keeps its scales beside it."""
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if type(inner) is not Tensor and hasattr(inner, "__tensor_flatten__"):
        for name in inner.__tensor_flatten__()[0]:
            yield from _parts(getattr(inner, name))
    else:
        yield tensor
        if (state := getattr(tensor, "quant_state", None)) is not None:
            yield state.absmax
