"""Keep the pictures of saved episodes as files, each once, in a folder `pictures` beside the rollout files.

A file is named by the digest of its bytes. The folder is bounded: beyond `MAX_BYTES` no further picture is written, and
episodes are saved without theirs.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.rollouts.records import MessageRecord
from headrace.pictures import PICTURE_MARK, Picture
from headrace.storage import atomic_files

logger = logging.getLogger(__name__)

FOLDER = "pictures"
PICTURE_TEXT = "[picture]"  # in shown texts, for the mark of one
MAX_BYTES = 2**30  # of the files of one folder
MAX_SHOWN_BYTES = 2**20  # of a picture in a page
MAX_PAGE_BYTES = 16 * 2**20  # of all pictures of a page
_NAME = re.compile(r"[0-9a-f]{64}\.(png|jpeg|gif|webp|bmp|tiff|bin)")
_SHOWN = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")  # that browsers show and cannot run


def shown_content(message: MessageRecord) -> str:
    """Return the text of a message as readers see it: words in place of the marks of pictures."""
    return message.content.replace(PICTURE_MARK, PICTURE_TEXT) if message.images else message.content


def picture_file_name(picture: Picture) -> str:
    """Name the file of a picture: "<SHA-256>.png"."""
    return f"{picture.digest}.{picture.media_type.removeprefix('image/') or 'bin'}"


def save_pictures(folder: Path, pictures: Iterable[Picture]) -> None:
    """Write pictures that are not there yet beside the rollout files of `folder`, until the bound is reached."""
    by_name = {picture_file_name(picture): picture for picture in pictures}
    if not by_name:
        return
    target = folder / FOLDER
    with boundary(RunFolderError, f"cannot write {target}"):
        atomic_files.make_folder(target)
        sizes = {file.name: file.stat().st_size for file in target.iterdir()}
        total = sum(sizes.values())
        for name, picture in by_name.items():
            if name in sizes:
                continue
            if total + len(picture.data) > MAX_BYTES:
                same = {"repeats": f"pictures are full: {target}"}
                logger.warning("%s has %d MiB of pictures; no more are saved", target, total >> 20, extra=same)
                return
            atomic_files.write_bytes(target / name, picture.data)
            total += len(picture.data)


def load_picture(folder: Path, name: str) -> Picture:
    """Load a picture that an episode of a rollout file in `folder` names. Raises RunFolderError if it is not there."""
    if not _NAME.fullmatch(name):
        raise RunFolderError(f"{folder} has an episode whose picture is called {name[:80]!r}: that is no name of ours")
    with boundary(RunFolderError, f"a picture of a saved episode cannot be read from {folder / FOLDER}"):
        picture = Picture(data=(folder / FOLDER / name).read_bytes(), name=name)
    if picture.digest != name.partition(".")[0]:
        raise RunFolderError(f"{folder / FOLDER / name} is not the picture it was: its bytes have another digest")
    return picture


class ShownPictures:
    """Gives out the pictures of one page as URIs that hold them, within a bound; "" for one that cannot be shown."""

    def __init__(self, *, max_bytes: int = MAX_PAGE_BYTES) -> None:
        self._left = max_bytes
        self._known: dict[Path, str] = {}

    def uri(self, folder: Path, name: str) -> str:
        """Return the URI of a picture beside a rollout file in `folder`."""
        path = folder / FOLDER / name
        if path not in self._known:
            self._known[path] = self._read(folder, name)
        return self._known[path]

    def _read(self, folder: Path, name: str) -> str:
        try:
            if (folder / FOLDER / name).stat().st_size > MAX_SHOWN_BYTES:
                return ""
            picture = load_picture(folder, name)
        except (OSError, ValueError, RunFolderError):
            return ""
        uri = picture.data_uri
        if picture.media_type not in _SHOWN or len(uri) > self._left:
            return ""
        self._left -= len(uri)
        return uri
