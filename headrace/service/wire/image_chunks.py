"""Read the image chunks of prompts and data: tokens and pictures for a vision model, a refusal for any other."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import DataError, ModelError, RequestError
from headrace.pictures import Picture, PlacedImage
from headrace.render import PlacedTokens, Renderer
from headrace.types import int_array

FORMATS = ("png", "jpeg")
MAX_IMAGE_BYTES = 32 * 2**20


class ImageChunks:
    """Turns image chunks into tokens; `renderer` is that of the base model, None where it reads text alone."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer

    def read(self, data: bytes, format: str, expected_tokens: int | None, what: str) -> PlacedTokens:
        """Read one image chunk. Raises RequestError that begins with `what`."""
        if self._renderer is None:
            raise RequestError(f"{what}: the base model reads text alone, and this is a chunk of type 'image'")
        if format not in FORMATS:
            raise RequestError(f"{what}: an image has the format {format[:40]!r}: send {' or '.join(FORMATS)}")
        if len(data) > MAX_IMAGE_BYTES:
            raise RequestError(f"{what}: an image has {len(data)} bytes, and may have {MAX_IMAGE_BYTES}")
        picture = Picture(data=data, name=what)
        if picture.media_type != f"image/{format}":
            raise RequestError(f"{what}: an image is sent as {format}, and its bytes are not")
        try:
            placed = self._renderer.picture_tokens(picture)
        except (DataError, ModelError) as exc:
            raise RequestError(str(exc)) from exc
        if expected_tokens is not None and expected_tokens != len(placed.tokens):
            raise RequestError(
                f"{what}: an image has {len(placed.tokens)} tokens here, and the chunk expects {expected_tokens}"
            )
        return placed


TEXT_ONLY = ImageChunks(None)


def join_chunks(parts: Sequence[PlacedTokens]) -> PlacedTokens:
    """Put the tokens of chunks one after the other, with the pictures at their places."""
    images: list[PlacedImage] = []
    start = 0
    for part in parts:
        images += [replace(placed, at=int_array(placed.at + start)) for placed in part.images]
        start += len(part.tokens)
    tokens = [part.tokens for part in parts]
    return PlacedTokens(
        tokens=int_array(np.concatenate(tokens) if tokens else np.zeros(0, np.int32)), images=tuple(images)
    )
