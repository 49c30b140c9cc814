"""Who keeps a frozen model's weights in few bits: torchao or bitsandbytes where they run and are right, or plain torch.

The packages are optional and run on some machines, precisions and numbers of bits only, and what runs may still be
wrong. So none is taken on trust: each is tried on a small layer whose product is known, and `auto` takes the first that
is near enough and small enough. All are weight-only; a layer whose shape a package does not take is a plain one.
"""

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.errors import ModelError, boundary
from headrace.model.quantized import Bits, QuantizedLinear, model_bytes, quantize_model

logger = logging.getLogger(__name__)

Quantizer = Literal["torchao", "bitsandbytes", "plain"]
Asked = Literal["auto", "torchao", "bitsandbytes", "plain"]
PREFERRED: tuple[Quantizer, ...] = ("torchao", "bitsandbytes")
FOUR_BIT_GROUP = {"torchao": 32, "bitsandbytes": 64}  # inputs that share a scale; others do not fit
CUDA_TILE = 1024  # inputs; torchao fills up to a multiple of it on a GPU, which takes what four bits save
OUTPUT_TILE = 16  # of torchao's four-bit kernels
# Of products of normal numbers. A group's largest of 32 to 1024 is 2 to 3.3 deviations, so rounding to half of 1/127 of
# it is 0.5 to 0.8 %, to half of 1/7 of it 8 to 10 %; bfloat16 adds 0.3 %.
LARGEST_ERROR = {8: 0.02, 4: 0.15}
LARGEST_SIZE = 1.6  # times the bits themselves: scales and zeros come on top
TRIED_OUTPUTS, TRIED_INPUTS, TRIED_ROWS = 128, 1024, 9

Make = Callable[[nn.Linear, Bits], nn.Module]


def quantize_by(model: nn.Module, bits: Bits, asked: Asked = "auto") -> Quantizer:
    """Exchange every linear layer but the head, in place, and say by whom: plain, if no layer fitted another.

    Raises ModelError when the one that was asked for is not installed, or is of no use here.
    """
    like = next(layer.weight for layer in model.modules() if isinstance(layer, nn.Linear))
    quantizer = choose(asked, bits, device=like.device, dtype=like.dtype)
    quantize_model(model, bits, maker(quantizer))
    kinds = [type(layer) for layer in model.modules() if isinstance(layer, KINDS)]
    plain = sum(kind is QuantizedLinear for kind in kinds)
    if quantizer == "plain" or plain == len(kinds):
        return "plain"
    if plain:
        logger.info("%d of %d layers have shapes that %s does not take: plain torch does", plain, len(kinds), quantizer)
    return quantizer


def choose(asked: Asked, bits: Bits, *, device: torch.device, dtype: torch.dtype) -> Quantizer:
    """The quantizer that was asked for, or the first of `PREFERRED` that is of use here, or the plain one."""
    if asked == "plain":
        return "plain"
    refused: list[str] = []
    for quantizer in PREFERRED if asked == "auto" else (asked,):
        try:
            try_out(maker(quantizer), bits, device=device, dtype=dtype)
        except ModelError as exc:
            refused.append(f"{quantizer}: {exc}")
        else:
            return quantizer
    if asked != "auto":
        raise ModelError(f"{bits}-bit weights cannot be kept by {refused[0]}")
    logger.info("%d-bit weights are kept by plain torch (%s)", bits, "; ".join(refused))
    return "plain"


def try_out(make: Make, bits: Bits, *, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelError when a small layer cannot be made or used, is off by too much, or takes too much memory."""
    layer, inputs, products = _known(device, dtype)
    numbers = layer.weight.numel()
    with boundary(ModelError, f"it does not work on {device.type} in {str(dtype).removeprefix('torch.')}"):
        with torch.no_grad():
            made = make(layer, bits)
            found = made(inputs).double()
    error = float((found - products).norm() / products.norm())
    if not error <= LARGEST_ERROR[bits]:  # NaN too
        raise ModelError(f"its products are off by {100 * error:.1f} % on {device.type}, which is too much")
    size = (model_bytes(made) - layer.out_features * dtype.itemsize) / (numbers * bits / 8)
    if size > LARGEST_SIZE:
        raise ModelError(f"a weight takes {bits * size:.0f} bits on {device.type} instead of {bits}")


def maker(quantizer: Quantizer) -> Make:
    match quantizer:
        case "plain":
            return QuantizedLinear
        case "torchao":
            return TorchaoLinear.of
        case "bitsandbytes":
            return _by_bitsandbytes
        case _:
            assert_never(quantizer)


class TorchaoLinear(nn.Module):
    """A layer whose weight is a tensor of torchao's, which has kernels of its own for the product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:  # not by the layer's own, which packs plain weights
        return F.linear(x, self.weight, self.bias)

    @staticmethod
    def of(layer: nn.Linear, bits: Bits) -> nn.Module:
        """`layer` itself is changed."""
        quantization = _package("torchao", "torchao.quantization")
        on_cpu = layer.weight.device.type == "cpu"
        width = FOUR_BIT_GROUP["torchao"] if on_cpu else CUDA_TILE
        if bits == 4 and (layer.in_features % width or layer.out_features % OUTPUT_TILE):
            return QuantizedLinear(layer, bits)
        if bits == 8:
            config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
        elif on_cpu:
            prototype = _package("torchao", "torchao.prototype.quantization.int4")
            config = prototype.PrototypeInt4WeightOnlyConfig(
                group_size=FOUR_BIT_GROUP["torchao"], set_inductor_config=False
            )
        else:
            config = quantization.Int4WeightOnlyConfig(
                group_size=FOUR_BIT_GROUP["torchao"],
                int4_packing_format="tile_packed_to_4d",
                set_inductor_config=False,
            )
        quantization.quantize_(nn.ModuleList([layer.requires_grad_(False)]), config)
        return TorchaoLinear(layer)


def _by_bitsandbytes(layer: nn.Linear, bits: Bits) -> nn.Module:
    if bits == 8:
        return BitsandbytesLinear8(layer)
    return (
        QuantizedLinear(layer, bits) if layer.in_features % FOUR_BIT_GROUP["bitsandbytes"] else NormalFloatLinear(layer)
    )


class BitsandbytesLinear8(nn.Module):
    """Whole numbers with one scale for each output. The package's own layer rounds activations too; this does not."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._functional = _package("bitsandbytes", "bitsandbytes.functional")
        numbers, scales, _ = self._functional.int8_vectorwise_quant(layer.weight.detach().half())
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self._functional.int8_vectorwise_dequant(self.numbers, self.scales)
        return F.linear(x, weight.to(x.dtype), self.bias)


class NormalFloatLinear(nn.Module):
    """NF4: sixteen levels placed as normal numbers lie, with one scale for every 64."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._package = _package("bitsandbytes", "bitsandbytes")
        packed, self._state = self._package.functional.quantize_4bit(
            layer.weight.detach().contiguous(), blocksize=FOUR_BIT_GROUP["bitsandbytes"], quant_type="nf4"
        )
        self.register_buffer("packed", packed)
        self.register_buffer("scales", self._state.absmax)  # told of here so that they are counted
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        packed: Any = self.packed
        product: Tensor = self._package.matmul_4bit(x, packed.t(), quant_state=self._state, bias=self.bias)
        return product


KINDS = (QuantizedLinear, TorchaoLinear, BitsandbytesLinear8, NormalFloatLinear)


def _package(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        if exc.name is not None and exc.name.split(".")[0] == name:
            raise ModelError(f"it is not installed: pip install 'headrace[{name}]'") from exc
        raise


def _known(device: torch.device, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer of normal numbers, inputs for it, and their products in float64."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(TRIED_INPUTS, TRIED_OUTPUTS, device=device, dtype=dtype)
    layer.weight.data.copy_(torch.randn(TRIED_OUTPUTS, TRIED_INPUTS, generator=generator))
    assert layer.bias is not None
    layer.bias.data.copy_(torch.randn(TRIED_OUTPUTS, generator=generator))
    inputs = torch.randn(1, TRIED_ROWS, TRIED_INPUTS, generator=generator).to(device, dtype)
    products = F.linear(inputs.double(), layer.weight.detach().double(), layer.bias.detach().double())
    return layer, inputs, products
