"""The adapters that the CUDA decoder applies: their factors on the device, and launches that add them to products.

A graph reads factors through a table of addresses on the device, so adapters come and go without a new capture. Only
a table that has become too small, or an adapter of a larger rank than all before, makes captured graphs invalid
(`AdapterFactors.layout` changes then).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from headrace.infer.cuda import adapter_kernels
from headrace.infer.cuda.layer_weights import DecoderShape, DenseWeights
from headrace.infer.cuda.tiling import DECODE_BLOCK
from headrace.model.multi_lora import BASE, HEAD, Adapter, AdapterTable

CAPACITY = 256  # adapters; doubles when they are more
LEAST_RANK, MOST_TILE = 16, 64  # of a tile's ranks
SLICE, MOST_SLICES = 256, 16  # inputs of a slice of A x, and number of slices of few rows: a power of 2
BLOCK = 64  # inputs at a time: programs small enough to run beside those of the layer's own product
COLUMNS = 128
QKV, OUT, GATE_UP, DOWN = range(4)  # parts of a layer; the head comes behind those of all layers
PART = re.compile(r"layers\.(\d+)\.(self_attn\.q_proj|self_attn\.o_proj|mlp\.gate_proj|mlp\.down_proj)$")
KINDS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


class AdapterFactors:
    """Copies of a table's adapters in the decoder's types; `put` and `remove` follow the table."""

    def __init__(self, weights: DenseWeights, table: AdapterTable) -> None:
        self.shape, self._weights = weights.shape, weights
        self._numbers = {name: number for name in table.parts if (number := _part_number(name, self.shape)) is not None}
        self._parts = table.parts
        self.num_parts = 4 * self.shape.layers + 1
        self.head = self.num_parts - 1
        self.like, self.like_head = weights.layers[0].qkv, weights.head  # factors are in the types of these
        self.most_rank = LEAST_RANK
        self._slots: dict[int, int] = {}  # by the adapter's key
        self._held: dict[int, list[Tensor]] = {}  # factors by key
        self._free: list[int] = []
        self.addresses, self.ranks, self.scales = self._tables(CAPACITY)
        table.mirrors.append(self)

    @property
    def layout(self) -> tuple[int, int]:
        """Return what captured graphs depend on."""
        return self.most_rank, len(self.ranks)

    def put(self, key: int, adapter: Adapter) -> None:
        if not self._free:
            self._grow()
        rank = max(LEAST_RANK, triton.next_power_of_2(adapter.rank))
        addresses = np.zeros((self.num_parts, 2), dtype=np.int64)
        held = []
        for name, number in self._numbers.items():
            if name not in adapter.down:
                continue
            part = self._parts[name]
            like = self.like_head if number == self.head else self.like
            down = like.new_zeros(len(part.names), rank, part.inputs)
            up = like.new_zeros(sum(part.outputs), rank)
            ends = np.cumsum([0, *part.outputs])
            for index, layer in enumerate(part.names):
                down[index, : adapter.rank] = adapter.down[layer]
                up[ends[index] : ends[index + 1], : adapter.rank] = adapter.up[layer]
            addresses[number] = down.data_ptr(), up.data_ptr()
            held += [down, up]
        slot = self._free.pop()
        self.addresses[slot].copy_(torch.from_numpy(addresses))
        self.ranks[slot] = rank
        self.scales[slot] = adapter.alpha / adapter.rank
        self._slots[key], self._held[key] = slot, held
        self.most_rank = max(self.most_rank, rank)

    def remove(self, key: int) -> None:
        slot = self._slots.pop(key)
        self._held.pop(key)
        self.addresses[slot].zero_()
        self._free.append(slot)

    def slot_of(self, key: int) -> int:
        """Return the place of an adapter in the tables, -1 for the base model."""
        return -1 if key == BASE else self._slots[key]

    def _tables(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._weights.head.device
        self._free += range(capacity - 1, len(self._slots) - 1, -1)
        return (
            torch.zeros(capacity, self.num_parts, 2, dtype=torch.int64, device=device),
            torch.zeros(capacity, dtype=torch.int32, device=device),
            torch.zeros(capacity, dtype=torch.float32, device=device),
        )

    def _grow(self) -> None:
        before = self.addresses, self.ranks, self.scales
        self.addresses, self.ranks, self.scales = self._tables(2 * len(self.ranks))
        for old, new in zip(before, (self.addresses, self.ranks, self.scales), strict=True):
            new[: len(old)] = old


def _part_number(name: str, shape: DecoderShape) -> int | None:
    if name == HEAD:
        return 4 * shape.layers
    found = PART.search(name)
    return None if found is None else 4 * int(found[1]) + KINDS.index(found[2])


@dataclass(frozen=True, slots=True)
class LowBuffers:
    """The buffers between the two kernels of a part: A x for all rows of a forward pass, and its slices."""

    half: Tensor  # in the type of the layers' factors
    head: Tensor  # in the type of the head's
    slices: Tensor
    arrivals: Tensor

    @staticmethod
    def make(factors: AdapterFactors, rows: int, blocks: int, rows_of_block: int) -> "LowBuffers":
        shape, like, rank = factors.shape, factors.like, factors.most_rank
        inputs = {3: shape.D, 2: shape.D, 1: max(shape.inner, shape.Q * shape.W, shape.D)}
        slices = max(layers * slices_of(size, rows_of_block) for layers, size in inputs.items())
        tiles = 3 * (rank // min(rank, MOST_TILE))
        return LowBuffers(
            half=like.new_empty(rows * 3 * rank),
            head=factors.like_head.new_empty(rows * rank),
            slices=like.new_empty(rows * rank * slices, dtype=torch.float32),
            arrivals=like.new_zeros(blocks * tiles, dtype=torch.int32),
        )


@dataclass(slots=True, eq=False)
class AdaptedRows:
    """The adapters of the rows of one forward pass."""

    factors: AdapterFactors
    blocks: Tensor  # [blocks, 3]: adapter or -1, first row, rows
    rows: int
    rows_of_block: int
    buffers: LowBuffers
    beside: "torch.cuda.Stream | None" = None  # on which A x is computed while the layer's own product is

    def shrink(self, number: int, x: Tensor, *, layers: int = 1) -> None:
        """Start to compute A x for a part of `layers` linear layers."""
        if self.beside is None:
            self._shrink(number, x, layers)
            return
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self._shrink(number, x, layers)

    def expand(self, number: int, y: Tensor, outputs: Sequence[int]) -> None:
        """Add B (A x) to `y`, whose columns are those of linear layers with so many outputs."""
        self._join()
        f, low = self.factors, self._low(number)
        tiles = sum(triton.cdiv(size, COLUMNS) for size in outputs)
        adapter_kernels.expand_kernel[(len(self.blocks), tiles)](
            y,
            low,
            self.blocks,
            f.addresses,
            f.ranks,
            number,
            f.num_parts,
            sum(outputs),
            outputs[0],
            outputs[1] if len(outputs) > 1 else 0,
            LAYERS=len(outputs),
            COLUMNS=COLUMNS,
            **self._tile(low),
        )

    def gate(self, number: int, out: Tensor, both: Tensor) -> None:
        """Compute the gate's product of both halves of `both` with their updates."""
        self._join()
        f, inner = self.factors, out.shape[1]
        adapter_kernels.adapted_gate_kernel[(len(self.blocks), triton.cdiv(inner, COLUMNS))](
            out,
            both,
            self.buffers.half,
            self.blocks,
            f.addresses,
            f.ranks,
            number,
            f.num_parts,
            inner,
            COLUMNS=COLUMNS,
            **self._tile(both),
        )

    def _shrink(self, number: int, x: Tensor, layers: int) -> None:
        f, inputs = self.factors, x.shape[1]
        slices, tile = slices_of(inputs, self.rows_of_block), self._tile(x)
        adapter_kernels.shrink_kernel[(len(self.blocks), layers * (f.most_rank // tile["RANKS"]), slices)](
            self._low(number),
            self.buffers.slices,
            self.buffers.arrivals,
            x,
            self.blocks,
            f.addresses,
            f.ranks,
            f.scales,
            number,
            f.num_parts,
            inputs,
            self.rows,
            triton.cdiv(inputs, slices * BLOCK) * BLOCK,
            LAYERS=layers,
            SLICES=slices,
            BLOCK=BLOCK,
            num_stages=3,
            **tile,
        )

    def _join(self) -> None:
        if self.beside is not None:
            torch.cuda.current_stream().wait_stream(self.beside)

    def _low(self, number: int) -> Tensor:
        return self.buffers.head if number == self.factors.head else self.buffers.half

    def _tile(self, like: Tensor) -> dict[str, Any]:
        return {
            "MOST_RANK": self.factors.most_rank,
            "ROWS": self.rows_of_block,
            "RANKS": min(self.factors.most_rank, MOST_TILE),
            "PRECISION": "ieee" if like.dtype == torch.float32 else "tf32",
            "num_warps": 4,
        }


def slices_of(inputs: int, rows_of_block: int) -> int:
    """Return in how many slices A x is computed, a power of 2; all are added up at once, so large blocks have fewer."""
    most = MOST_SLICES * DECODE_BLOCK // rows_of_block
    slices: int = min(most, triton.next_power_of_2(triton.cdiv(inputs, SLICE)))
    return slices
