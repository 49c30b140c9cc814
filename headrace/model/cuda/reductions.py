"""Add up over tokens, for the gradients of biases and norms: in float32, in an order that does not change.

Shape letters: T tokens, S strips of tokens, N numbers of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRIPS = 64
WIDE, ROWS = 128, 32  # the first kernel: numbers of a program, and tokens at a time
NARROW = 32  # the second kernel: numbers of a program


def column_sums(numbers_TN: Tensor) -> Tensor:
    """Return the sums over tokens, [N], in the type of the numbers."""
    tokens, width = numbers_TN.shape
    numbers_TN = numbers_TN.contiguous()
    strips = min(STRIPS, triton.cdiv(max(tokens, 1), ROWS))
    strips_SN = torch.empty(strips, width, dtype=torch.float32, device=numbers_TN.device)
    rounds = triton.cdiv(triton.cdiv(tokens, strips), ROWS)
    grid = (triton.cdiv(width, WIDE), strips)
    _strip_kernel[grid](numbers_TN, strips_SN, tokens, width, rounds, ROWS=ROWS, BLOCK=WIDE)
    return add_strips(strips_SN, numbers_TN.dtype)


def add_strips(strips_SN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the strips, [N]."""
    strips, width = strips_SN.shape
    out_N = torch.empty(width, dtype=dtype, device=strips_SN.device)
    _total_kernel[(triton.cdiv(width, NARROW),)](strips_SN, out_N, strips, width, ROWS=STRIPS, BLOCK=NARROW)
    return out_N


@triton.jit  # type: ignore[untyped-decorator]
def _strip_kernel(numbers, strips, tokens, width, rounds, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    strip = tl.program_id(1)
    inside = column < width
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for step in range(0, rounds):
        row = ((strip * rounds + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = (row < tokens)[:, None] & inside[None, :]
        total += tl.load(numbers + row[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(strips + strip * width + column, tl.sum(total, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _total_kernel(strips, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < count)[:, None] & inside[None, :]
        total += tl.load(strips + row[:, None] * width + column[None, :], mask=there, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=inside)
