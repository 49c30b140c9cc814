"""Write files and folders so that a reader finds them whole or not at all, also after a crash.

A file or folder is written under a temporary name beside its place, flushed to disk and renamed; then the folder it is
in is flushed, so that the new name outlives a power loss from the moment the function returns. Every function may raise
OSError; what was there before then stays.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str | Iterable[str], *, temporary: Path | None = None) -> None:
    """Write a file and rename it into place; `text` may come in parts, so that it need not be in memory as a whole.

    `temporary` is the path to write to first; the default is the file's with `.tmp` appended. A link at either path is
    replaced and never followed: a folder may come from a stranger.
    """
    parts = [text] if isinstance(text, str) else text
    _write(path, (part.encode("utf-8") for part in parts), temporary or path.with_name(path.name + ".tmp"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and rename it into place."""
    _write(path, [content], path.with_name(path.name + ".tmp"))


def _write(path: Path, parts: Iterable[bytes], temporary: Path) -> None:
    if temporary.is_symlink():
        temporary.unlink()
    try:
        with open(temporary, "wb", opener=_open_no_link) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, and flush each new name; a folder that is there is fine."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def replace_folder(source: Path, target: Path, *, aside: Path) -> None:
    """Rename `source` to `target`, replacing a folder that is there.

    The old folder is renamed to `aside` first, renamed back if the second rename fails, and removed at the end. A kill
    in between leaves it at `aside`.
    """
    if target.exists():
        os.rename(target, aside)
    try:
        os.rename(source, target)
    except OSError:
        if aside.exists():
            os.rename(aside, target)
        raise
    fsync(target.parent)
    if aside.exists():
        shutil.rmtree(aside, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Flush every file under a folder, then its folders from the innermost out, so that a rename publishes it whole."""
    inside = sorted(folder.rglob("*"), reverse=True)
    for path in (*(path for path in inside if path.is_file()), *(path for path in inside if path.is_dir()), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle for flushing a directory
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some file systems flush no folders and say so
    finally:
        os.close(descriptor)
