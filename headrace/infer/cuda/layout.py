"""How rows, prompts and keys are cut up for the kernels: plain numbers, no device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.model.attention import Piece

BUCKETS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # and multiples of 64 above
PROMPT_ROWS = 64  # query tokens of one program
FULL = 528  # programs that keep all processors of a large card busy
MOST_SPLITS = 16


def bucket_for(rows: int) -> int:
    """The smallest number of rows a graph is captured for that holds `rows`."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), -(-rows // 64) * 64)


def splits_for(rows: int, heads: int) -> int:
    """Into how many chunks a row's keys are cut at most, so that few rows still use the whole card: a power of 2."""
    wanted = max(1, FULL // (rows * heads))
    return min(MOST_SPLITS, 1 << (wanted - 1).bit_length())


def prompt_blocks(pieces: Sequence[Piece]) -> npt.NDArray[np.int32]:
    """[blocks, 4]: slot, index of the first token, its position, tokens. The pieces' tokens lie end to end."""
    blocks, first = [], 0
    for piece in pieces:
        for start in range(0, piece.length, PROMPT_ROWS):
            count = min(PROMPT_ROWS, piece.length - start)
            blocks.append((piece.row, first + start, piece.offset + start, count))
        first += piece.length
    return np.array(blocks, dtype=np.int32)
