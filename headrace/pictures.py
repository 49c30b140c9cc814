"""Define pictures as they pass between stages: a file's bytes, what a model reads of it, and where in a sequence it is.

No torch, no image library: `headrace.model.vision` decodes pictures with the model's own processor.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PICTURE_MARK = "\ufffc"  # Unicode's object replacement character: where a picture stands in the text of a message


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image file as a task or an environment gives it: PNG, JPEG or another format, not decoded."""

    data: bytes = field(repr=False)
    name: str = ""  # where it came from, for messages to people: a file and row

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the bytes, by which equal pictures are recognised."""
        return hashlib.sha256(self.data).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelImage:
    """A picture as a model's processor prepared it."""

    digest: str  # of the picture and the processor's settings: equal digests have equal pixels
    pixels: npt.NDArray[np.float32] = field(repr=False, compare=False)  # patches or crops on the first axis
    grid: tuple[int, int, int]  # patches in time, height and width; crops: (1, rows, columns)
    num_tokens: int  # image tokens that a sequence has for it

    def __post_init__(self) -> None:
        assert self.num_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """An image of a sequence. Its embeddings replace those of the tokens at `at`, in order.

    Image tokens at any other position are ordinary tokens: a model may sample one.
    """

    image: ModelImage
    at: npt.NDArray[np.int32]  # ascending positions in the sequence

    def __post_init__(self) -> None:
        assert len(self.at) == self.image.num_tokens


class PictureReader(Protocol):
    """Prepares pictures for one model: the processor of its folder."""

    @property
    def template_mark(self) -> str:
        """The text that the chat template writes for one picture."""
        ...

    @property
    def image_token(self) -> int:
        """The token whose embeddings are replaced by those of a picture."""
        ...

    def read(self, picture: Picture) -> ModelImage:
        """Decode, resize and normalise. Raises DataError on bytes that are no picture, with its name."""
        ...

    def text(self, image: ModelImage) -> str:
        """Return the text that takes the place of `template_mark`; it has `num_tokens` image tokens."""
        ...

    def template_content(self, content: str, num_pictures: int) -> Any:
        """Return a message's content, with PICTURE_MARK for each picture, as the chat template takes it."""
        ...
