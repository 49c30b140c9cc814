"""Count the memory of processes from outside, by /proc: their own pages, and what the kernel holds in their pipes.

Standard library only.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

PIPE_BYTES, SOCKET_BYTES = 65_536, 212_992  # the most that one holds; seccomp denies making them larger
_EXACT = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")  # not the pages of files, such as libraries
_ROUGH = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")  # the last are the page tables
_UNSEEN_BYTES = 64 * SOCKET_BYTES  # for the descriptors of a process that may not be seen


def exceeds(pids: Sequence[int], limit_bytes: int, *, inherited: int) -> bool:
    """Say whether the processes of one call use more than `limit_bytes` together.

    A page that several of them share is counted once. That count walks the page tables, so it is made only when the sum
    of what each has, which is never less, is above the limit. Processes for which it is not allowed count with all that
    they have, less once the `inherited` bytes that each was forked with: they may share no more of those.
    """
    rough = {pid: own_bytes(pid) for pid in pids}
    buffers = buffer_bytes(pid for pid, size in rough.items() if size)
    if sum(rough.values()) + buffers <= limit_bytes:
        return False
    exact = {pid: proportional_bytes(pid) for pid in pids}
    seen = sum(size for size in exact.values() if size is not None)
    unseen = sum(rough[pid] for pid, size in exact.items() if size is None)
    return buffers + seen + max(0, unseen - inherited) > limit_bytes


def own_bytes(pid: int) -> int:
    """Return the bytes of a process's own pages, in memory or swapped out, whether shared or not, and page tables."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return 0
    return 1024 * sum(int(words[1]) for words in lines if words[0] in _ROUGH)


def proportional_bytes(pid: int) -> int | None:
    """Return the bytes of a process's own pages, a page of n processes as an n-th; None if that cannot be read."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    except ProcessLookupError:
        return 0
    except OSError:
        return None
    return 1024 * sum(int(words[1]) for words in lines if words[0] in _EXACT)


def buffer_bytes(pids: Iterable[int]) -> int:
    """Return the most that the pipes and sockets of these processes can hold."""
    names: set[str] = set()
    unseen = 0
    for pid in pids:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    names.add(os.readlink(entry.path))
        except PermissionError:
            unseen += _UNSEEN_BYTES
        except OSError:  # it has ended
            pass
    pipes, sockets = (sum(name.startswith(kind) for name in names) for kind in ("pipe:", "socket:"))
    return unseen + PIPE_BYTES * pipes + SOCKET_BYTES * sockets
