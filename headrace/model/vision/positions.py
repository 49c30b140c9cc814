"""Give the tokens of a sequence their rotary positions in time, height and width.

A text token has three equal positions. The tokens of an image start at the position after the text before it and have
the row and column of their place in it; the text behind goes on after the larger of the image's height and width. So
the position of a token behind an image is not its index.

Shape letters: N tokens of a sequence.
"""

from collections.abc import Sequence

import numpy as np

from headrace.pictures import PlacedImage
from headrace.types import IntArray, int_array


def rotary_positions(length: int, images: Sequence[PlacedImage], *, merge: int) -> IntArray:
    """Return positions [3, N]. `merge`: patches of a token in height and width."""
    positions = np.empty((3, length), dtype=np.int32)
    done = following = 0  # tokens that have a position, and the position of the next
    for placed in sorted(images, key=lambda one: int(one.at[0])):
        start, count = int(placed.at[0]), len(placed.at)
        height, width = placed.image.grid[1] // merge, placed.image.grid[2] // merge
        positions[:, done:start] = np.arange(following, following + start - done)
        following += start - done
        span = slice(start, start + count)
        positions[0, span] = following
        positions[1, span] = following + np.arange(count) // width
        positions[2, span] = following + np.arange(count) % width
        following += max(height, width)
        done = start + count
    positions[:, done:] = np.arange(following, following + length - done)
    return int_array(positions)


def rotary_shift(positions: IntArray) -> int:
    """Return what to add to the index of a token behind a sequence to get its position."""
    furthest, length = int(positions.max(initial=-1)), int(positions.shape[1])
    return furthest + 1 - length


def image_fault(images: Sequence[PlacedImage], length: int, *, merge: int | None) -> str | None:
    """Say what is wrong with the images of a sequence of this length; None if nothing is.

    `merge`: of types whose positions have three axes.
    """
    taken = np.zeros(length, dtype=bool)
    for placed in images:
        at = placed.at
        if at.ndim != 1 or int(at[0]) < 0 or int(at[-1]) >= length or (np.diff(at) <= 0).any():
            return f"an image lies outside of the {length} tokens, or its positions are not ascending"
        if taken[at].any():
            return "two images take the same tokens"
        taken[at] = True
        if merge is None:
            continue
        grid = placed.image.grid
        if grid[0] != 1 or (grid[1] // merge) * (grid[2] // merge) != placed.image.num_tokens:
            return f"an image of {placed.image.num_tokens} tokens has a grid of {grid} patches, which is another number"
        if int(at[-1]) - int(at[0]) + 1 != len(at):
            return "the tokens of an image do not lie side by side"
    return None
