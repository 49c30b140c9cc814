"""Look at processes through /proc."""

import contextlib
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The processes below one, outermost first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_fields(int(entry.name))[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return _fields(pid)[0] != "Z"
    return False


def _fields(pid: int) -> list[str]:
    """The fields of a process behind its name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
