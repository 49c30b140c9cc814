"""Disturb and record the file operations of a process through `faulty_disk.c`: kill, fail, delay, stop, another clock.

The library catches what Python, SQLite and safetensors write. It is compiled when it is first needed; without a C
compiler, or on another system than Linux, the tests that need it are skipped. The product knows nothing of it.
"""

import ctypes
import errno
import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_disk.c")
_HEAD = struct.Struct("=iiQqdII")


class Kind(IntFlag):
    """Kinds of file operations, as in faulty_disk.c."""

    OPEN_WRITE = 1
    WRITE = 2
    TRUNCATE = 4
    RENAME = 8
    UNLINK = 16
    MKDIR = 32
    FSYNC = 64
    READ = 128
    OPEN_READ = 256
    LINK = 512


CHANGES = Kind.OPEN_WRITE | Kind.WRITE | Kind.TRUNCATE | Kind.RENAME | Kind.UNLINK | Kind.MKDIR | Kind.FSYNC | Kind.LINK


class Act(IntEnum):
    """How an operation is disturbed."""

    RECORD = 0
    KILL = 1
    FAIL = 2
    DELAY = 3
    CLOCK = 4
    STOP = 5


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """Disturb the operations of some kinds from the `first` on, `count` of them; -1: until the process ends."""

    act: Act
    kinds: Kind = CHANGES
    first: int = 1
    count: int = 1
    error: int = 0
    delay_us: int = 0
    offset_s: int = 0

    def as_json(self) -> dict[str, int]:
        return {name: int(value) for name, value in asdict(self).items()}


def disk_full(count: int) -> DiskFault:
    kinds = Kind.OPEN_WRITE | Kind.WRITE | Kind.MKDIR | Kind.FSYNC | Kind.LINK
    return DiskFault(act=Act.FAIL, kinds=kinds, count=count, error=errno.ENOSPC)


def read_only(count: int) -> DiskFault:
    return DiskFault(act=Act.FAIL, kinds=CHANGES & ~Kind.FSYNC, count=count, error=errno.EROFS)


def no_permission(count: int) -> DiskFault:
    kinds = Kind.OPEN_WRITE | Kind.RENAME | Kind.UNLINK | Kind.MKDIR | Kind.LINK
    return DiskFault(act=Act.FAIL, kinds=kinds, count=count, error=errno.EACCES)


def write_error(count: int) -> DiskFault:
    return DiskFault(act=Act.FAIL, kinds=Kind.WRITE | Kind.FSYNC, count=count, error=errno.EIO)


def read_error(count: int) -> DiskFault:
    return DiskFault(act=Act.FAIL, kinds=Kind.READ | Kind.OPEN_READ, count=count, error=errno.EIO)


def library() -> Path | None:
    """Return the compiled library, or None where it cannot be compiled."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    compiled = Path(tempfile.gettempdir()) / f"headrace-faulty-disk-{name}.so"
    if not compiled.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.so"
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"]
            if subprocess.run(command, capture_output=True, check=False).returncode != 0:
                return None
            copy = compiled.with_suffix(f".{made.stat().st_ino}")
            shutil.copyfile(made, copy)
            copy.rename(compiled)
    return compiled


def arm(folder: str, fault: dict[str, int], log: str | None = None) -> None:
    """Begin to count, and to record if there is a log, in this process, which was started with the library."""
    loaded = ctypes.CDLL(None)
    loaded.faults_arm(
        folder.encode(), None if log is None else log.encode(), fault["act"], fault["kinds"],
        ctypes.c_long(fault["first"]), ctypes.c_long(fault["count"]), fault["error"],
        ctypes.c_long(fault["delay_us"]), ctypes.c_longlong(fault["offset_s"]),
    )  # fmt: skip


def counted() -> tuple[int, int]:
    """Return how many operations were counted and how many of them were disturbed, in this process."""
    loaded = ctypes.CDLL(None)
    return loaded.faults_number(), loaded.faults_struck()


@dataclass(frozen=True)
class Operation:
    """One recorded change of files; `path` and `target` are absolute."""

    kind: Kind
    flags: int
    inode: int
    offset: int  # of a write; the new size of a truncation
    path: str
    data: bytes
    time_s: float = 0.0  # of the monotonic clock, when it was done

    @property
    def target(self) -> str:
        return self.data.decode()


def read_log(file: Path) -> Iterator[Operation]:
    content, position = file.read_bytes(), 0
    while position < len(content):
        kind, flags, inode, offset, time_s, path_size, data_size = _HEAD.unpack_from(content, position)
        position += _HEAD.size
        path = content[position : position + path_size].decode()
        position += path_size
        yield Operation(Kind(kind), flags, inode, offset, path, content[position : position + data_size], time_s)
        position += data_size


def count_kinds(operations: Iterable[Operation]) -> Counter[Kind]:
    """Count recorded operations as the library counts them: opening a file to read is not a change."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    return Counter(each.kind for each in operations if each.kind != Kind.OPEN_WRITE or each.flags & writing)


def at_random(fault: DiskFault, counts: Counter[Kind], luck: random.Random) -> DiskFault:
    """Let a fault begin at any operation of its kinds."""
    return replace(fault, first=luck.randint(1, max(1, sum(counts[kind] for kind in fault.kinds))))
