"""Triton kernels of delta nets and Mamba-2: states from chunk to chunk each way, inverses of triangles, and slots.

Over packed sequences the work inside chunks is batched products; only states go from chunk to chunk, and with them
what a chunk really adds: new_n = own_n - reads_n S_n, S_{n+1} = a_n S_n + keys_n^T new_n. A program follows the chunks
of one segment for one head and some columns of the state, which do not mix. Its state begins with the last one of the
segment's parent, so segments are computed level by level of the tree, and backwards for gradients.

Over slots a program follows the tokens of one run, one by one.

Shape letters: N chunks, H heads, C places of a chunk, K width of keys, V width of values, S segments, T tokens, R runs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.model.hybrid.layout import Chains, SlotRuns

COLUMNS = 32  # of the state that a program holds
SMALLEST = 16  # side of a product


def supports(keys: int, values: int, size: int) -> bool:
    """Tell whether the kernels compute states of this shape in chunks of this size."""
    powers = all(width >= SMALLEST and width & (width - 1) == 0 for width in (keys, values, size))
    return powers and keys <= 128 and size <= 64  # tiles of both fit into a processor's shared memory


def chain_states(
    own_NHCV: Tensor, reads_NHCK: Tensor, keys_NHCK: Tensor, decay_NH: Tensor, chains: Chains
) -> tuple[Tensor, Tensor]:
    """Return the state [N, H, K, V] before each chunk and what each adds [N, H, C, V], differentiable."""
    states, new = _ChainStates.apply(own_NHCV, reads_NHCK, keys_NHCK, decay_NH, chains)  # type: ignore[no-untyped-call]
    return states, new


class _ChainStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, reads: Tensor, keys: Tensor, decay: Tensor, chains: Chains) -> Any:
        own, reads, keys, decay = (tensor.contiguous() for tensor in (own, reads, keys, decay))
        chunks, heads, size, values = own.shape
        width = keys.shape[-1]
        states, new = own.new_empty(chunks, heads, width, values), torch.empty_like(own)
        last = own.new_empty(chains.segments, heads, width, values)
        columns = min(COLUMNS, values)
        for level in chains.levels:
            _forward_kernel[(len(level), heads, values // columns)](
                own, reads, keys, decay, states, new, last, level, chains.parents_S, chains.begins_S, chains.counts_S,
                chains.ids_N, heads, C=size, K=width, V=values, BV=columns, num_warps=4, num_stages=2,
            )  # fmt: skip
        ctx.save_for_backward(reads, keys, decay, states, new)
        ctx.chains = chains
        return states, new

    @staticmethod
    def backward(ctx: Any, grad_states: Tensor, grad_new: Tensor) -> Any:
        reads, keys, decay, states, new = ctx.saved_tensors
        chains: Chains = ctx.chains
        _, heads, size, values = new.shape
        width = keys.shape[-1]
        after, total = torch.empty_like(states), torch.empty_like(new)
        first = states.new_empty(chains.segments, heads, width, values)
        columns = min(COLUMNS, values)
        for level in reversed(chains.levels):
            _backward_kernel[(len(level), heads, values // columns)](
                reads, keys, decay, grad_states.contiguous(), grad_new.contiguous(), after, total, first, level,
                chains.child_ends_S, chains.children, chains.begins_S, chains.counts_S, chains.ids_N, heads,
                C=size, K=width, V=values, BV=columns, num_warps=4, num_stages=2,
            )  # fmt: skip
        grad_reads = -_multiply(total, states.transpose(-1, -2))
        grad_keys = _multiply(new, after.transpose(-1, -2))
        return total, grad_reads, grad_keys, (states * after).sum(dim=(-1, -2)), None


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices [..., M, K] and [..., K, N] of float32 numbers in the matrix units, differentiable.

    All sizes are powers of two. Three products of 11 bits make one of almost all bits; with one alone, gradients of
    Qwen3.5 were twice as far from float32 as transformers' in bfloat16.
    """
    result: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_a = _multiply(grad, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        return grad_a, _multiply(a.transpose(-1, -2), grad) if ctx.needs_input_grad[1] else None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    out = a.new_empty(*a.shape[:-1], columns)
    x, y = a.reshape(-1, rows, inner), b.reshape(-1, inner, columns)
    block = min(2 * COLUMNS, columns)
    _product_kernel[(len(x), columns // block)](
        x, y, out, *x.stride(), *y.stride(), M=rows, K=inner, N=columns, BN=block, num_warps=8 if rows > 64 else 4
    )
    return out


def unit_inverse(lower_NHCC: Tensor) -> Tensor:
    """Compute (I + L)^-1 of the part L below the diagonal of each matrix, differentiable."""
    result: Tensor = _UnitInverse.apply(lower_NHCC)  # type: ignore[no-untyped-call]
    return result


class _UnitInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        lower = lower.contiguous()
        inverse = torch.empty_like(lower)
        size = lower.shape[-1]
        _inverse_kernel[(lower.numel() // size**2,)](lower, inverse, C=size, num_warps=4)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -_multiply(_multiply(transposed, grad), transposed).tril_(-1)


def follow_slots(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor | None,
    states_BHKV: Tensor, runs: SlotRuns,
) -> Tensor:  # fmt: skip
    """Compute y [T, H, V] of an engine's step, and write the states of its slots. Rows outside of runs get zeros.

    With beta by the delta rule; without it a token adds its key and value to the state as they are, as in Mamba-2.
    """
    _, heads, width = key_THK.shape
    values = value_THV.shape[-1]
    out_THV = torch.zeros_like(value_THV)
    columns = min(2 * COLUMNS, triton.next_power_of_2(values))
    if len(runs.slots_R):
        query, key, value, decay = (x.contiguous() for x in (query_THK, key_THK, value_THV, decay_TH))
        beta = None if beta_TH is None else beta_TH.contiguous()
        _slots_kernel[(len(runs.slots_R), heads, triton.cdiv(values, columns))](
            query, key, value, decay, beta, states_BHKV, out_THV, runs.slots_R, runs.starts_R, runs.lengths_R,
            heads, width, values, DELTA=beta is not None, KP=triton.next_power_of_2(width), BV=columns, num_warps=4,
        )  # fmt: skip
    return out_THV


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    own, reads, keys, decay, states, new, last, level, parents, begins, counts, ids, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    segment = tl.load(level + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    place, width = tl.arange(0, C), tl.arange(0, K)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    state_spot = width[:, None] * V + column[None, :]
    value_spot = place[:, None] * V + column[None, :]
    key_spot = place[:, None] * K + width[None, :]
    parent = tl.load(parents + segment).to(tl.int64)
    known = (parent >= 0) & (state_spot >= 0)
    state = tl.load(last + (parent * heads + head) * K * V + state_spot, mask=known, other=0.0)
    begin = tl.load(begins + segment)
    count = tl.load(counts + segment)
    for number in range(0, count):
        at = tl.load(ids + begin + number).to(tl.int64) * heads + head
        tl.store(states + at * K * V + state_spot, state)
        read = tl.load(reads + at * C * K + key_spot)
        added = tl.load(own + at * C * V + value_spot) - tl.dot(read, state, input_precision="tf32x3")
        tl.store(new + at * C * V + value_spot, added)
        key = tl.load(keys + at * C * K + key_spot)
        state = state * tl.load(decay + at) + tl.dot(tl.trans(key), added, input_precision="tf32x3")
    tl.store(last + (segment * heads + head) * K * V + state_spot, state)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    reads, keys, decay, grad_states, grad_new, after, total, first, level, child_ends, children, begins, counts, ids,
    heads, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Follow a segment's chunks backwards: `after` is the gradient of the state behind each chunk, `total` that of what
    the chunk adds, `first` that of the state before the segment."""
    segment = tl.load(level + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    place, width = tl.arange(0, C), tl.arange(0, K)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    state_spot = width[:, None] * V + column[None, :]
    value_spot = place[:, None] * V + column[None, :]
    key_spot = place[:, None] * K + width[None, :]
    grad = tl.zeros((K, BV), dtype=tl.float32)
    for child in range(tl.load(child_ends + segment), tl.load(child_ends + segment + 1)):
        behind = tl.load(children + child).to(tl.int64)
        grad += tl.load(first + (behind * heads + head) * K * V + state_spot)
    begin = tl.load(begins + segment)
    count = tl.load(counts + segment)
    for number in range(0, count):
        at = tl.load(ids + begin + count - 1 - number).to(tl.int64) * heads + head
        tl.store(after + at * K * V + state_spot, grad)
        key = tl.load(keys + at * C * K + key_spot)
        added = tl.load(grad_new + at * C * V + value_spot) + tl.dot(key, grad, input_precision="tf32x3")
        tl.store(total + at * C * V + value_spot, added)
        read = tl.load(reads + at * C * K + key_spot)
        grad = grad * tl.load(decay + at) - tl.dot(tl.trans(read), added, input_precision="tf32x3")
        grad += tl.load(grad_states + at * K * V + state_spot)
    tl.store(first + (segment * heads + head) * K * V + state_spot, grad)


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    a, b, out, a_batch, a_row, a_inner, b_batch, b_inner, b_column,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    row, inner = tl.arange(0, M), tl.arange(0, K)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(a + batch * a_batch + row[:, None] * a_row + inner[None, :] * a_inner)
    y = tl.load(b + batch * b_batch + inner[:, None] * b_inner + column[None, :] * b_column)
    to = out + batch * M * N + row[:, None] * N + column[None, :]
    tl.store(to, tl.dot(x, y, input_precision="tf32x3"))


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_kernel(lower, inverse, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one inverse row by row: T_i = e_i - sum_{j < i} L_ij T_j."""
    spot = tl.program_id(0).to(tl.int64) * C * C
    row, column = tl.arange(0, C), tl.arange(0, C)
    places = spot + row[:, None] * C + column[None, :]
    below = row[:, None] > column[None, :]
    result = tl.where(row[:, None] == column[None, :], 1.0, 0.0)
    for i in range(1, C):
        weights = tl.load(lower + spot + i * C + row, mask=row < i, other=0.0)
        sums = tl.sum(weights[:, None] * result, 0)
        result = tl.where((row[:, None] == i) & below, -sums[None, :], result)
    tl.store(inverse + places, result)


@triton.jit  # type: ignore[untyped-decorator]
def _slots_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, states, out, slots, starts, lengths, heads, keys, values,
    DELTA: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + run)
    slot = tl.load(slots + run).to(tl.int64)
    start = tl.load(starts + run).to(tl.int64)
    width = tl.arange(0, KP)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    is_key, is_value = width < keys, column < values
    spot = states + ((slot * heads + head) * keys + width[:, None]) * values + column[None, :]
    inside = is_key[:, None] & is_value[None, :]
    if length > 0:
        state = tl.load(spot, mask=inside, other=0.0)
        for step in range(0, length):
            at = (start + step) * heads + head
            k = tl.load(key + at * keys + width, mask=is_key, other=0.0)
            q = tl.load(query + at * keys + width, mask=is_key, other=0.0)
            v = tl.load(value + at * values + column, mask=is_value, other=0.0)
            state = state * tl.exp(tl.load(decay + at))
            if DELTA:
                v = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + at)
            state += k[:, None] * v[None, :]
            tl.store(out + at * values + column, tl.sum(state * q[:, None], 0), mask=is_value)
        tl.store(spot, state, mask=inside)
