"""Choose tile sizes: how rows, prompts and keys are divided among the kernels' programs. Plain numbers, no device."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from headrace.model.attention import PromptChunk

BUCKETS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # and multiples of 64 above
PROMPT_ROWS = 64  # query tokens of one program
FULL = 528  # programs that keep all processors of a large card busy
FEW = 256  # rows x heads up to which keys are split further, so that no long chunk is left to run alone at the end
MOST_SPLITS = 16
LEAST_KEYS = 128  # of a chunk, where there are many
ROOMS = (4, 8, 20, 72)  # blocks of adapters
DECODE_BLOCK, PROMPT_BLOCK = 16, 64  # neighbouring rows of one adapter that a program multiplies together


def bucket_for(rows: int) -> int:
    """Return the smallest number of rows that a graph is captured for and that holds `rows`."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), -(-rows // 64) * 64)


def splits_for(rows: int, heads: int) -> int:
    """Return into how many parts a row's keys are split at most, so that few rows use the whole card: a power of 2."""
    splits = max(1, (4 * FULL if rows * heads <= FEW else FULL) // (rows * heads))
    return min(MOST_SPLITS, 1 << (splits - 1).bit_length())


def prompt_blocks(chunks: Sequence[PromptChunk]) -> npt.NDArray[np.int32]:
    """Divide prompt chunks, whose tokens lie end to end, into blocks.

    Returns [blocks, 4]: slot, index of the first token, its position, number of tokens.
    """
    blocks, first = [], 0
    for chunk in chunks:
        for start in range(0, chunk.length, PROMPT_ROWS):
            count = min(PROMPT_ROWS, chunk.length - start)
            blocks.append((chunk.row, first + start, chunk.offset + start, count))
        first += chunk.length
    return np.array(blocks, dtype=np.int32)


def adapter_blocks(runs: Iterable[tuple[int, int]], rows_of_block: int) -> npt.NDArray[np.int32]:
    """Divide rows, given as runs of (adapter, rows), into blocks of one adapter each.

    Returns [blocks, 3]: adapter, first row, number of rows.
    """
    blocks, first = [], 0
    for adapter, members in groupby(runs, key=lambda run: run[0]):
        rows = sum(count for _, count in members)
        starts = range(first, first + rows, rows_of_block)
        blocks += [(adapter, start, min(rows_of_block, first + rows - start)) for start in starts]
        first += rows
    return np.array(blocks, dtype=np.int32).reshape(-1, 3)


def room_for_blocks(rows: int, blocks: int) -> int:
    """Return for how many blocks of adapters a graph of `rows` rows is captured: few sizes, because each is a graph,
    and not the largest for all, because programs without a block take time too."""
    return min(rows, next((room for room in ROOMS if blocks <= room), rows))
