"""Count the memory of processes from outside, by /proc: their own pages, and what the kernel holds in their pipes.

Standard library only.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

PIPE_BYTES, SOCKET_BYTES = 65_536, 212_992  # the most that one holds; seccomp denies making them larger
_COUNTED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")  # not the pages of files, such as libraries


def exceeds(pids: Sequence[int], limit_bytes: int, *, inherited: int) -> bool:
    """Say whether the processes of one call use more than `limit_bytes` together.

    A page that several of them share is counted once. That count walks the page tables, so it is made only when the sum
    of their resident memory, which is never less, is above the limit. Where it is not allowed, each process is counted
    without the `inherited` bytes that it was forked with.
    """
    resident = [resident_bytes(pid) for pid in pids]
    buffers = buffer_bytes(pids)
    if sum(resident) + buffers <= limit_bytes:
        return False
    parts = [(proportional_bytes(pid), rough) for pid, rough in zip(pids, resident, strict=True)]
    return buffers + sum(max(0, rough - inherited) if exact is None else exact for exact, rough in parts) > limit_bytes


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def proportional_bytes(pid: int) -> int | None:
    """Return the bytes of a process's own pages, a page of n processes as an n-th; None if that cannot be read."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    except ProcessLookupError:
        return 0
    except OSError:
        return None
    return 1024 * sum(int(words[1]) for words in lines if words[0] in _COUNTED)


def buffer_bytes(pids: Iterable[int]) -> int:
    """Return the most that the pipes and sockets of these processes can hold."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # ended, or of a user whose descriptors may not be seen
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    names.add(os.readlink(entry.path))
    return sum(PIPE_BYTES * name.startswith("pipe:") + SOCKET_BYTES * name.startswith("socket:") for name in names)
