"""AdamW on CUDA: one kernel over all parameters that reads and writes everything once, and kernels that compute the
norm of the gradient and add up the gradients of micro-batches.

The formula and the state are those of torch's AdamW (`train/optimizer.py` chooses between them). The kernel also clips,
and copies a float32 master into the half-precision weight. Gradients may be float32 or the half precision of the
backward pass, which spares a float32 copy of them when a step has one micro-batch.

Kernels find their tensors in a table of addresses, one row for each parameter. Letters: P programs, N parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.model.device import to_device
from headrace.types import Adam

CHUNK, BLOCK = 8192, 2048  # elements of one program, and of one round of it
ALIGNED_BYTES = 16
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The tensors of one parameter."""

    master: Tensor
    moment: Tensor
    square: Tensor
    half: Tensor | None  # the module's own weight, when the master is a copy of it


class CudaAdamW:
    """Owns the addresses of some parameters' tensors, which must not move; gradients come with every update."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._device = slots[0].master.device
        columns = [(slot.master, slot.moment, slot.square, slot.half) for slot in slots]
        self._fixed = [[0 if tensor is None else _address_of(tensor) for tensor in row] for row in columns]
        self._sizes = [slot.master.numel() for slot in slots]

    def update(self, gradients: Sequence[Tensor], adam: Adam, *, step: int, factor: float) -> None:
        """Make update number `step` (from 1), every gradient times `factor`. Decoupled decay, eps outside the root."""
        assert step > 0
        correction1, correction2 = 1.0 - adam.beta1**step, 1.0 - adam.beta2**step
        by_type: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
        for index, (slot, gradient) in enumerate(zip(self._slots, gradients, strict=True)):
            by_type.setdefault((gradient.dtype, None if slot.half is None else slot.half.dtype), []).append(index)
        for (dtype, half), group in by_type.items():
            work = _work(tuple(self._sizes[index] for index in group), self._device)
            table = [[*self._fixed[index], _address_of(gradients[index])] for index in group]
            _adamw_kernel[(len(work.owner_P),)](
                to_device(torch.tensor(table), self._device), work.sizes_N, work.owner_P, work.part_P,
                factor, 1.0 - adam.learning_rate * adam.weight_decay, adam.learning_rate / correction1,
                adam.beta1, adam.beta2, adam.eps, correction2**0.5,
                GRADIENT=TYPES[dtype], HALF=None if half is None else TYPES[half],
                EVEN=work.even, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Add up the squares of all elements in float32, in an order that does not change from call to call."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    totals = []
    for dtype, group in by_type.items():
        work = _work(tuple(tensor.numel() for tensor in group), group[0].device)
        sums_P = torch.empty(len(work.owner_P), dtype=torch.float32, device=group[0].device)
        table = to_device(torch.tensor([[_address_of(tensor)] for tensor in group]), group[0].device)
        _square_kernel[(len(sums_P),)](
            table, work.sizes_N, work.owner_P, work.part_P,
            sums_P, TYPE=TYPES[dtype], EVEN=work.even, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        totals.append(sums_P.sum())
    return torch.stack(totals).sum()


def add_up(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Add each gradient to its sum in float32, in place where the sum is float32 already; return the new sums."""
    by_type: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (so_far, gradient) in enumerate(zip(sums, gradients, strict=True)):
        by_type.setdefault((so_far.dtype, gradient.dtype), []).append(index)
    results = [
        so_far if so_far.dtype == torch.float32 else torch.empty_like(so_far, dtype=torch.float32) for so_far in sums
    ]
    for (sum_type, dtype), group in by_type.items():
        work = _work(tuple(sums[index].numel() for index in group), sums[0].device)
        table = [[_address_of(tensors[index]) for tensors in (sums, gradients, results)] for index in group]
        _add_kernel[(len(work.owner_P),)](
            to_device(torch.tensor(table), sums[0].device), work.sizes_N, work.owner_P, work.part_P,
            SUM=TYPES[sum_type], GRADIENT=TYPES[dtype], EVEN=work.even, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The division of work: program p computes part `part_P[p]` of parameter `owner_P[p]`."""

    owner_P: Tensor
    part_P: Tensor
    sizes_N: Tensor
    even: bool  # every size is a multiple of sixteen


@lru_cache(maxsize=16)
def _work(sizes: tuple[int, ...], device: torch.device) -> _Work:
    parts_N = torch.tensor([-(-size // CHUNK) for size in sizes])
    owner_P = torch.repeat_interleave(torch.arange(len(sizes)), parts_N)
    first_N = torch.cumsum(parts_N, 0) - parts_N
    part_P = torch.arange(len(owner_P)) - first_N[owner_P]
    return _Work(
        owner_P=owner_P.int().to(device),
        part_P=part_P.int().to(device),
        sizes_N=torch.tensor(sizes).to(device),
        even=all(size % 16 == 0 for size in sizes),
    )


def _address_of(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    assert tensor.is_contiguous()
    assert address % ALIGNED_BYTES == 0, "parameters begin at their allocation"
    return address


@triton.jit  # type: ignore[untyped-decorator]
def _address(table, place, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(table + place).to(tl.pointer_type(TYPE)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _square_kernel(  # type: ignore[no-untyped-def]
    table, sizes, owner, part, sums, TYPE: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    index = tl.load(owner + program)
    size = tl.load(sizes + index)
    if EVEN:  # sixteen elements are then inside or outside together, and load as one
        size = tl.multiple_of(size, 16)
    values = _address(table, index, TYPE)
    first = tl.load(part + program).to(tl.int64) * CHUNK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.static_range(0, CHUNK, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums + program, tl.sum(total, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    table, sizes, owner, part,
    SUM: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(owner + program)
    size = tl.load(sizes + index)
    if EVEN:
        size = tl.multiple_of(size, 16)
    sums = _address(table, index * 3, SUM)
    gradients = _address(table, index * 3 + 1, GRADIENT)
    results = _address(table, index * 3 + 2, tl.float32)
    first = tl.load(part + program).to(tl.int64) * CHUNK
    for start in tl.static_range(0, CHUNK, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        inside = place < size
        total = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(results + place, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    table, sizes, owner, part, factor, keep, rate, beta1, beta2, eps, root2,
    GRADIENT: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(owner + program)
    size = tl.load(sizes + index)
    if EVEN:  # sixteen elements are then inside or outside together, and load as one
        size = tl.multiple_of(size, 16)
    masters = _address(table, index * 5, tl.float32)
    moments = _address(table, index * 5 + 1, tl.float32)
    squares = _address(table, index * 5 + 2, tl.float32)
    gradients = _address(table, index * 5 + 4, GRADIENT)
    first = tl.load(part + program).to(tl.int64) * CHUNK
    for start in tl.static_range(0, CHUNK, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        inside = place < size
        g = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(moments + place, mask=inside, other=0.0)
        v = tl.load(squares + place, mask=inside, other=0.0)
        w = tl.load(masters + place, mask=inside, other=0.0)
        m = m + (1.0 - beta1) * (g - m)
        v = v * beta2 + (1.0 - beta2) * g * g
        w = w * keep - rate * m / (tl.sqrt(v) / root2 + eps)
        tl.store(moments + place, m, mask=inside)
        tl.store(squares + place, v, mask=inside)
        tl.store(masters + place, w, mask=inside)
        if HALF is not None:
            tl.store(_address(table, index * 5 + 3, HALF) + place, w.to(HALF), mask=inside)
