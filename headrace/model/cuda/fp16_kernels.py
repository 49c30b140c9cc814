"""Casts between half-precision types, and gradients scaled into float16's range and back.

torch's own cast between the two types reads and writes numbers one at a time, at a quarter of the bandwidth.

float16 has the bits for a gradient but not the range. The sums of attention's backward pass must stay below 65,504, and
the factors that it multiplies with the shares of thousands of keys should not fall below 6e-5, where bits are lost. So
a gradient is multiplied by a power of two, which a kernel reads off its largest number: the largest number becomes as
large as the number of terms in a sum allows, and at most 16.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `numbers.to(dtype)`, contiguous."""
    numbers = numbers.contiguous()
    out = torch.empty_like(numbers, dtype=dtype)
    if size := numbers.numel():
        _cast_kernel[(triton.cdiv(size, BLOCK),)](numbers, out, size, BLOCK=BLOCK, num_warps=8)
    return out


@dataclass(frozen=True, slots=True)
class GradientScale:
    """A power of two for a gradient, which brings its largest number below 2^(top + 1)."""

    peak: Tensor
    top: int

    @staticmethod
    def of(gradient: Tensor, terms: int) -> "GradientScale":
        """Choose the scale for sums of `terms` numbers of the gradient, each times 1 at most."""
        peak = torch.linalg.vector_norm(gradient, math.inf, dtype=torch.float32)
        return GradientScale(peak, min(3, 14 - math.ceil(math.log2(max(terms, 1)))))

    def to_float16(self, gradient: Tensor) -> Tensor:
        return self._times(gradient, torch.float16, 1)

    def from_float16(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide a result that was computed from the scaled gradient by the scale."""
        return self._times(result, dtype, -1)

    def _times(self, numbers: Tensor, dtype: torch.dtype, direction: int) -> Tensor:
        numbers = numbers.contiguous()
        out = torch.empty_like(numbers, dtype=dtype)
        if size := numbers.numel():
            grid = (triton.cdiv(size, BLOCK),)
            _scale_kernel[grid](numbers, self.peak, out, size, self.top, DIRECTION=direction, BLOCK=BLOCK)
        return out


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(numbers, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    number = tl.load(numbers + place, mask=inside, other=0.0)
    tl.store(out + place, number.to(tl.float32).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(numbers, peak, out, size, top, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply by 2^(top - e), or by its inverse, with 2^e the power of two in the peak."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    exponent = tl.maximum(((tl.load(peak).to(tl.int32, bitcast=True) >> 23) & 255) - 127, -100)
    factor = ((DIRECTION * (top - exponent) + 127) << 23).to(tl.float32, bitcast=True)
    scaled = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=inside)
