"""Gather the keys and values that each segment sees, end to end, and add their gradients up in one kernel.

A token that several segments see (a prompt that a group shares) is copied for each of them; its gradient is the sum
over the copies, in float32 and in their order, so it has the same bits in every run.

Shape letters: T packed tokens, S gathered tokens (one for each segment that sees a token), H heads, D width of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_rows(
    key_THD: Tensor, value_THD: Tensor, rows_S: Tensor, uses_S: Tensor, use_ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return key[rows] and value[rows]. Token t is at the places uses[use_ends[t] : use_ends[t + 1]] of the rows."""
    keys, values = _Gather.apply(key_THD, value_THD, rows_S, uses_S, use_ends)  # type: ignore[no-untyped-call]
    return keys, values


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key_THD: Tensor, value_THD: Tensor, rows_S: Tensor, uses_S: Tensor, use_ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(uses_S, use_ends)
        return key_THD.index_select(0, rows_S), value_THD.index_select(0, rows_S)

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> Any:
        uses_S, use_ends = ctx.saved_tensors
        tokens, shape = len(use_ends) - 1, grad_key.shape[1:]
        sum_key, sum_value = (
            torch.empty(tokens, *shape, dtype=g.dtype, device=g.device) for g in (grad_key, grad_value)
        )
        width = shape.numel()
        _add_kernel[(tokens,)](
            grad_key.contiguous(), grad_value.contiguous(), uses_S, use_ends, sum_key, sum_value, width,
            BLOCK=triton.next_power_of_2(width), num_warps=1 if width <= 512 else 4,
        )  # fmt: skip
        return sum_key, sum_value, None, None, None


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(grad_key, grad_value, uses, ends, key, value, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    keys = tl.zeros((BLOCK,), dtype=tl.float32)
    values = tl.zeros((BLOCK,), dtype=tl.float32)
    for use in range(tl.load(ends + token), tl.load(ends + token + 1)):
        place = tl.load(uses + use).to(tl.int64) * width + column
        keys += tl.load(grad_key + place, mask=inside, other=0.0).to(tl.float32)
        values += tl.load(grad_value + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(key + token * width + column, keys.to(key.dtype.element_ty), mask=inside)
    tl.store(value + token * width + column, values.to(value.dtype.element_ty), mask=inside)
