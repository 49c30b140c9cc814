"""Pack data into micro-batches by a token budget, never splitting a unit, and lay out a micro-batch as a prefix tree.

Packing cannot change a gradient, because losses are plain sums (see `algo/loss_signature.py`), and because a token's
hidden state depends on what precedes it and on nothing else: sequences with a common prefix, such as the episodes of a
group, have the same states there, so it is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.types import IntArray, int_array

WORTH_SHARING = 16  # tokens; for a shorter prefix, one more segment of attention costs more than it saves


def pack(
    lengths: Sequence[int], units: Sequence[int | None], *, budget: int, beginnings: Sequence[bytes] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Choose the indices of each micro-batch: first-fit decreasing over units, at most `budget` tokens each.

    A unit longer than the budget gets a micro-batch of its own (it cannot be split). Inside a micro-batch the
    original order is kept. Units with the same prefix (`beginnings`) stay together as far as they fit, so that it is
    computed once. Deterministic: ties are broken by position.
    """
    assert len(lengths) == len(units)
    assert beginnings is None or len(beginnings) == len(units)
    assert budget > 0
    members: dict[tuple[str, int], list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault(("own", index) if unit is None else ("unit", unit), []).append(index)
    together = list(members.values())
    if beginnings is not None:
        together = join_by_prefix(together, lengths, beginnings, budget)
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
    """Split indices into batches in order, at most `budget` tokens each; a longer item gets a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= length
    return batches


def join_by_prefix(
    units: Sequence[list[int]], lengths: Sequence[int], beginnings: Sequence[bytes], budget: int
) -> list[list[int]]:
    """Concatenate units whose first data have the same prefix, cut where the budget is full."""
    alike: dict[bytes, list[list[int]]] = {}
    for indices in units:
        alike.setdefault(beginnings[indices[0]], []).append(indices)
    joined: list[list[int]] = []
    for group in alike.values():
        room = 0
        for indices in group:
            size = sum(lengths[index] for index in indices)
            if size > room:
                joined.append([])
                room = budget
            joined[-1] += indices
            room -= size
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """A micro-batch laid out as segments end to end; a segment's tokens attend to its ancestors too."""

    tokens: IntArray
    positions: IntArray  # of each token in its sequence
    lengths: tuple[int, ...]  # of each segment
    parents: tuple[int | None, ...]  # of each segment, the earlier segment that it follows
    place: IntArray  # for each token of the original sequences, concatenated: its index in `tokens`


def build_prefix_tree(sequences: Sequence[IntArray], *, shortest: int = WORTH_SHARING) -> PrefixTree:
    """Lay out sequences with every common prefix of at least `shortest` tokens only once."""
    assert all(len(sequence) for sequence in sequences)
    tree = _Segments(sequences, shortest)
    tree.add(range(len(sequences)), start=0, parent=None)
    lengths = [len(tokens) for tokens, _ in tree.segments]
    return PrefixTree(
        tokens=int_array(np.concatenate([tokens for tokens, _ in tree.segments])),
        positions=int_array(np.concatenate([np.arange(a, a + n) for a, n in zip(tree.starts, lengths, strict=True)])),
        lengths=tuple(lengths),
        parents=tuple(parent for _, parent in tree.segments),
        place=int_array(np.concatenate([np.concatenate(parts) for parts in tree.places])),
    )


class _Segments:
    """Grows the tree of segments, depth first."""

    def __init__(self, sequences: Sequence[IntArray], shortest: int) -> None:
        self.sequences, self.shortest = sequences, shortest
        self.segments: list[tuple[IntArray, int | None]] = []
        self.starts: list[int] = []  # position of each segment's first token
        self.places: list[list[IntArray]] = [[] for _ in sequences]
        self._size = 0

    def add(self, members: Sequence[int], *, start: int, parent: int | None) -> None:
        """Append the segments of the sequences `members` from `start` on; before it they are equal."""
        alike: dict[bytes, list[int]] = {}
        for index in members:
            alike.setdefault(self.sequences[index][start : start + self.shortest].tobytes(), []).append(index)
        for group in alike.values():
            common = self._common_tokens(group, start) if len(group) > 1 else 0
            if common >= self.shortest:
                shared = self._append(group, slice(start, start + common), parent)
                self.add(group, start=start + common, parent=shared)
            else:
                for index in group:
                    self._append([index], slice(start, len(self.sequences[index])), parent)

    def _common_tokens(self, group: Sequence[int], start: int) -> int:
        """Count the tokens from `start` on that all sequences share, leaving each at least one of its own."""
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
