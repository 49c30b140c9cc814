"""Lay packed sequences out in chunks, and the rows of an engine's step in runs of one slot each.

A chunk has `CHUNK` places for consecutive tokens of one segment; its predecessor is the chunk before it in the segment,
or the last chunk of the segment's parent. All chunks at one depth of these chains are computed together.

Shape letters: T tokens, N chunks, C places of a chunk, R runs, K taps of a convolution.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from headrace.model.attention import Cached, Packed
from headrace.model.device import to_device

CHUNK = 64
SMALL = 16  # chunks of short sequences are a multiple of this

Parents = tuple[int | None, ...]
CPU = torch.device("cpu")


def _place(device: torch.device) -> tuple[torch.device, int]:
    """Return where a layout is used: a device and its present stream, because another one does not wait for copies."""
    return device, torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


@dataclass(frozen=True, slots=True)
class Chains:
    """The chunks of each segment in their order, for kernels that follow them; all tensors are on the device."""

    segments: int  # S
    ids_N: Tensor  # the chunks of the first segment, then of the second...
    begins_S: Tensor  # place of a segment's first among them
    counts_S: Tensor
    parents_S: Tensor  # -1 where there is none
    child_ends_S: Tensor  # the children of segment s are children[child_ends[s] : child_ends[s + 1]]
    children: Tensor
    levels: tuple[Tensor, ...]  # the segments without a parent, then those behind these...


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Places every token of packed segments in a chunk; chunks are sorted by depth."""

    size: int  # C
    places_T: Tensor  # of token t among N * C places
    depths: tuple[int, ...]  # how many chunks each depth has
    predecessors: tuple[Tensor, ...]  # for each depth after the first: the chunk's predecessor among those before it
    chains: Chains

    @property
    def chunks(self) -> int:
        return sum(self.depths)


def chunk_layout(context: Packed, device: torch.device = CPU) -> ChunkLayout:
    """Lay out the segments of a context in chunks, with the tensors on a device."""
    return _chunk_layout(context.lengths, context.parents or (None,) * len(context.lengths), _place(device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _chunk_layout(lengths: tuple[int, ...], parents: Parents, place: tuple[torch.device, int]) -> ChunkLayout:
    size = min(CHUNK, -(-max(lengths) // SMALL) * SMALL)
    if place[0].type == "cuda":
        size = 1 << (size - 1).bit_length()  # kernels want powers of two
    chunks_at: list[list[tuple[int, int]]] = []  # of each depth: segment, and the chunk's number in it
    firsts, numbers = list[int](), list[int]()  # of each segment: depth of its first chunk, number of chunks
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        assert length > 0
        firsts.append(0 if parent is None else firsts[parent] + numbers[parent])
        numbers.append(-(-length // size))
        for number in range(numbers[-1]):
            depth = firsts[-1] + number
            if depth == len(chunks_at):
                chunks_at.append([])
            chunks_at[depth].append((segment, number))
    index = {chunk: number for number, chunk in enumerate(chunk for level in chunks_at for chunk in level)}
    local = {chunk: number for level in chunks_at for number, chunk in enumerate(level)}
    predecessors = []
    for level in chunks_at[1:]:
        before = []
        for segment, number in level:
            parent = parents[segment]
            if number:
                before.append(local[segment, number - 1])
            else:
                assert parent is not None
                before.append(local[parent, numbers[parent] - 1])
        predecessors.append(to_device(torch.tensor(before), place[0]))
    places = []
    for segment, length in enumerate(lengths):
        for number in range(numbers[segment]):
            start = index[segment, number] * size
            places.append(torch.arange(start, start + min(size, length - number * size)))
    places_T = to_device(torch.cat(places), place[0])
    ids = [[index[segment, number] for number in range(numbers[segment])] for segment in range(len(lengths))]
    chains = _chains(ids, parents, place[0])
    return ChunkLayout(size, places_T, tuple(len(level) for level in chunks_at), tuple(predecessors), chains)


def _chains(ids: Sequence[Sequence[int]], parents: Parents, device: torch.device) -> Chains:
    segments = range(len(parents))
    children = [[child for child in segments if parents[child] == segment] for segment in segments]
    levels = [[segment for segment in segments if parents[segment] is None]]
    while below := [child for segment in levels[-1] for child in children[segment]]:
        levels.append(below)

    def on_device(numbers: Iterable[int]) -> Tensor:
        return to_device(torch.tensor(list(numbers), dtype=torch.int32), device)

    return Chains(
        segments=len(parents),
        ids_N=on_device(chain.from_iterable(ids)),
        begins_S=on_device(accumulate((len(part) for part in ids[:-1]), initial=0)),
        counts_S=on_device(map(len, ids)),
        parents_S=on_device(-1 if parent is None else parent for parent in parents),
        child_ends_S=on_device(accumulate(map(len, children), initial=0)),
        children=on_device(chain.from_iterable(children)),
        levels=tuple(map(on_device, levels)),
    )


def spread_over_chunks(x: Tensor, layout: ChunkLayout) -> Tensor:
    """Put the tokens of [T, H, ...] into chunks [N, H, C, ...], with zeros at empty places."""
    empty = x.new_zeros(layout.chunks * layout.size, *x.shape[1:])
    placed = empty.index_copy(0, layout.places_T, x)
    return placed.view(layout.chunks, layout.size, *x.shape[1:]).transpose(1, 2)


def running_sums(x_NHC: Tensor) -> Tensor:
    """Add up along a chunk. On CUDA it is a product with ones, because torch's own sums have no fixed order there."""
    if not x_NHC.is_cuda:
        return x_NHC.cumsum(dim=-1)
    return x_NHC @ torch.ones(x_NHC.shape[-1], x_NHC.shape[-1], dtype=x_NHC.dtype, device=x_NHC.device).triu()


def packed_taps(context: Packed, taps: int, device: torch.device = CPU) -> Tensor:
    """Return [T, K]: the tokens that a causal convolution sees at each token, its own last; T where there is none."""
    return _packed_taps(context.lengths, context.parents or (None,) * len(context.lengths), taps, _place(device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _packed_taps(lengths: tuple[int, ...], parents: Parents, taps: int, place: tuple[torch.device, int]) -> Tensor:
    total = sum(lengths)
    rows_TK = torch.arange(total)[:, None] - torch.arange(taps - 1, -1, -1)
    tails: list[list[int]] = []  # the last tokens up to the end of each segment
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        before = [total] * (taps - 1) if parent is None else tails[parent]
        chained = [*before, *range(start, start + length)]
        for offset in range(min(length, taps - 1)):
            rows_TK[start + offset] = torch.tensor(chained[offset : offset + taps])
        tails.append(chained[len(chained) - (taps - 1) :])
        start += length
    return to_device(rows_TK, place[0])


@dataclass(frozen=True, slots=True)
class TapUses:
    """The places t K + k of each token among the taps: places[ends[t] : ends[t + 1]]."""

    places: Tensor
    ends_T: Tensor


def tap_uses(context: Packed, taps: int, device: torch.device = CPU) -> TapUses:
    """Return where each token is seen by a convolution of that many taps."""
    return _tap_uses(context.lengths, context.parents or (None,) * len(context.lengths), taps, _place(device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _tap_uses(lengths: tuple[int, ...], parents: Parents, taps: int, place: tuple[torch.device, int]) -> TapUses:
    rows_N = _packed_taps(lengths, parents, taps, (CPU, 0)).flatten()
    total = sum(lengths)
    counts = torch.bincount(rows_N, minlength=total)[:total]
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    places = torch.argsort(rows_N, stable=True)[: int(ends[-1])]  # those that see nothing have the last number
    return TapUses(to_device(places.int(), place[0]), to_device(ends.int(), place[0]))


# --- slots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """The rows of an engine's step that continue a slot: one of a decoding sequence, several of a prompt's chunk.

    Sorted by length, the longest first.
    """

    slots_R: Tensor
    starts_R: Tensor  # row of the run's first token
    lengths: tuple[int, ...]
    rows: int  # of the step, with those that continue nothing
    begins: tuple[int, ...]  # `starts_R`, for the host
    lengths_R: Tensor | None = None  # int32, for kernels


def slot_runs(context: Cached, rows: int) -> SlotRuns:
    """Find the runs of a step of `rows` rows. A decode row at the last position of its slot is idle."""
    if context.runs is not None:
        return context.runs  # type: ignore[no-any-return]
    runs: list[tuple[int, int, int]] = []
    start = 0
    if context.mask is not None:
        start = context.mask.shape[0]
        active = context.active
        if active is None:
            idle = context.cache.tokens - 1
            active = tuple(row for row, place in enumerate(context.positions[:start].tolist()) if place != idle)
        runs += [(1, row, row) for row in active]
    for chunk in context.chunks:
        runs.append((chunk.length, chunk.row, start))
        start += chunk.length
    runs.sort(key=lambda run: -run[0])
    return _slot_runs(tuple(runs), rows, _place(context.positions.device))


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _slot_runs(runs: tuple[tuple[int, int, int], ...], rows: int, place: tuple[torch.device, int]) -> SlotRuns:
    slots, starts, lengths = (torch.tensor([run[part] for run in runs], dtype=torch.long) for part in (1, 2, 0))
    return SlotRuns(
        slots_R=to_device(slots, place[0]),
        starts_R=to_device(starts, place[0]),
        lengths=tuple(lengths.tolist()),
        rows=rows,
        begins=tuple(starts.tolist()),
        lengths_R=to_device(lengths.int(), place[0]),
    )


def slot_taps(runs: SlotRuns, taps: int) -> tuple[Tensor, Tensor]:
    """Return [T, K], the inputs that a convolution sees at each row, and [R, K - 1], those that become the state.

    Inputs are numbered: K - 1 of each run's state first, then the step's rows, then one of zeros.
    """
    return _slot_taps(runs.begins, runs.lengths, runs.rows, taps, _place(runs.starts_R.device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _slot_taps(
    starts: tuple[int, ...], lengths: tuple[int, ...], rows: int, taps: int, place: tuple[torch.device, int]
) -> tuple[Tensor, Tensor]:
    before = taps - 1
    first = len(starts) * before
    rows_TK = torch.full((rows, taps), first + rows)
    states: list[Sequence[int]] = []
    for run, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        chained = torch.cat(
            [torch.arange(run * before, (run + 1) * before), torch.arange(first + start, first + start + length)]
        )
        rows_TK[start : start + length] = chained.unfold(0, taps, 1)
        states.append(chained[len(chained) - before :].tolist())
    kept_RK = torch.tensor(states, dtype=torch.long).view(len(starts), before)
    return to_device(rows_TK, place[0]), to_device(kept_RK, place[0])
