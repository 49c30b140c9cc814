"""Put the private folder back, after each call, to what the import left in it. Standard library only."""

import os
import shutil
import stat
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScratchState:
    """The content of the private folder when the code had been imported. It is small: mostly there is none."""

    folder: str
    entries: tuple[tuple[str, int, bytes], ...]  # path below the folder, mode, and content or target of a link

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
    """Read what is in the folder now; parents come before what is in them."""
    entries: list[tuple[str, int, bytes]] = []
    for root, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            place = os.path.join(root, name)
            mode = os.lstat(place).st_mode
            if stat.S_ISLNK(mode):
                content = os.readlink(os.fsencode(place))
            elif stat.S_ISREG(mode):
                with open(place, "rb") as file:
                    content = file.read()
            elif stat.S_ISDIR(mode):
                content = b""
            else:
                continue  # a socket or a named pipe has no content
            entries.append((os.path.relpath(place, folder), mode, content))
    return ScratchState(folder=folder, entries=tuple(entries))
