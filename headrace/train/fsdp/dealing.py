"""Deal the data of a request to ranks by tokens. Pure: the same data are dealt alike everywhere.

Data of one unit (a pair, a group) stay on one rank, and data with the same beginning stay together as far as the ranks
stay even, so that a shared prompt is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.algo.packing import WORTH_SHARING, join_by_prefix, pack
from headrace.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a request; a rank may get nothing."""

    indices: tuple[int, ...]  # of the data in the request, in their order
    data: tuple[Datum, ...]
    micro_batches: tuple[tuple[int, ...], ...]  # indices into `data`
    num_micro_batches: int  # on every rank: those that are missing here are filled up


def deal(data: Sequence[Datum], num_ranks: int, *, budget: int) -> tuple[Share, ...]:
    """Deal data to ranks, the largest first, each to the rank that has the fewest tokens; ties go to the lower rank.

    `budget`: tokens of a micro-batch.
    """
    assert num_ranks > 0
    lengths = [datum.num_tokens for datum in data]
    members: dict[tuple[str, int], list[int]] = {}
    for index, datum in enumerate(data):
        key = ("own", index) if datum.unit is None else ("unit", datum.unit)
        members.setdefault(key, []).append(index)
    even = -(-sum(lengths) // num_ranks)  # more than this on one rank makes the others wait
    together = join_by_prefix(list(members.values()), lengths, [_beginning(datum) for datum in data], min(budget, even))
    sized = sorted(together, key=lambda indices: (-sum(lengths[index] for index in indices), indices[0]))
    tokens, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for indices in sized:
        rank = tokens.index(min(tokens))
        tokens[rank] += sum(lengths[index] for index in indices)
        dealt[rank] += indices
    batches = [_pack(data, sorted(indices), budget=budget) for indices in dealt]
    most = max(len(packed) for packed in batches)
    return tuple(
        Share(
            indices=tuple(sorted(indices)),
            data=tuple(data[index] for index in sorted(indices)),
            micro_batches=packed,
            num_micro_batches=most,
        )
        for indices, packed in zip(dealt, batches, strict=True)
    )


def _pack(data: Sequence[Datum], indices: Sequence[int], *, budget: int) -> tuple[tuple[int, ...], ...]:
    if not indices:
        return ()
    return pack(
        [data[index].num_tokens for index in indices],
        [data[index].unit for index in indices],
        budget=budget,
        beginnings=[_beginning(data[index]) for index in indices],
    )


def _beginning(datum: Datum) -> bytes:
    return datum.inputs[:WORTH_SHARING].tobytes()
