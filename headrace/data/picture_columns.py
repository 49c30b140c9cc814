"""Read the pictures of a row: from its column `images`, and from messages as OpenAI writes them.

A picture that is missing, cannot be decoded or is too large raises `PictureError`; loaders leave its row out, and
say so.
"""

import base64
import importlib
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.data.rows import DataRow
from headrace.errors import ConfigError, DataError, PictureError, boundary
from headrace.pictures import PICTURE_MARK, Picture, from_data_uri
from headrace.types import Message

logger = logging.getLogger(__name__)

MAX_PICTURE_BYTES = 32 * 2**20  # of a file
MAX_PIXELS = 64 * 10**6
MAX_PATH = 1000  # characters
MOST_NAMED = 10  # rows left out that are logged one by one
PLACEHOLDERS = ("<image>", "<|image|>")  # where a text has its pictures, in data written for other trainers


class PictureColumn:
    """Gives out the pictures of a row's column in order, as its messages ask for them."""

    def __init__(self, row: DataRow, column: str | None) -> None:
        self.column, self.num_taken = column, 0
        self._place, self._base = row.place, row.folder
        value = None if column is None else row.columns[column]
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
        self._values: list[Any] = [] if value is None else list(value) if several else [value]

    @property
    def num_left(self) -> int:
        return len(self._values) - self.num_taken

    def take(self) -> Picture:
        """Read the next picture of the column."""
        if not self.num_left:
            raise PictureError(
                f"{self._place}: the messages have more pictures than the column images, which has {len(self._values)}"
            )
        self.num_taken += 1
        return read_picture(self._values[self.num_taken - 1], f"{self._place}, picture {self.num_taken}", self._base)

    def read_part(self, part: Mapping[str, Any]) -> Picture:
        """Read the picture of a part of a message: OpenAI's `image_url`, or `image`, which has one or stands for one
        of the column."""
        kind = str(part["type"])
        value = part.get(kind)
        if isinstance(value, Mapping) and isinstance(value.get("url"), str):
            value = value["url"]
        elif value is None and kind == "image":
            value = next((part[key] for key in ("path", "url", "base64", "data") if part.get(key) is not None), None)
            if value is None:
                return self.take()
        return read_picture(value, f"{self._place}, a picture of its messages", self._base)

    def check_all_taken(self) -> None:
        if self.num_left:
            raise PictureError(
                f"{self._place}: the column images has {len(self._values)} pictures and the messages have "
                f"{self.num_taken} of them"
            )


def read_picture(value: Any, name: str, folder: Path) -> Picture:
    """Read a picture and check that it can be decoded.

    `value` is bytes, a path relative to `folder`, a data URI, base64, an object with `bytes` or `path` (as datasets of
    the hub have it), or a picture of Pillow. Raises PictureError with `name`.
    """
    picture = Picture(data=_bytes_of(value, name, folder), name=name)
    check_picture(picture)
    return picture


def check_picture(picture: Picture) -> None:
    """Decode a picture once. Raises PictureError with its name if that fails, or if it is too large."""
    image_module = _pillow()
    if len(picture.data) > MAX_PICTURE_BYTES:
        raise PictureError(
            f"{picture.name}: the file has {len(picture.data):,} bytes, and a picture may have {MAX_PICTURE_BYTES:,}"
        )
    with boundary(PictureError, f"{picture.name}: it cannot be decoded as a picture"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of sizes that are above our limit
        try:
            with image_module.open(io.BytesIO(picture.data)) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise PictureError(
                        f"{picture.name}: it has {width} x {height} pixels, and a picture may have {MAX_PIXELS:,}"
                    )
                image.load()
        except image_module.UnidentifiedImageError:  # its message has the address of an object
            raise PictureError(
                f"{picture.name}: its {len(picture.data)} bytes are no picture that Pillow knows"
            ) from None


def place_pictures(messages: tuple[Message, ...], pictures: PictureColumn) -> tuple[Message, ...]:
    """Put the pictures that no message has asked for where their texts have placeholders, as many as there are
    pictures; without placeholders, at the start of the first message of the user."""
    num_left = pictures.num_left
    if not num_left:
        return messages
    for placeholder in PLACEHOLDERS:
        if sum(message.content.count(placeholder) for message in messages) == num_left:
            return tuple(_filled(message, placeholder, pictures) for message in messages)
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None or any(message.images for message in messages):
        pictures.check_all_taken()
    assert first is not None
    images = tuple(pictures.take() for _ in range(num_left))
    return tuple(
        with_pictures(message, images, PICTURE_MARK * num_left + plain_text(message.content))
        if index == first
        else message
        for index, message in enumerate(messages)
    )


def with_pictures(message: Message, images: Sequence[Picture], content: str) -> Message:
    """Return a message with this content and the pictures at its marks."""
    return Message(
        role=message.role,
        content=content,
        name=message.name,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        images=tuple(images),
    )


def _filled(message: Message, placeholder: str, pictures: PictureColumn) -> Message:
    count = message.content.count(placeholder)
    if not count:
        return message
    images = [pictures.take() for _ in range(count)]
    if message.images:
        raise PictureError(f"{images[0].name}: a message has both parts and placeholders for pictures: use one of them")
    return with_pictures(message, images, plain_text(message.content).replace(placeholder, PICTURE_MARK))


def plain_text(text: str) -> str:
    """Remove marks of pictures that a text brings along; they stand for nothing."""
    return text.replace(PICTURE_MARK, "")


def _bytes_of(value: Any, name: str, folder: Path) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return _bytes_of(value["bytes"], name, folder)
        if isinstance(value.get("url"), str):
            return _bytes_of(value["url"], name, folder)
        if isinstance(value.get("path"), str):
            return _file(value["path"], name, folder)
    if isinstance(value, str):
        return _from_text(value, name, folder)
    if hasattr(value, "save") and hasattr(value, "mode"):  # a picture of Pillow
        written = io.BytesIO()
        value.save(written, format="PNG")
        return written.getvalue()
    raise PictureError(
        f"{name}: a picture must be a path, bytes, base64 or a data URI, this is {type(value).__name__}"
        if value is not None
        else f"{name}: there is none, where a path, bytes, base64 or a data URI should be"
    )


def _from_text(text: str, name: str, folder: Path) -> bytes:
    if text.startswith("data:"):
        try:
            return from_data_uri(text).data
        except ValueError as exc:
            raise PictureError(f"{name}: the data URI cannot be read ({exc})") from exc
    if text.startswith(("http://", "https://")):
        raise PictureError(f"{name}: {text[:80]} is not fetched: write the file beside the data and its path here")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    if Picture(data=data).media_type:  # a path could be base64, but not of a picture's first bytes
        return data
    if len(text) > MAX_PATH:
        raise PictureError(f"{name}: {text[:40]}... is neither a path nor a picture in base64")
    return _file(text, name, folder)


def _file(path: str, name: str, folder: Path) -> bytes:
    file = folder / Path(path.removeprefix("file://")).expanduser()
    try:
        if file.stat().st_size > MAX_PICTURE_BYTES:
            raise PictureError(f"{name}: {file} has more than {MAX_PICTURE_BYTES:,} bytes, the most of a picture")
        return file.read_bytes()
    except (OSError, ValueError) as exc:
        raise PictureError(f"{name}: {file} cannot be read ({exc})") from exc


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as exc:
        raise ConfigError("pictures need the package pillow: pip install 'headrace[vision]'") from exc


class LeftOut:
    """Counts rows that are left out for their pictures; the first ones are logged one by one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.count = 0
        self.first = ""

    def add(self, problem: PictureError) -> None:
        self.first = self.first or str(problem)
        self.count += 1
        if self.count <= MOST_NAMED:
            logger.warning("%s; the row is left out", problem)

    def log(self, num_kept: int) -> None:
        """Log how many rows of all were left out. Raises DataError if none is kept."""
        if not self.count:
            return
        if not num_kept:
            raise DataError(f"all {self.count} rows of {self._what} are left out for their pictures: {self.first}")
        logger.warning(
            "%d of %d rows of %s are left out for their pictures",
            self.count,
            self.count + num_kept,
            self._what,
            extra={"about_run": f"pictures: {self._what}"},
        )
