"""RMS norms of narrow rows, as of the heads of queries and keys: several rows in one program.

With a program for each row of 128 numbers most of the time would go into starting programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = 256  # widest row that is narrow
TILE = 2048  # numbers that a program has at a time
STRIPS = 1056  # programs of the backward pass, eight for each multiprocessor of an H100 or H200


def norm(x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor, copy_TD: Tensor | None, scale_T: Tensor) -> None:
    """Write the norm of each row, its copy in another type, and 1 / root mean square."""
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    tile = TILE // block
    _norm_kernel[(triton.cdiv(rows, tile),)](
        x_TD, weight_D, out_TD, copy_TD, scale_T, rows, width, eps, COPY=copy_TD is not None, ROWS=tile, BLOCK=block
    )


def norm_backward(x_TD: Tensor, weight_D: Tensor, scale_T: Tensor, grad_TD: Tensor, grad_x_TD: Tensor) -> Tensor:
    """Write the gradient of the rows, and return that of the weight as [programs, D] to be added up."""
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    tile = TILE // block
    tiles = triton.cdiv(rows, tile)
    strips = min(STRIPS, tiles)
    partial_SD = torch.empty(strips, width, dtype=torch.float32, device=x_TD.device)
    _norm_backward_kernel[(strips,)](
        x_TD, weight_D, scale_T, grad_TD, grad_x_TD, partial_SD, rows, width, triton.cdiv(tiles, strips),
        ROWS=tile, BLOCK=block,
    )  # fmt: skip
    return partial_SD


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, copy, scales, rows, width, eps, COPY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(scales + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = value * scale[:, None] * w[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + place, normed.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, grad_x, partial, rows, width, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute dx = s (w g - n mean(w g n)) and dw = sum g n, with n = x s. Each program owns `tiles` tiles."""
    strip = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for step in range(0, tiles):
        row = (strip * tiles + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        n = value * scale
        total += g * n
        wg = w[None, :] * g
        mean = tl.sum(wg * n, axis=1) / width
        dx = scale * (wg - n * mean[:, None])
        tl.store(grad_x + place, dx.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial + strip * width + column, tl.sum(total, axis=0), mask=column < width)
