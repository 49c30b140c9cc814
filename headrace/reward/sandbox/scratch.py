"""Put the files that the import left in the private folder into that of each call. Standard library only."""

import os
import shutil
import stat
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScratchState:
    """The content of the private folder when the code had been imported. It is small: mostly there is none."""

    folder: str
    entries: tuple[tuple[str, int, bytes], ...]  # path below the folder, mode, and content or target of a link
    unread: tuple[str, ...] = ()  # paths of what could not be read, which calls do not have

    def restore(self) -> None:
        """Empty the folder and write the entries. Raises OSError if what a call left cannot be removed."""
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for path, mode, content in self.entries:
            place = os.path.join(self.folder, path)
            if stat.S_ISDIR(mode):
                os.mkdir(place, 0o700)
            elif stat.S_ISLNK(mode):
                os.symlink(content, os.fsencode(place))
            else:
                with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(mode)), "wb") as file:
                    file.write(content)


def capture(folder: str) -> ScratchState:
    """Read what is in the folder now; parents come before what is in them.

    Modes that forbid reading are changed: the file system is covered by that of the first call.
    """
    entries: list[tuple[str, int, bytes]] = []
    unread: list[str] = []
    for root, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            place = os.path.join(root, name)
            path = os.path.relpath(place, folder)
            try:
                mode = os.lstat(place).st_mode
                if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):  # others have no content
                    entries.append((path, mode, _read(place, mode)))
            except (OSError, MemoryError):
                unread.append(path)
    return ScratchState(folder=folder, entries=tuple(entries), unread=tuple(unread))


def _read(place: str, mode: int) -> bytes:
    if stat.S_ISLNK(mode):
        return os.readlink(os.fsencode(place))
    if stat.S_ISDIR(mode):
        os.chmod(place, 0o700)
        return b""
    if not mode & stat.S_IRUSR:
        os.chmod(place, 0o600)
    with open(place, "rb") as file:
        return file.read()
