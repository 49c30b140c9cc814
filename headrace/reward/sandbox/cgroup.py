"""Limit the memory of all processes of a worker by a cgroup, where this user may make one.

The kernel charges a cgroup with every kind of memory, also with what no process shows in /proc, and limits it at every
moment: a wall behind the count in `memory`. Version 2 needs a parent that passes on its memory controller, version 1 a
mounted memory hierarchy; root has one of them on most machines, and so has a user whose service manager delegates one.
Standard library only.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "headrace-"
_REMOVE_S = 1.0  # for the kernel to let go of processes that have ended


@dataclass(slots=True)
class MemoryCgroup:
    """One cgroup. It is removed when its processes have ended."""

    folder: Path
    version: int
    _seen_kills: int = 0

    @classmethod
    def create(cls, name: str, limit_bytes: int) -> "MemoryCgroup | None":
        """Make a cgroup of this name with a limit, where that is allowed; None elsewhere."""
        for parent, version in _parents():
            _remove_ownerless(parent)
            cgroup = cls(parent / f"{PREFIX}{name}", version)
            with suppress(OSError):
                cgroup.folder.mkdir()
                try:
                    cgroup.limit(limit_bytes)
                except OSError:
                    cgroup.remove()
                else:
                    return cgroup
        return None

    def enter(self) -> None:
        """Move the calling process into it, if the kernel lets it; processes that it forks later are in it as well."""
        with suppress(OSError):
            (self.folder / "cgroup.procs").write_text("0")

    def limit(self, limit_bytes: int) -> None:
        """Set the limit; swapping does not extend it. Raises OSError if the kernel refuses."""
        if self.version == 2:
            (self.folder / "memory.max").write_text(str(limit_bytes))
            with suppress(OSError):  # without swap there is no such file
                (self.folder / "memory.swap.max").write_text("0")
            return
        memory, with_swap = (self.folder / f"memory.{kind}limit_in_bytes" for kind in ("", "memsw."))
        with suppress(OSError):  # the limit with swap is never the lower one: it goes first up and last down
            with_swap.write_text(str(limit_bytes))
        memory.write_text(str(limit_bytes))
        with suppress(OSError):
            with_swap.write_text(str(limit_bytes))

    def own_bytes(self) -> int:
        """Return the bytes of the processes' own pages: not of files, which the kernel can drop."""
        name = "anon" if self.version == 2 else "rss"
        return _number(self.folder / "memory.stat", name)

    def has_killed(self) -> bool:
        """Say whether the kernel has ended a process at the limit since the last `begin_call`."""
        return self._kills() > self._seen_kills

    def begin_call(self) -> None:
        """Forget what was ended before."""
        self._seen_kills = self._kills()

    def _kills(self) -> int:
        return _number(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill")

    def remove(self) -> None:
        """Remove it; all its processes have ended."""
        until = time.monotonic() + _REMOVE_S
        while True:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > until:
                    return
                time.sleep(0.005)
            else:
                return


def remove_cgroups(name: str) -> None:
    """Remove the empty cgroups whose names begin with `name`, left by a supervisor that was killed."""
    for parent, _ in _parents():
        for left in parent.glob(f"{PREFIX}{name}*"):
            with suppress(OSError):
                left.rmdir()


def _remove_ownerless(parent: Path) -> None:
    """Remove what was left when a trainer and its supervisor were killed together. One with processes in it stays."""
    for left in parent.glob(f"{PREFIX}*"):
        owner = left.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            with suppress(OSError):
                left.rmdir()


def _number(file: Path, name: str) -> int:
    """Return the number after a name in a file of names and numbers; 0 if there is none."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
    return 0


def _parents() -> Iterator[tuple[Path, int]]:
    """Yield folders in which a cgroup with a memory limit could be made, with the version of their hierarchy.

    Version 2 lets no cgroup have both processes and children with controllers, so the one above comes next.
    """
    try:
        paths = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in paths:
        version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
        for words in mounts if version else ():
            root, place, kind = words[3], words[4], words[words.index("-") + 1 :]
            wanted = kind[0] == ("cgroup2" if version == 2 else "cgroup")
            if not wanted or (version == 1 and "memory" not in kind[2].split(",")):
                continue
            inside = os.path.relpath(path, root)
            if inside.startswith(".."):
                continue
            own = Path(os.path.normpath(os.path.join(place, inside)))
            for folder in (own, own.parent) if version == 2 and own != Path(place) else (own,):
                if version == 1 or "memory" in _words(folder / "cgroup.subtree_control"):
                    yield folder, version


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().split()
    return []
