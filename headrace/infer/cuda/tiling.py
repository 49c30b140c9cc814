"""Choose tile sizes: how rows, prompts and keys are divided among the kernels' programs. Plain numbers, no device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.model.attention import PromptChunk

BUCKETS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # and multiples of 64 above
PROMPT_ROWS = 64  # query tokens of one program
FULL = 528  # programs that keep all processors of a large card busy
MOST_SPLITS = 16


def bucket_for(rows: int) -> int:
    """Return the smallest number of rows that a graph is captured for and that holds `rows`."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), -(-rows // 64) * 64)


def splits_for(rows: int, heads: int) -> int:
    """Return into how many parts a row's keys are split at most, so that few rows use the whole card: a power of 2."""
    splits = max(1, FULL // (rows * heads))
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
