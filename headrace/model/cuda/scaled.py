"""Gradients as float16 numbers and back: times a power of two, which a kernel reads off their largest number.

float16 has the bits for a gradient but not the range. With the largest number between 8 and 16, attention's backward
pass has 12 powers of two of room for what it adds up, and 18 below for what it multiplies with small shares: with a
largest number of 2^-6, shares of a thousand keys and gradients of a tenth of it, products lost half of their bits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def to_float16(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The scaled gradient, and the peak that its scale comes from."""
    peak = torch.linalg.vector_norm(gradient, math.inf, dtype=torch.float32)
    return _scaled(gradient, peak, torch.float16, 1), peak


def from_float16(gradient: Tensor, peak: Tensor, dtype: torch.dtype) -> Tensor:
    """What was computed from the scaled gradient, without the scale."""
    return _scaled(gradient, peak, dtype, -1)


def _scaled(numbers: Tensor, peak: Tensor, dtype: torch.dtype, direction: int) -> Tensor:
    numbers = numbers.contiguous()
    out = torch.empty_like(numbers, dtype=dtype)
    if size := numbers.numel():
        _scale_kernel[(triton.cdiv(size, BLOCK),)](numbers, peak, out, size, DIRECTION=direction, BLOCK=BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(numbers, peak, out, size, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Times 2^(3 - e), or its inverse, with 2^e the power of two in the peak."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    exponent = tl.maximum(((tl.load(peak).to(tl.int32, bitcast=True) >> 23) & 255) - 127, -123)
    factor = ((DIRECTION * (3 - exponent) + 127) << 23).to(tl.float32, bitcast=True)
    found = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)
