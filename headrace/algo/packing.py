"""Which data go into which micro-batch, by a token budget, never splitting a unit; and how a micro-batch is laid out.

Pure bookkeeping; it may not change a gradient, because losses are plain sums (see `algo/losses.py`), and because a
token's hidden state depends on what precedes it and on nothing else: sequences with a common beginning, such as the
episodes of a group, have the same states there, so it is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.types import IntArray, int_array

WORTH_SHARING = 16  # tokens; below, one more piece of attention costs more than it saves


def pack(
    lengths: Sequence[int], units: Sequence[int | None], *, budget: int, beginnings: Sequence[bytes] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Indices of each micro-batch: first-fit decreasing over units, at most `budget` tokens each.

    A unit longer than the budget gets a micro-batch of its own (it cannot be split). Inside a micro-batch the
    original order is kept. Units with the same beginning stay together as far as they fit, so that it is computed once.
    Deterministic: ties are broken by position.
    """
    assert len(lengths) == len(units)
    assert beginnings is None or len(beginnings) == len(units)
    assert budget > 0
    members: dict[tuple[str, int], list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault(("own", index) if unit is None else ("unit", unit), []).append(index)
    together = list(members.values())
    if beginnings is not None:
        together = _joined(together, lengths, beginnings, budget)
    sized = sorted(
        ((sum(lengths[index] for index in indices), indices) for indices in together),
        key=lambda item: (-item[0], item[1][0]),
    )
    room: list[int] = []
    batches: list[list[int]] = []
    for size, indices in sized:
        place = next((slot for slot, left in enumerate(room) if left >= size), None)
        if place is None:
            room.append(max(budget - size, 0))
            batches.append(list(indices))
        else:
            room[place] -= size
            batches[place].extend(indices)
    return tuple(tuple(sorted(batch)) for batch in sorted(batches, key=min))


def consecutive_batches(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Split indices into batches in their order, at most `budget` tokens each; a longer item has one of its own."""
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= length
    return batches


def _joined(
    units: Sequence[list[int]], lengths: Sequence[int], beginnings: Sequence[bytes], budget: int
) -> list[list[int]]:
    """Units whose first data begin alike, one after the other, cut where the budget is full."""
    alike: dict[bytes, list[list[int]]] = {}
    for indices in units:
        alike.setdefault(beginnings[indices[0]], []).append(indices)
    found: list[list[int]] = []
    for group in alike.values():
        room = 0
        for indices in group:
            size = sum(lengths[index] for index in indices)
            if size > room:
                found.append([])
                room = budget
            found[-1] += indices
            room -= size
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """A micro-batch as segments end to end. A segment follows its parent (an earlier segment), which its tokens see.

    `place` says, for every token of the sequences laid end to end, which token of the layout stands for it.
    """

    tokens: IntArray
    positions: IntArray
    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]
    place: IntArray


def build_prefix_tree(sequences: Sequence[IntArray], *, shortest: int = WORTH_SHARING) -> PrefixTree:
    """Common beginnings of at least `shortest` tokens once, what differs behind them."""
    assert all(len(sequence) for sequence in sequences)
    found = _Segments(sequences, shortest)
    found.add(range(len(sequences)), start=0, parent=None)
    lengths = [len(tokens) for tokens, _ in found.segments]
    return PrefixTree(
        tokens=int_array(np.concatenate([tokens for tokens, _ in found.segments])),
        positions=int_array(np.concatenate([np.arange(a, a + n) for a, n in zip(found.starts, lengths, strict=True)])),
        lengths=tuple(lengths),
        parents=tuple(parent for _, parent in found.segments),
        place=int_array(np.concatenate([np.concatenate(parts) for parts in found.places])),
    )


class _Segments:
    """The tree of segments as it grows."""

    def __init__(self, sequences: Sequence[IntArray], shortest: int) -> None:
        self.sequences, self.shortest = sequences, shortest
        self.segments: list[tuple[IntArray, int | None]] = []
        self.starts: list[int] = []  # position of each segment's first token
        self.places: list[list[IntArray]] = [[] for _ in sequences]
        self._size = 0

    def add(self, members: Sequence[int], *, start: int, parent: int | None) -> None:
        """What the sequences `members`, which agree before `start`, hold from there on."""
        alike: dict[bytes, list[int]] = {}
        for index in members:
            alike.setdefault(self.sequences[index][start : start + self.shortest].tobytes(), []).append(index)
        for group in alike.values():
            common = self._common(group, start) if len(group) > 1 else 0
            if common >= self.shortest:
                shared = self._append(group, slice(start, start + common), parent)
                self.add(group, start=start + common, parent=shared)
            else:
                for index in group:
                    self._append([index], slice(start, len(self.sequences[index])), parent)

    def _common(self, group: Sequence[int], start: int) -> int:
        """Tokens from `start` on that all of them have, leaving each at least one of its own."""
        shortest = min(len(self.sequences[index]) for index in group) - 1
        rows = np.stack([self.sequences[index][start:shortest] for index in group]) if shortest > start else None
        if rows is None:
            return 0
        differs = (rows != rows[0]).any(axis=0)
        return int(differs.argmax()) if differs.any() else rows.shape[1]

    def _append(self, group: Sequence[int], span: slice, parent: int | None) -> int:
        tokens = self.sequences[group[0]][span]
        where = int_array(np.arange(self._size, self._size + len(tokens)))
        for index in group:
            self.places[index].append(where)
        self.segments.append((tokens, parent))
        self.starts.append(span.start)
        self._size += len(tokens)
        return len(self.segments) - 1
