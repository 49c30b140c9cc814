"""Gradients as float16 numbers and back: times a power of two, which a kernel reads off their largest number.

float16 has the bits for a gradient but not the range. What attention's backward pass adds up has to stay below 65,504,
and what it multiplies with the shares of thousands of keys should not fall below 6e-5, where bits are lost: so the
largest number is as large as the number of terms in a sum allows, and at most 16.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Scale:
    """Of a gradient: its largest number goes below 2^(top + 1)."""

    peak: Tensor
    top: int

    @staticmethod
    def of(gradient: Tensor, terms: int) -> "Scale":
        """For sums of so many of its numbers, each times 1 at most."""
        peak = torch.linalg.vector_norm(gradient, math.inf, dtype=torch.float32)
        return Scale(peak, min(3, 14 - math.ceil(math.log2(max(terms, 1)))))

    def to_float16(self, gradient: Tensor) -> Tensor:
        return self._times(gradient, torch.float16, 1)

    def from_float16(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """What was computed from the scaled gradient, without the scale."""
        return self._times(result, dtype, -1)

    def _times(self, numbers: Tensor, dtype: torch.dtype, direction: int) -> Tensor:
        numbers = numbers.contiguous()
        out = torch.empty_like(numbers, dtype=dtype)
        if size := numbers.numel():
            grid = (triton.cdiv(size, BLOCK),)
            _scale_kernel[grid](numbers, self.peak, out, size, self.top, DIRECTION=direction, BLOCK=BLOCK)
        return out


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(numbers, peak, out, size, top, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Times 2^(top - e), or its inverse, with 2^e the power of two in the peak."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    exponent = tl.maximum(((tl.load(peak).to(tl.int32, bitcast=True) >> 23) & 255) - 127, -100)
    factor = ((DIRECTION * (top - exponent) + 127) << 23).to(tl.float32, bitcast=True)
    found = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)
