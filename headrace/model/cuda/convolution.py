"""Short causal convolutions on CUDA: one kernel each way over packed sequences, and one over the engine's slots.

Which token a tap sees comes from tables (`hybrid/layout.py`), so a sequence begins with what its parent has. Sums are
in float32 and in a fixed order.

Shape letters: T tokens, D channels, K taps, R runs, S strips of tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.model.cuda.reductions import add_strips, column_sums
from headrace.model.hybrid.layout import SlotRuns, TapUses

BLOCK = 256  # channels of a program
STRIPS = 128  # of the gradient of the weights


def convolve_packed(x_TD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, rows_TK: Tensor, uses: TapUses) -> Tensor:
    """Convolve packed sequences, differentiable; `uses` has the places of each token among `rows_TK`."""
    result: Tensor = _Convolve.apply(x_TD, weight_DK, bias_D, rows_TK, uses)  # type: ignore[no-untyped-call]
    return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, rows_TK: Tensor, uses: TapUses
    ) -> Tensor:
        x_TD, weight_KD = x_TD.contiguous(), weight_DK.t().contiguous()
        tokens, width = x_TD.shape
        out_TD = torch.empty_like(x_TD)
        _forward_kernel[(tokens, triton.cdiv(width, BLOCK))](
            x_TD, weight_KD, bias_D, rows_TK, out_TD, tokens, width,
            K=len(weight_KD), BIAS=bias_D is not None, BLOCK=BLOCK, num_warps=2,
        )  # fmt: skip
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, weight_KD, rows_TK)
        ctx.uses = uses
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        x_TD, weight_KD, rows_TK = ctx.saved_tensors
        grad_TD = grad_TD.contiguous()
        tokens, width = grad_TD.shape
        taps = len(weight_KD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(grad_TD)
            _input_kernel[(tokens, triton.cdiv(width, BLOCK))](
                grad_TD, weight_KD, ctx.uses.places, ctx.uses.ends_T, grad_x, width, taps, BLOCK=BLOCK, num_warps=2
            )
        if ctx.needs_input_grad[1]:
            strips = min(STRIPS, tokens)
            parts = torch.empty(strips, taps, width, dtype=torch.float32, device=grad_TD.device)
            _weight_kernel[(strips, triton.cdiv(width, BLOCK))](
                x_TD, grad_TD, rows_TK, parts, tokens, width, triton.cdiv(tokens, strips),
                K=taps, KP=triton.next_power_of_2(taps), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
            grad_weight = add_strips(parts.flatten(1), weight_KD.dtype).view(taps, width).t()
        return grad_x, grad_weight, column_sums(grad_TD) if ctx.needs_input_grad[2] else None, None, None


def convolve_slots(
    x_TD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, states_BKD: Tensor, runs: SlotRuns
) -> Tensor:
    """Convolve the rows of an engine's step after the last K - 1 inputs of their slots, which become the newest.

    Rows outside of runs get zeros.
    """
    out_TD, weight_KD = torch.zeros_like(x_TD), weight_DK.t().contiguous()
    width = x_TD.shape[1]
    if len(runs.slots_R):
        _slots_kernel[(len(runs.slots_R), triton.cdiv(width, BLOCK))](
            x_TD.contiguous(), weight_KD, bias_D, states_BKD, out_TD, runs.slots_R, runs.starts_R, runs.lengths_R,
            width, K=len(weight_KD), BIAS=bias_D is not None, BLOCK=BLOCK, num_warps=2,
        )  # fmt: skip
    return out_TD


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, rows, out, tokens, width, K: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + token * K + k).to(tl.int64)
        seen = tl.load(x + row * width + column, mask=inside & (row < tokens), other=0.0).to(tl.float32)
        total += seen * tl.load(weight + k * width + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _input_kernel(grad, weight, places, ends, out, width, taps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the gradients of all places at which a token is seen; place t K + k is tap k of token t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for use in range(tl.load(ends + token), tl.load(ends + token + 1)):
        place = tl.load(places + use).to(tl.int64)
        tap = place % taps
        g = tl.load(grad + (place // taps) * width + column, mask=inside, other=0.0).to(tl.float32)
        total += g * tl.load(weight + tap * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_kernel(  # type: ignore[no-untyped-def]
    x, grad, rows, parts, tokens, width, count, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr
):
    strip = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    tap = tl.arange(0, KP)
    total = tl.zeros((KP, BLOCK), dtype=tl.float32)
    for step in range(0, count):
        token = strip * count + step
        there = token < tokens
        g = tl.load(grad + token * width + column, mask=inside & there, other=0.0).to(tl.float32)
        row = tl.load(rows + token * K + tap, mask=(tap < K) & there, other=tokens).to(tl.int64)
        spot = x + row[:, None] * width + column[None, :]
        seen = tl.load(spot, mask=(row < tokens)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += seen * g[None, :]
    to = parts + (strip * K + tap[:, None]) * width + column[None, :]
    tl.store(to, total, mask=(tap < K)[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _slots_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, states, out, slots, starts, lengths, width,
    K: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    length = tl.load(lengths + run)
    start = tl.load(starts + run).to(tl.int64)
    state = states + tl.load(slots + run).to(tl.int64) * (K - 1) * width + column
    for step in range(0, length):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in tl.static_range(K):
            source = step - (K - 1) + k
            old = tl.load(state + (source + K - 1) * width, mask=inside & (source < 0), other=0.0).to(tl.float32)
            new = tl.load(x + (start + source) * width + column, mask=inside & (source >= 0), other=0.0).to(tl.float32)
            seen = (old + new).to(x.dtype.element_ty).to(tl.float32)
            total += seen * tl.load(weight + k * width + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + (start + step) * width + column, total.to(out.dtype.element_ty), mask=inside)
    if length > 0:
        for k in tl.static_range(K - 1):  # upwards: what is read lies behind what is written
            source = length - (K - 1) + k
            old = tl.load(state + (source + K - 1) * width, mask=inside & (source < 0), other=0.0).to(tl.float32)
            new = tl.load(x + (start + source) * width + column, mask=inside & (source >= 0), other=0.0).to(tl.float32)
            tl.store(state + k * width, (old + new).to(states.dtype.element_ty), mask=inside)
