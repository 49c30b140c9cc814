"""Which data go into which micro-batch: by a token budget, never splitting a unit.

Pure bookkeeping over lengths; it may not change a gradient, because losses are plain sums (see `algo/losses.py`).
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], units: Sequence[int | None], *, budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices of each micro-batch: first-fit decreasing over units, at most `budget` tokens each.

    A unit longer than the budget gets a micro-batch of its own (it cannot be split). Inside a micro-batch the
    original order is kept. Deterministic: ties are broken by position.
    """
    assert len(lengths) == len(units)
    assert budget > 0
    members: dict[tuple[str, int], list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault(("own", index) if unit is None else ("unit", unit), []).append(index)
    sized = sorted(
        ((sum(lengths[index] for index in indices), indices) for indices in members.values()),
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
