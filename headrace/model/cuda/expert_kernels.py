"""Triton kernels around the grouped products of experts: the weighted gate each way, and the sum of a token's rows.

Shape letters: T tokens, K experts of a token, N rows, D width, I inner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a row that a program holds at a time


def add_rows(x_ND: Tensor, place_N: Tensor, top_k: int) -> Tensor:
    """Add up rows place[t K] to place[t K + K - 1] for every token t."""
    tokens, width = len(place_N) // top_k, x_ND.shape[1]
    out_TD = x_ND.new_empty(tokens, width)
    block = min(BLOCK, triton.next_power_of_2(width))
    if tokens:
        _add_rows_kernel[(tokens, triton.cdiv(width, block))](
            x_ND, place_N, out_TD, width, K=top_k, BLOCK=block, num_warps=4
        )
    return out_TD


def gated_silu(both_NI: Tensor, weights_N: Tensor) -> Tensor:
    """Compute silu(gate) * up * weight of rows with gate and up side by side."""
    rows, inner = both_NI.shape[0], both_NI.shape[1] // 2
    out_NI = both_NI.new_empty(rows, inner)
    block = min(BLOCK, triton.next_power_of_2(inner))
    if rows:
        _gated_silu_kernel[(rows, triton.cdiv(inner, block))](
            both_NI, weights_N, out_NI, inner, BLOCK=block, num_warps=4
        )
    return out_NI


def gated_silu_backward(both_NI: Tensor, weights_N: Tensor, grad_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gated_silu`'s rows and weights."""
    rows, inner = grad_NI.shape
    grad_both, grad_weights = torch.empty_like(both_NI), torch.empty_like(weights_N)
    block = min(BLOCK, triton.next_power_of_2(inner))
    if rows:
        _gated_silu_backward_kernel[(rows,)](
            both_NI, weights_N, grad_NI, grad_both, grad_weights, inner, BLOCK=block, num_warps=4
        )
    return grad_both, grad_weights


@triton.jit  # type: ignore[untyped-decorator]
def _add_rows_kernel(x, place, out, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k).to(tl.int64)
        total += tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_silu_kernel(both, weights, out, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    weight = tl.load(weights + row)
    gate = tl.load(both + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up * weight
    tl.store(out + row * inner + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_silu_backward_kernel(  # type: ignore[no-untyped-def]
    both, weights, grad, grad_both, grad_weights, inner, BLOCK: tl.constexpr
):
    """Compute dup = g w silu(x), dgate = g w up (sigma + silu(x) (1 - sigma)) and dw = sum g silu(x) up, x the gate."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    dtype = grad_both.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < inner
        gate_place = row * 2 * inner + column
        x = tl.load(both + gate_place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + gate_place + inner, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * inner + column, mask=inside, other=0.0).to(tl.float32)
        sigma = tl.sigmoid(x)
        silu = x * sigma
        total += g * silu * up
        scaled = g * weight
        tl.store(grad_both + gate_place, (scaled * up * (sigma + silu * (1.0 - sigma))).to(dtype), mask=inside)
        tl.store(grad_both + gate_place + inner, (scaled * silu).to(dtype), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, 0))
