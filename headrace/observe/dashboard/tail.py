"""Follow a file of lines that another process, perhaps on another machine, is writing, cutting or replacing.

Whole lines are returned once; a last line that is half written waits. A file that was replaced, cut (as a resume cuts
metrics.jsonl) or has other bytes where reading stopped is read again from its beginning.
"""

import os
from dataclasses import dataclass
from pathlib import Path

MAX_READ = 8 << 20  # bytes at a time
MAX_LINE = 64 << 20  # a longer line is left out
MARK = 64  # bytes before the place where reading stopped that must stay the same


@dataclass(frozen=True, slots=True)
class NewLines:
    """The lines that were added since the last look."""

    lines: list[bytes]
    restarted: bool  # forget the lines of before: these are from the beginning of the file
    has_more: bool  # look again: there was more than is read at a time


class TailedFile:
    """Remembers how far a file was read."""

    def __init__(self, path: Path, *, max_read: int = MAX_READ) -> None:
        self._path, self._max_read = path, max_read
        self._identity: tuple[int, int] | None = None
        self._offset, self._mark, self._skips = 0, b"", False
        self._seen = self.size = 0

    @property
    def progress(self) -> float:
        """The share of the file that was read, also of a last line without an end; 1 if it is empty or missing."""
        return min(1.0, self._seen / self.size) if self.size else 1.0

    def read(self) -> NewLines:
        """Return the lines that have come since; none if the file is missing or cannot be read now."""
        try:
            with self._path.open("rb") as file:
                return self._read(file.fileno())
        except OSError:
            was_there, self._identity = self._identity is not None, None
            self._offset, self._mark, self._skips = 0, b"", False
            self._seen = self.size = 0
            return NewLines([], was_there, False)

    def _read(self, descriptor: int) -> NewLines:
        status = os.fstat(descriptor)
        identity, self.size = (status.st_dev, status.st_ino), status.st_size
        first = self._offset - len(self._mark)
        restarted = self._identity is not None and (
            identity != self._identity
            or self.size < self._offset
            or os.pread(descriptor, len(self._mark), first) != self._mark
        )
        if restarted:
            self._offset, self._mark, self._skips = 0, b"", False
        self._identity = identity
        content = os.pread(descriptor, self._max_read, self._offset)
        end = content.rfind(b"\n") + 1
        while end == 0 and len(content) >= self._max_read and len(content) < MAX_LINE:  # a long line
            more = os.pread(descriptor, self._max_read, self._offset + len(content))
            if not more:
                break
            end = len(content) + more.rfind(b"\n") + 1 if b"\n" in more else 0
            content += more
        if end == 0 and len(content) >= MAX_LINE:
            self._skips, end = True, len(content)
        self._seen = self._offset + len(content)
        whole = content[:end]
        lines = whole.split(b"\n")[:-1] if whole.endswith(b"\n") else []
        if self._skips and whole.endswith(b"\n"):
            lines, self._skips = lines[1:], False  # the end of the line that is too long
        self._offset += end
        if end:
            self._mark = content[max(0, end - MARK) : end]
        return NewLines(lines, restarted, bool(end) and self._offset < self.size)
