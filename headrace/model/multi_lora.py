"""Many adapters over one base model in one batch, without gradients: every row of a step may use another one.

An `AdapterStack` holds adapters of one kind (rank and layers) stacked by slot; `AdapterTable` owns the stacks and gives
every adapter a key that is never used again. `RowAdapters` says which row uses which adapter; while it is set,
`apply_adapters` adds each row's low-rank product (B A x, alpha / rank folded into B) to the base layer's result.

Rows of one adapter are multiplied together, in fours: on a CPU a row of a product of 4, 8, 12, ... rows has the same
bits whatever the other rows are, also as part of a batched product. Ranks are filled up with zeros to a power of two
of at least 4, by the adapter's own rank alone, so that no result depends on the other adapters. Inputs are filled up to
a multiple of 4: over other numbers of them the rows of a product have other bits in another place or beside more rows.

Shape letters: S slots, T rows, P rows in order of adapters and filled up to fours, I inputs, O outputs, R rank.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.errors import ModelError
from headrace.model.lora import linear_layers, linear_sizes
from headrace.names import JOINED_LAYERS, STATE_PROJECTIONS

BASE = 0  # the key of no adapter at all
HEAD = "lm_head"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
JOINED = tuple(end.rpartition(".")[2] for end in (*JOINED_LAYERS, *STATE_PROJECTIONS))
ROWS, RANK, INPUTS = 4, 4, 4  # see above
CACHED_ROW_ADAPTERS = 4  # of the rows of a step and of those that sample, now and before
SMALL = 400  # multiplications; below, torch has another loop for batched products, with other bits
WASTE = 2.0  # computed rows per needed row up to which one batched product is used, not one for each adapter
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank update of some linear layers."""

    rank: int
    alpha: float
    down: Mapping[str, Tensor]  # [R, I] by the layer's name
    up: Mapping[str, Tensor]  # [O, R] by the layer's name
    version: int = 0  # recorded with the tokens that it samples

    def __post_init__(self) -> None:
        assert self.down.keys() == self.up.keys()


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers of one input, side by side."""

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the group: that of its first layer."""
        return self.names[0]


def linear_groups(model: nn.Module) -> dict[str, LinearGroup]:
    """Group the linear layers that adapters may change: query, key and value are one part, gate and up are one."""
    linears = {name: linear_sizes(layer) for name, layer in linear_layers(model).items()}
    together = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    grouped: dict[str, list[str]] = {}
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        if leaf in (*ATTENTION, *MLP, *JOINED, HEAD):
            first = f"{parent}.{together[leaf]}" if leaf in together else name
            grouped.setdefault(first if first in linears else name, []).append(name)
    return {
        first: LinearGroup(tuple(names), linears[first][0], tuple(linears[name][1] for name in names))
        for first, names in grouped.items()
    }


def padded_rank(rank: int) -> int:
    return max(RANK, 1 << (rank - 1).bit_length())


class AdapterStack:
    """Adapters of one rank on the same parts, in tensors that grow by doubling and shrink when most slots are free."""

    def __init__(self, parts: Sequence[LinearGroup], rank: int, like: Tensor) -> None:
        self.rank, self.parts = rank, {part.name: part for part in parts}
        self._like = like
        narrowest = min(min(part.inputs, *part.outputs) for part in parts)
        self.batches = narrowest * rank * ROWS >= SMALL  # whether batched products have the bits of single ones
        self.capacity = 0
        self._used: set[int] = set()
        self._free: list[int] = []
        self.down: dict[str, Tensor] = {}  # [S, n R, I filled up] for a part of n layers
        self.up: dict[str, list[Tensor]] = {}  # [S, O, R] for each of its layers
        self.views: dict[str, list[tuple[Tensor, tuple[Tensor, ...]]]] = {}  # down and up of each slot, transposed

    def __len__(self) -> int:
        return len(self._used)

    def put(self, adapter: Adapter) -> int:
        if not self._free:
            self._resize(max(2, 2 * self.capacity))
        slot = heappop(self._free)
        self._used.add(slot)
        scale = adapter.alpha / adapter.rank
        for part in self.parts.values():
            for index, name in enumerate(part.names):
                start = index * self.rank
                self.down[part.name][slot, start : start + adapter.rank, : part.inputs] = adapter.down[name]
                self.up[part.name][index][slot, :, : adapter.rank] = adapter.up[name] * scale
        return slot

    def remove(self, slot: int) -> None:
        self._used.remove(slot)
        heappush(self._free, slot)
        for name in self.parts:  # the next adapter in this slot may have a smaller rank
            for stack in (self.down[name], *self.up[name]):
                stack[slot].zero_()
        if max(self._used, default=-1) < self.capacity // 4:
            self._resize(max(2, self.capacity // 2))

    def _resize(self, capacity: int) -> None:
        assert all(slot < capacity for slot in self._used)
        copied = min(capacity, self.capacity)

        def stack(before: Tensor | None, *shape: int) -> Tensor:
            after = torch.zeros(capacity, *shape, dtype=self._like.dtype, device=self._like.device)
            if before is not None:
                after[:copied] = before[:copied]
            return after

        for name, part in self.parts.items():
            self.down[name] = stack(
                self.down.get(name), len(part.names) * self.rank, part.inputs + -part.inputs % INPUTS
            )
            ups = self.up.get(name, [None] * len(part.names))
            self.up[name] = [stack(up, size, self.rank) for up, size in zip(ups, part.outputs, strict=True)]
            downs = [down.T for down in self.down[name].unbind(0)]
            transposed = zip(*([up.T for up in stacked.unbind(0)] for stacked in self.up[name]), strict=True)
            self.views[name] = list(zip(downs, transposed, strict=True))
        self.capacity = capacity
        self._free = [slot for slot in range(capacity) if slot not in self._used]
        heapify(self._free)


class AdapterMirror(Protocol):
    """A second copy of a table's adapters, in the form that some kernels need."""

    def put(self, key: int, adapter: Adapter) -> None: ...

    def remove(self, key: int) -> None: ...


class AdapterTable:
    """Holds the adapters of one model by key. Used only on the thread that samples from the model.

    `mirrors` are told of every adapter that is put in or removed.
    """

    def __init__(self, model: Any) -> None:
        self.parts = linear_groups(model)
        self.places = {name: (part, index) for part in self.parts.values() for index, name in enumerate(part.names)}
        self._like = next(model.parameters())
        self._stacks: dict[tuple[int, frozenset[str]], AdapterStack] = {}  # by padded rank and layers
        self.mirrors: list[AdapterMirror] = []
        self._places: dict[int, tuple[AdapterStack, int]] = {}  # stack and slot by key
        self._versions: dict[int, int] = {BASE: 0}
        self._next = BASE + 1
        self._cache: OrderedDict[bytes, RowAdapters] = OrderedDict()

    def put(self, adapter: Adapter) -> int:
        """Copy an adapter in and return its key. Raises ModelError, and changes nothing, when it does not fit."""
        self._check(adapter)
        kind = (padded_rank(adapter.rank), frozenset(adapter.down))
        stack = self._stacks.get(kind)
        if stack is None:
            stack = AdapterStack(
                [part for part in self.parts.values() if part.name in adapter.down], kind[0], self._like
            )
            self._stacks[kind] = stack
        with torch.inference_mode():
            slot = stack.put(adapter)
        key, self._next = self._next, self._next + 1
        self._places[key], self._versions[key] = (stack, slot), adapter.version
        self._cache.clear()
        with torch.inference_mode():
            for mirror in self.mirrors:
                mirror.put(key, adapter)
        return key

    def remove(self, key: int) -> None:
        stack, slot = self._places.pop(key)
        del self._versions[key]
        with torch.inference_mode():
            stack.remove(slot)
            for mirror in self.mirrors:
                mirror.remove(key)
        self._stacks = {kind: stack for kind, stack in self._stacks.items() if len(stack)}
        self._cache.clear()

    def __contains__(self, key: int) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._places)

    def version(self, key: int) -> int:
        return self._versions[key]

    def row_adapters(self, keys_T: Keys) -> "RowAdapters | None":
        """Lay out the adapters of rows with these keys; return None when all of them use the base alone."""
        if not keys_T.any():
            return None
        cache_key = keys_T.tobytes()
        if (cached := self._cache.get(cache_key)) is not None:
            return cached
        device = self._like.device
        by_stack: dict[int, list[int]] = {}
        for key in np.unique(keys_T).tolist():
            if key != BASE:
                by_stack.setdefault(id(self._places[key][0]), []).append(key)
        shares = []
        for keys in by_stack.values():
            rows = {self._places[key][1]: np.flatnonzero(keys_T == key) for key in keys}
            shares.append(_lay_out(self._places[keys[0]][0], rows, len(keys_T), device))
        adapters = RowAdapters(tuple(shares), _join_layouts(shares, len(keys_T)))
        self._cache[cache_key] = adapters
        if len(self._cache) > CACHED_ROW_ADAPTERS:
            self._cache.popitem(last=False)
        return adapters

    def _check(self, adapter: Adapter) -> None:
        if unknown := sorted(adapter.down.keys() - self.places.keys()):
            raise ModelError(
                f"the adapter changes {unknown[0]}, which is no linear layer of this model that may have one"
            )
        for name, down in adapter.down.items():
            part, index = self.places[name]
            if missing := sorted(set(part.names) - adapter.down.keys()):
                raise ModelError(f"the adapter changes {name} without {missing[0]}: it needs both or neither")
            if down.shape != (adapter.rank, part.inputs) or adapter.up[name].shape != (
                part.outputs[index],
                adapter.rank,
            ):
                raise ModelError(f"the adapter of {name} has another shape: it is another model's")
            if not (bool(down.isfinite().all()) and bool(adapter.up[name].isfinite().all())):
                raise ModelError(f"the adapter of {name} holds numbers that are not finite")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The order of a step's rows while adapters compute."""

    order_P: Tensor | None  # the row at each place; None if rows are in order already
    place: Tensor | None  # the place of each row; None if as gathered
    rows: Tensor | None  # the rows that are adapted; None if all of the step

    def gather(self, x_TI: Tensor) -> Tensor:
        return x_TI if self.order_P is None else x_TI.index_select(0, self.order_P)

    def add_(self, y_TO: Tensor, delta_PO: Tensor) -> None:
        delta_TO = delta_PO if self.place is None else delta_PO.index_select(0, self.place)
        if self.rows is None:
            y_TO.add_(delta_TO)
        else:
            y_TO.index_add_(0, self.rows, delta_TO.to(y_TO.dtype))  # logits may be in float32


@dataclass(frozen=True, slots=True)
class StackRows:
    """The rows of a step that use adapters of one stack."""

    stack: AdapterStack
    layout: _Layout
    slots: tuple[int, ...]
    sizes: tuple[int, ...]  # rows of each product, or of each slot of the batched product
    num_rows: int  # of all sizes
    first: int | None  # the first slot of one batched product, of sizes[0] rows per slot; None: a product per slot
    batched_views: dict[tuple[str, range], tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def compute(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        """Write the adapters' updates into `delta_PO`, for the `chosen` layers of a part side by side."""
        if self.first is None:
            self._compute_each(part, chosen, x_PI, delta_PO)
        else:
            self._compute_batched(part, chosen, x_PI, delta_PO)

    def _compute_each(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        widths, rank = [part.outputs[index] for index in chosen], self.stack.rank
        span = slice(chosen.start * rank, chosen.stop * rank)
        views = self.stack.views[part.name]
        for slot, x_NI, delta_NO in zip(
            self.slots, x_PI.split_with_sizes(self.sizes), delta_PO.split_with_sizes(self.sizes), strict=True
        ):
            down, ups = views[slot]
            if len(part.names) == 1:
                torch.mm(torch.mm(x_NI, down), ups[0], out=delta_NO)
                continue
            lows = torch.mm(x_NI, down[:, span]).chunk(len(chosen), dim=1)
            for index, low, out in zip(chosen, lows, delta_NO.split_with_sizes(widths, dim=1), strict=True):
                torch.mm(low, ups[index], out=out)

    def _compute_batched(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        down_SIR, ups_SRO = self._views(part, chosen)
        count = down_SIR.shape[0]
        low_SNR = torch.bmm(x_PI.view(count, self.sizes[0], -1), down_SIR)
        delta_SNO = delta_PO.view(count, self.sizes[0], -1)
        if len(ups_SRO) == 1:
            torch.bmm(low_SNR, ups_SRO[0], out=delta_SNO)
            return
        lows = low_SNR.chunk(len(ups_SRO), dim=2)
        torch.cat([torch.bmm(*pair) for pair in zip(lows, ups_SRO, strict=True)], dim=2, out=delta_SNO)

    def _views(self, part: LinearGroup, chosen: range) -> tuple[Tensor, list[Tensor]]:
        """Transpose the slots of the batched product; cached, because a view takes as long as a small product."""
        views = self.batched_views.get((part.name, chosen))
        if views is None:
            assert self.first is not None
            rank, slots = self.stack.rank, slice(self.first, self.first + len(self.sizes))
            down_SRI = self.stack.down[part.name][slots, chosen.start * rank : chosen.stop * rank]
            ups = [self.stack.up[part.name][index][slots].transpose(1, 2) for index in chosen]
            views = self.batched_views[part.name, chosen] = (down_SRI.transpose(1, 2), ups)
        return views


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters that each row of a step uses; `AdapterTable.row_adapters` makes them."""

    shares: tuple[StackRows, ...]
    joined: _Layout  # of the rows of all shares, one after the other

    def add_(self, part: LinearGroup, index: int | None, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add the updates of one layer of a part to `y_TO`, or with index None those of all its layers side by side."""
        chosen = range(len(part.names)) if index is None else range(index, index + 1)
        shares = [share for share in self.shares if part.name in share.stack.parts]
        if len(shares) == len(self.shares):
            self._add(shares, self.joined, part, chosen, x_TI, y_TO)
            return
        for share in shares:
            self._add([share], share.layout, part, chosen, x_TI, y_TO)

    @staticmethod
    def _add(
        shares: Sequence[StackRows], layout: _Layout, part: LinearGroup, chosen: range, x_TI: Tensor, y_TO: Tensor
    ) -> None:
        x_PI = layout.gather(x_TI)
        if missing := -part.inputs % INPUTS:
            x_PI = F.pad(x_PI, (0, missing))
        delta_PO = x_PI.new_empty(x_PI.shape[0], sum(part.outputs[index] for index in chosen))
        sizes = [share.num_rows for share in shares]
        for share, x, delta in zip(shares, x_PI.split_with_sizes(sizes), delta_PO.split_with_sizes(sizes), strict=True):
            share.compute(part, chosen, x, delta)
        layout.add_(y_TO, delta_PO)


def _join_layouts(shares: Sequence[StackRows], total: int) -> _Layout:
    """Join the layouts of several shares, so that their rows are gathered and put back at once."""
    if len(shares) == 1:
        return shares[0].layout
    orders, places, rows, start = [], [], [], 0
    for share in shares:
        layout = share.layout
        assert layout.order_P is not None, "one of several shares has not all rows"
        assert layout.place is not None
        assert layout.rows is not None
        orders.append(layout.order_P)
        places.append(layout.place + start)
        rows.append(layout.rows)
        start += len(layout.order_P)
    used, back = torch.cat(rows).sort()
    return _Layout(torch.cat(orders), torch.cat(places)[back], None if len(used) == total else used)


def _lay_out(
    stack: AdapterStack, rows: Mapping[int, npt.NDArray[np.intp]], total: int, device: torch.device
) -> StackRows:
    """Lay out the rows of each slot, as one batched product if that computes few rows in vain."""
    slots = sorted(rows)
    padded = [-(-len(rows[slot]) // ROWS) * ROWS for slot in slots]
    span, tallest = slots[-1] - slots[0] + 1, max(padded)
    batched = stack.batches and len(slots) > 1 and span * tallest <= WASTE * sum(padded)
    sizes = [tallest] * span if batched else padded
    order = np.zeros(sum(sizes), dtype=np.int64)
    place = np.zeros(total, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for index, slot in enumerate(slots):
        members, start = rows[slot], int(starts[slot - slots[0] if batched else index])
        order[start : start + len(members)] = members
        order[start + len(members) : start + padded[index]] = members[0]
        place[members] = start + np.arange(len(members))
    used = np.sort(np.concatenate([rows[slot] for slot in slots]))
    whole = len(used) == total
    straight = whole and np.array_equal(order, np.arange(total))

    def send(values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return StackRows(
        stack=stack,
        layout=_Layout(
            order_P=None if straight else send(order),
            place=None if straight else send(place[used]),
            rows=None if whole else send(used),
        ),
        slots=tuple(slots),
        sizes=tuple(sizes),
        num_rows=sum(sizes),
        first=slots[0] if batched else None,
    )


# --- forward passes ---------------------------------------------------------------------------------------------------

_ACTIVE: ContextVar["tuple[AdapterTable, RowAdapters] | None"] = ContextVar("headrace_row_adapters", default=None)


@contextmanager
def use_adapters(table: AdapterTable | None, adapters: RowAdapters | None) -> Iterator[None]:
    """Apply these adapters to the rows of the table's model in all forward passes inside the block."""
    if table is None or adapters is None:
        yield
        return
    token = _ACTIVE.set((table, adapters))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def apply_adapters(part: str, x_TI: Tensor, y_TO: Tensor) -> Tensor:
    """Add the adapters' updates in place to `y_TO`, the result of a part's base layers for `x_TI`, and return it."""
    if (active := _ACTIVE.get()) is not None:
        table, adapters = active
        adapters.add_(table.parts[part], None, x_TI, y_TO)
    return y_TO


def install_hooks(model: nn.Module, table: AdapterTable) -> None:
    """Apply adapters in the model's own linear layers, for models that are run by calling them."""
    for name, (part, index) in table.places.items():
        model.get_submodule(name).register_forward_hook(partial(_adapt_layer, part, index))


def adapters_in_use() -> bool:
    return _ACTIVE.get() is not None


def is_adapter_hook(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _adapt_layer


def row_update(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Compute what the adapters in use add to a hooked layer's result, for code that does not call the layer."""
    active = _ACTIVE.get()
    hook: Any = next(filter(is_adapter_hook, layer._forward_hooks.values()), None)
    if active is None or hook is None:
        return None
    part, index = hook.args
    update = x.new_zeros(*x.shape[:-1], part.outputs[index])
    active[1].add_(part, index, x.reshape(-1, x.shape[-1]), update.view(-1, part.outputs[index]))
    return update


def _adapt_layer(part: LinearGroup, index: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if (active := _ACTIVE.get()) is not None:
        x, y = inputs[0], output
        active[1].add_(part, index, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
