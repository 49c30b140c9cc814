"""Define pictures as they pass between stages: a file's bytes, what a model reads of it, and where in a sequence it is.

No torch, no image library: `headrace.model.vision` decodes pictures with the model's own processor.
"""

import base64
import hashlib
from collections.abc import Sequence
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

    @property
    def media_type(self) -> str:
        """Return the media type that the first bytes say, "image/png" for example; "" if they say none."""
        if self.data[:4] == b"RIFF" and self.data[8:12] == b"WEBP":
            return "image/webp"
        return next((kind for start, kind in _FIRST_BYTES.items() if self.data.startswith(start)), "")

    @property
    def data_uri(self) -> str:
        """Return the picture as a URI that holds all of it, as pages and OpenAI's messages have it."""
        kind = self.media_type or "application/octet-stream"
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


_FIRST_BYTES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"II*\x00": "image/tiff",
    b"MM\x00*": "image/tiff",
}


def from_data_uri(uri: str, *, name: str = "") -> Picture:
    """Read a picture out of a URI that holds it. Raises ValueError if it is none, or not in base64."""
    head, comma, encoded = uri.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise ValueError("it is no URI of the form data:image/png;base64,...")
    return Picture(data=base64.b64decode(encoded, validate=True), name=name)


def content_parts(content: str, images: Sequence[Picture]) -> list[dict[str, Any]]:
    """Write a message's content with pictures in OpenAI's form: parts of text and parts of pictures, in order."""
    texts = content.split(PICTURE_MARK)
    assert len(texts) == len(images) + 1
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        if index:
            parts.append({"type": "image_url", "image_url": {"url": images[index - 1].data_uri}})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


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


def image_marks(tokens: npt.NDArray[np.int32], images: Sequence[PlacedImage]) -> npt.NDArray[np.int32]:
    """Return the tokens with those that images replace as negative numbers made of the image's digest.

    Two sequences have the same tokens and pictures up to a position where these are equal. Without images it is the
    same array.
    """
    if not images:
        return tokens
    marked = np.array(tokens, dtype=np.int32)
    for placed in images:
        stream = hashlib.shake_256(placed.image.digest.encode()).digest(4 * len(placed.at))
        marked[placed.at] = -1 - (np.frombuffer(stream, dtype="<u4") >> 1).astype(np.int32)
    marked.setflags(write=False)
    return marked


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
