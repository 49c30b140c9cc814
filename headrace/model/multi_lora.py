"""Many adapters over one base model in one batch, without gradients: every row of a step may use another one.

A `Shelf` holds adapters of one kind (rank and layers) stacked by slot; `AdapterTable` owns the shelves and gives every
adapter a key that is never used again. A `Mixture` says which row uses which adapter; while one is set, `adapt` adds
each row's low-rank product (B A x, alpha / rank folded into B) to what the base computed for it.

Rows of one adapter are multiplied together, in fours: on a CPU a row of a product of 4, 8, 12, ... rows has the same
bits whatever the other rows are, also as part of a batched product. Ranks are filled up with zeros to a power of two
of at least 4, by the adapter's own rank alone, so that nothing depends on who else is there.

Shape letters: S slots, T rows, P rows in order of adapters and filled up to fours, I inputs, O outputs, R rank.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headrace.errors import ModelError

BASE = 0  # the key of no adapter at all
HEAD = "lm_head"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ROWS, RANK = 4, 4  # see above
KEPT = 4  # mixtures that are remembered: of the rows of a step and of those that sample, now and before
SMALL = 400  # below, as a number of multiplications, torch has another loop for batched products, with other bits
WASTE = 2.0  # rows computed in one batched product for each that is needed; beyond, one product for each adapter
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank update of some linear layers, by the layer's name: down [R, I] and up [O, R]; `version` names it in
    what it samples."""

    rank: int
    alpha: float
    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]
    version: int = 0

    def __post_init__(self) -> None:
        assert self.down.keys() == self.up.keys()


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers of one input, side by side; the first one's name stands for all."""

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def linear_groups(model: nn.Module) -> dict[str, LinearGroup]:
    """The linear layers that adapters may have: query, key and value are one part, gate and up are one."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    together = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    grouped: dict[str, list[str]] = {}
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        if leaf in (*ATTENTION, *MLP, HEAD):
            first = f"{parent}.{together[leaf]}" if leaf in together else name
            grouped.setdefault(first if first in linears else name, []).append(name)
    return {
        first: LinearGroup(
            tuple(names), linears[first].in_features, tuple(linears[name].out_features for name in names)
        )
        for first, names in grouped.items()
    }


def padded_rank(rank: int) -> int:
    return max(RANK, 1 << (rank - 1).bit_length())


class AdapterStack:
    """Adapters of one rank on the same parts, in stacks that grow by doubling and shrink when most of them is free."""

    def __init__(self, parts: Sequence[LinearGroup], rank: int, like: Tensor) -> None:
        self.rank, self.parts = rank, {part.name: part for part in parts}
        self._like = like
        narrowest = min(min(part.inputs, *part.outputs) for part in parts)
        self.batches = narrowest * rank * ROWS >= SMALL  # whether batched products have the bits of single ones
        self.capacity = 0
        self._used: set[int] = set()
        self._free: list[int] = []
        self.down: dict[str, Tensor] = {}  # [S, n R, I] for a part of n layers
        self.up: dict[str, list[Tensor]] = {}  # [S, O, R] for each of them
        self.views: dict[str, list[tuple[Tensor, tuple[Tensor, ...]]]] = {}  # both of one slot, turned

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
                self.down[part.name][slot, start : start + adapter.rank] = adapter.down[name]
                self.up[part.name][index][slot, :, : adapter.rank] = adapter.up[name] * scale
        return slot

    def remove(self, slot: int) -> None:
        self._used.remove(slot)
        heappush(self._free, slot)
        for name in self.parts:  # whoever comes next may have a smaller rank
            for stack in (self.down[name], *self.up[name]):
                stack[slot].zero_()
        if max(self._used, default=-1) < self.capacity // 4:
            self._resize(max(2, self.capacity // 2))

    def _resize(self, capacity: int) -> None:
        assert all(slot < capacity for slot in self._used)
        kept = min(capacity, self.capacity)

        def stack(before: Tensor | None, *shape: int) -> Tensor:
            after = torch.zeros(capacity, *shape, dtype=self._like.dtype, device=self._like.device)
            if before is not None:
                after[:kept] = before[:kept]
            return after

        for name, part in self.parts.items():
            self.down[name] = stack(self.down.get(name), len(part.names) * self.rank, part.inputs)
            ups = self.up.get(name, [None] * len(part.names))
            self.up[name] = [stack(up, size, self.rank) for up, size in zip(ups, part.outputs, strict=True)]
            downs = [down.T for down in self.down[name].unbind(0)]
            turned = zip(*([up.T for up in stacked.unbind(0)] for stacked in self.up[name]), strict=True)
            self.views[name] = list(zip(downs, turned, strict=True))
        self.capacity = capacity
        self._free = [slot for slot in range(capacity) if slot not in self._used]
        heapify(self._free)


class AdapterTable:
    """Adapters by key. Made for one model; everything happens on the thread that samples from it."""

    def __init__(self, model: Any) -> None:
        self.parts = linear_groups(model)
        self.places = {name: (part, index) for part in self.parts.values() for index, name in enumerate(part.names)}
        self._like = next(model.parameters())
        self._shelves: dict[tuple[int, frozenset[str]], AdapterStack] = {}
        self._where: dict[int, tuple[AdapterStack, int]] = {}
        self._versions: dict[int, int] = {BASE: 0}
        self._next = BASE + 1
        self._made: OrderedDict[bytes, RowAdapters] = OrderedDict()

    def put(self, adapter: Adapter) -> int:
        """Copy an adapter in and return its key. Raises ModelError, and nothing has changed, when it does not fit."""
        self._check(adapter)
        kind = (padded_rank(adapter.rank), frozenset(adapter.down))
        shelf = self._shelves.get(kind)
        if shelf is None:
            shelf = AdapterStack(
                [part for part in self.parts.values() if part.name in adapter.down], kind[0], self._like
            )
            self._shelves[kind] = shelf
        with torch.inference_mode():
            slot = shelf.put(adapter)
        key, self._next = self._next, self._next + 1
        self._where[key], self._versions[key] = (shelf, slot), adapter.version
        self._made.clear()
        return key

    def remove(self, key: int) -> None:
        shelf, slot = self._where.pop(key)
        del self._versions[key]
        with torch.inference_mode():
            shelf.remove(slot)
        self._shelves = {kind: kept for kind, kept in self._shelves.items() if len(kept)}
        self._made.clear()

    def __contains__(self, key: int) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._where)

    def version(self, key: int) -> int:
        return self._versions[key]

    def mixture(self, keys_T: Keys) -> "RowAdapters | None":
        """What the rows with these keys use; None when all of them use the base alone."""
        if not keys_T.any():
            return None
        known = keys_T.tobytes()
        if (found := self._made.get(known)) is not None:
            return found
        device = self._like.device
        by_shelf: dict[int, list[int]] = {}
        for key in np.unique(keys_T).tolist():
            if key != BASE:
                by_shelf.setdefault(id(self._where[key][0]), []).append(key)
        shares = []
        for keys in by_shelf.values():
            rows = {self._where[key][1]: np.flatnonzero(keys_T == key) for key in keys}
            shares.append(_share(self._where[keys[0]][0], rows, len(keys_T), device))
        made = RowAdapters(tuple(shares), _joined(shares, len(keys_T)))
        self._made[known] = made
        if len(self._made) > KEPT:
            self._made.popitem(last=False)
        return made

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
    """Where the rows of a step lie while adapters compute.

    `order_P` gathers them (None: they lie as they should), `place` says where in P each is found again (None: as
    gathered), `rows` which they are (None: all rows of the step).
    """

    order_P: Tensor | None
    place: Tensor | None
    rows: Tensor | None

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
    """The rows of a step that use adapters of one shelf. `first` is None where each slot is one product of `sizes`
    rows; else slots from there on, `sizes[0]` rows each, are one batched product."""

    shelf: AdapterStack
    layout: _Layout
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    num_rows: int  # of all sizes
    first: int | None
    stacks: dict[tuple[str, range], tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def compute(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        """What the adapters add, for the `chosen` layers of a part side by side."""
        if self.first is None:
            self._each(part, chosen, x_PI, delta_PO)
        else:
            self._batched(part, chosen, x_PI, delta_PO)

    def _each(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        widths, rank = [part.outputs[index] for index in chosen], self.shelf.rank
        span = slice(chosen.start * rank, chosen.stop * rank)
        views = self.shelf.views[part.name]
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

    def _batched(self, part: LinearGroup, chosen: range, x_PI: Tensor, delta_PO: Tensor) -> None:
        down_SIR, ups_SRO = self._stacks(part, chosen)
        count = down_SIR.shape[0]
        low_SNR = torch.bmm(x_PI.view(count, self.sizes[0], -1), down_SIR)
        delta_SNO = delta_PO.view(count, self.sizes[0], -1)
        if len(ups_SRO) == 1:
            torch.bmm(low_SNR, ups_SRO[0], out=delta_SNO)
            return
        lows = low_SNR.chunk(len(ups_SRO), dim=2)
        torch.cat([torch.bmm(*pair) for pair in zip(lows, ups_SRO, strict=True)], dim=2, out=delta_SNO)

    def _stacks(self, part: LinearGroup, chosen: range) -> tuple[Tensor, list[Tensor]]:
        """The slots of the batched product, turned; remembered, because a view takes as long as a small product."""
        known = self.stacks.get((part.name, chosen))
        if known is None:
            assert self.first is not None
            rank, slots = self.shelf.rank, slice(self.first, self.first + len(self.sizes))
            down_SRI = self.shelf.down[part.name][slots, chosen.start * rank : chosen.stop * rank]
            ups = [self.shelf.up[part.name][index][slots].transpose(1, 2) for index in chosen]
            known = self.stacks[part.name, chosen] = (down_SRI.transpose(1, 2), ups)
        return known


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Which rows use which adapters; made by `AdapterTable.mixture`. `joined`: the rows of all shares, one after the
    other."""

    shares: tuple[StackRows, ...]
    joined: _Layout

    def add_(self, part: LinearGroup, index: int | None, x_TI: Tensor, y_TO: Tensor) -> None:
        """`index`: of a layer of the part, None for all of them side by side."""
        chosen = range(len(part.names)) if index is None else range(index, index + 1)
        shares = [share for share in self.shares if part.name in share.shelf.parts]
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
        delta_PO = x_PI.new_empty(x_PI.shape[0], sum(part.outputs[index] for index in chosen))
        sizes = [share.num_rows for share in shares]
        for share, x, delta in zip(shares, x_PI.split_with_sizes(sizes), delta_PO.split_with_sizes(sizes), strict=True):
            share.compute(part, chosen, x, delta)
        layout.add_(y_TO, delta_PO)


def _joined(shares: Sequence[StackRows], total: int) -> _Layout:
    """The rows of several shares, gathered and put back at once."""
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


def _share(
    shelf: AdapterStack, rows: Mapping[int, npt.NDArray[np.intp]], total: int, device: torch.device
) -> StackRows:
    """Lay out the rows of each slot: one batched product where that computes few rows in vain."""
    slots = sorted(rows)
    padded = [-(-len(rows[slot]) // ROWS) * ROWS for slot in slots]
    span, tallest = slots[-1] - slots[0] + 1, max(padded)
    batched = shelf.batches and len(slots) > 1 and span * tallest <= WASTE * sum(padded)
    sizes = [tallest] * span if batched else padded
    order = np.zeros(sum(sizes), dtype=np.int64)
    place = np.zeros(total, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for index, slot in enumerate(slots):
        own, start = rows[slot], int(starts[slot - slots[0] if batched else index])
        order[start : start + len(own)] = own
        order[start + len(own) : start + padded[index]] = own[0]
        place[own] = start + np.arange(len(own))
    used = np.sort(np.concatenate([rows[slot] for slot in slots]))
    whole = len(used) == total
    straight = whole and np.array_equal(order, np.arange(total))

    def sent(values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return StackRows(
        shelf=shelf,
        layout=_Layout(
            order_P=None if straight else sent(order),
            place=None if straight else sent(place[used]),
            rows=None if whole else sent(used),
        ),
        slots=tuple(slots),
        sizes=tuple(sizes),
        num_rows=sum(sizes),
        first=slots[0] if batched else None,
    )


# --- what computes ----------------------------------------------------------------------------------------------------

_USED: ContextVar["tuple[AdapterTable, RowAdapters] | None"] = ContextVar("headrace_mixture", default=None)


@contextmanager
def use_adapters(table: AdapterTable | None, mixture: RowAdapters | None) -> Iterator[None]:
    """Inside, forward passes of the table's model have their rows adapted like this."""
    if table is None or mixture is None:
        yield
        return
    token = _USED.set((table, mixture))
    try:
        yield
    finally:
        _USED.reset(token)


def apply_adapters(part: str, x_TI: Tensor, y_TO: Tensor) -> Tensor:
    """`y_TO`, what the base layers of a part made of `x_TI`, with the adapters of its rows added in place."""
    if (used := _USED.get()) is not None:
        table, mixture = used
        mixture.add_(table.parts[part], None, x_TI, y_TO)
    return y_TO


def install_hooks(model: nn.Module, table: AdapterTable) -> None:
    """Adapt what the model's own layers compute: for models that are run by calling them."""
    for name, (part, index) in table.places.items():
        model.get_submodule(name).register_forward_hook(partial(_adapt_layer, part, index))


def _adapt_layer(part: LinearGroup, index: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if (used := _USED.get()) is not None:
        x, y = inputs[0], output
        used[1].add_(part, index, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
