"""Lay packed sequences out in chunks, and the rows of an engine's step in runs of one slot each.

A chunk has `CHUNK` places for consecutive tokens of one segment; its predecessor is the chunk before it in the segment,
or the last chunk of the segment's parent. All chunks at one depth of these chains are computed together.

Shape letters: T tokens, N chunks, C places of a chunk, R runs, K taps of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
class ChunkLayout:
    """Places every token of packed segments in a chunk; chunks are sorted by depth."""

    size: int  # C
    places_T: Tensor  # of token t among N * C places
    depths: tuple[int, ...]  # how many chunks each depth has
    predecessors: tuple[Tensor, ...]  # for each depth after the first: the chunk's predecessor among those before it

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
    return ChunkLayout(size, places_T, tuple(len(level) for level in chunks_at), tuple(predecessors))


def spread_over_chunks(x: Tensor, layout: ChunkLayout) -> Tensor:
    """Put the tokens of [T, H, ...] into chunks [N, H, C, ...], with zeros at empty places."""
    empty = x.new_zeros(layout.chunks * layout.size, *x.shape[1:])
    placed = empty.index_copy(0, layout.places_T, x)
    return placed.view(layout.chunks, layout.size, *x.shape[1:]).transpose(1, 2)


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
        chain = [*before, *range(start, start + length)]
        for offset in range(min(length, taps - 1)):
            rows_TK[start + offset] = torch.tensor(chain[offset : offset + taps])
        tails.append(chain[len(chain) - (taps - 1) :])
        start += length
    return to_device(rows_TK, place[0])


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


def slot_runs(context: Cached, rows: int) -> SlotRuns:
    """Find the runs of a step of `rows` rows. A decode row at the last position of its slot is idle."""
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
        chain = torch.cat(
            [torch.arange(run * before, (run + 1) * before), torch.arange(first + start, first + start + length)]
        )
        rows_TK[start : start + length] = chain.unfold(0, taps, 1)
        states.append(chain[len(chain) - before :].tolist())
    kept_RK = torch.tensor(states, dtype=torch.long).view(len(starts), before)
    return to_device(rows_TK, place[0]), to_device(kept_RK, place[0])
