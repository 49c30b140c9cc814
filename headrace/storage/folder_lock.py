"""Lock a folder for one process at a time, also between machines that share a file system.

The lock of a folder is its subfolder `.lock`, with one small file for each holder: 000001, 000002, ... The file with
the highest number is the lock. It is created exclusively, which is atomic on NFS too, and the highest number is never
removed: of many processes that want the number after a holder who has let go, or is gone, exactly one gets it.

A holder counts its heartbeats up in its own file. A waiter on the same system looks the holder's process up (pid and
start time), and takes one from before the last boot of its machine for gone. A waiter elsewhere (another host or
container) takes a holder for gone when the count has stood still for `STALE_S` seconds of the waiter's own clock;
clocks of two machines are never compared. A holder that wakes up after that finds a higher number than its own, or
another holder's text: `FolderLock.check` raises, and it must be called before every write that another holder would
suffer from. Knows nothing of the folder's contents.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.errors import FolderLockedError, StorageError

logger = logging.getLogger(__name__)

LOCK = ".lock"
STALE_S = 60.0  # a holder elsewhere whose heartbeat stands still for so long is gone
BEAT_S = 5.0
_POLL_S = 0.5
_JOIN_S = 10.0
_RELEASED = "released"
_MAX_BYTES = 1 << 16  # of a lock file
_INITIAL_NAMESPACE = "pid:[4026531836]"  # of process ids, on every Linux machine: outside of containers
_COUNT_BYTES = 20  # the first line of a lock file: the count of heartbeats, or that the lock was released


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """Names a process; two systems that cannot see each other's processes differ in `host` or `system`."""

    host: str
    system: str  # the boot and the process namespace; "" where the system does not tell them
    pid: int
    started: str  # of the process, in the system's own unit; "" where the system does not tell it
    since: str  # when the lock was taken, for people
    machine: str = ""  # the id of the installed system, which a boot does not change; "" where there is none
    token: str = ""  # tells two locks of one process apart; "" in a file from before there was one

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


def this_process() -> LockHolder:
    """Describe the calling process as a holder."""
    pid = os.getpid()
    state = _process_state(pid)
    return LockHolder(
        host=socket.gethostname(),
        system=_system(),
        pid=pid,
        started="" if state is None else state[1],
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        machine=_machine(),
        token=secrets.token_hex(8),
    )


class FolderLock:
    """A lock that is held; a thread beats its heart until `release`."""

    def __init__(
        self, folder: Path, number: int, me: LockHolder, *, beat_s: float, on_lost: Callable[[], None] | None
    ) -> None:
        self._folder, self._number, self._me, self._on_lost = folder, number, me, on_lost
        self._file = folder / LOCK / _name(number)
        self._pid, self._beats, self._released = os.getpid(), 0, threading.Event()
        self._thread = threading.Thread(target=self._beat_on, args=[beat_s], name="folder lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise FolderLockedError if another process has taken the lock over, StorageError if that cannot be read."""
        with _storage(self._folder, "read"):
            number = _highest(self._folder / LOCK)
            claim = _read(self._folder / LOCK, number)
        if number != self._number or claim is None or claim.holder != self._me:
            other = "another process" if claim is None or claim.holder is None else str(claim.holder)
            raise FolderLockedError(
                f"{self._folder} was taken over by {other}, because this process gave no sign of life for a while: it "
                "ends here and writes nothing more"
            )

    def release(self) -> None:
        """Let the next process have the folder at once. Does nothing in a process that was forked from the holder."""
        if self._pid != os.getpid() or self._released.is_set():
            return
        self._released.set()
        self._thread.join(timeout=_JOIN_S)  # a disk that does not answer must not keep the process
        try:
            _write_count(self._file, _RELEASED, self._me)
        except (FileNotFoundError, FolderLockedError):
            pass  # somebody else has it
        except OSError as exc:
            logger.warning("the lock of %s cannot be released: %s", self._folder, exc)

    def _beat_on(self, beat_s: float) -> None:
        while not self._released.wait(beat_s):
            self._beats += 1
            try:
                _write_count(self._file, f"{self._beats:0{_COUNT_BYTES}d}", self._me)
                self.check()
            except (FileNotFoundError, FolderLockedError):
                logger.error("%s was taken over by another process", self._folder)
                if self._on_lost is not None:
                    self._on_lost()
                return
            except (OSError, StorageError) as exc:  # it may work next time
                logger.debug("no heartbeat in %s: %s", self._file, exc)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHolder:
    """The process whose lock a folder has, as far as can be seen from here."""

    holder: LockHolder | None  # None: the lock does not tell
    is_gone: bool  # its process has ended; of one elsewhere nobody can say that without waiting


def find_holder(folder: Path) -> FoundHolder | None:
    """Find the process that holds a folder, without waiting; None if it was never held or the lock was released.

    Raises StorageError if the lock cannot be read.
    """
    with _storage(folder, "read"):
        number = _highest(folder / LOCK)
        claim = None if number == 0 else _read(folder / LOCK, number)
    if claim is None or claim.count == _RELEASED:
        return None
    return FoundHolder(holder=claim.holder, is_gone=_is_alive(claim.holder, this_process()) is False)


@contextlib.contextmanager
def hold_folder(
    folder: Path,
    *,
    wait_s: float = 0.0,
    on_lost: Callable[[], None] | None = None,
    stale_s: float = STALE_S,
    beat_s: float = BEAT_S,
    me: LockHolder | None = None,
) -> Iterator[FolderLock]:
    """Hold a folder inside the block.

    While another process that is alive holds it, wait up to `wait_s` seconds, then raise FolderLockedError; to find out
    about a holder elsewhere takes up to `stale_s` in any case. `on_lost` is called on another thread when the lock
    turns out to be lost. Raises StorageError if the folder cannot be written.
    """
    me = me or this_process()
    number = _acquire(folder, me, wait_s=wait_s, stale_s=stale_s)
    lock = FolderLock(folder, number, me, beat_s=beat_s, on_lost=on_lost)
    try:
        yield lock
    finally:
        lock.release()


# --- taking it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    count: str  # heartbeats, or _RELEASED
    holder: LockHolder | None  # None: the file is just being written, or its writer did not get so far


def _acquire(folder: Path, me: LockHolder, *, wait_s: float, stale_s: float) -> int:
    """Return the number of the lock file that was created, when it is the lock."""
    locks = folder / LOCK
    with _storage(folder, "written"):
        locks.mkdir(exist_ok=True)
    deadline = time.monotonic() + wait_s
    watched: tuple[int, str] | None = None
    announced, still_since, moved = 0, time.monotonic(), False
    while True:
        with _storage(folder, "read"):
            number = _highest(locks)
            claim = None if number == 0 else _read(locks, number)
        now = time.monotonic()
        is_unreadable = number > 0 and claim is None  # the next holder has removed it, or it is a link to nothing
        if is_unreadable:
            claim = _Claim(count="", holder=None)
        alive = False if claim is None or claim.count == _RELEASED else _is_alive(claim.holder, me)
        if claim is not None and watched != (number, claim.count):
            moved = watched is not None
            watched, still_since = (number, claim.count), now
        if alive is False or (alive is None and now - still_since >= stale_s):
            with _storage(folder, "written"):
                if _claim(locks, number + 1, me):
                    return number + 1
            continue
        if now >= deadline and (alive or moved):
            assert claim is not None
            raise FolderLockedError(
                f"{folder} is in use by {claim.holder or 'another process'}: wait for its end, or stop it, and try "
                f"again (if that process has nothing to do with the folder, remove {locks})"
            )
        if is_unreadable and now - still_since < _POLL_S:
            time.sleep(0.01)
            continue
        if announced != number and claim is not None:
            patience_s = wait_s if alive else max(wait_s, stale_s)
            logger.warning("%s is in use by %s: waiting up to %g s", folder, claim.holder or "another", patience_s)
            announced = number
        time.sleep(_POLL_S)


def _claim(locks: Path, number: int, me: LockHolder) -> bool:
    """Create the lock file of that number and return whether it is the lock now. May raise OSError."""
    path = locks / _name(number)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{0:0{_COUNT_BYTES}d}\n{json.dumps(asdict(me))}\n".encode())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    # The number may be an old one: whoever saw it free may have slept while others came and went.
    is_highest = _highest(locks) == number
    for old in _numbers(locks) if is_highest else (number,):
        if old < number or not is_highest:
            with contextlib.suppress(OSError):
                (locks / _name(old)).unlink()
    return is_highest


def _is_alive(holder: LockHolder | None, me: LockHolder) -> bool | None:
    """Tell whether a holder's process runs; None if that cannot be seen from here."""
    if holder is None or holder.host != me.host or os.name == "nt":
        return None
    if holder.system != me.system:
        return False if _has_booted_since(holder, me) else None
    if holder.system:
        state = _process_state(holder.pid)
        return state is not None and state[0] not in "ZX" and state[1] == holder.started
    try:
        os.kill(holder.pid, 0)  # without a start time this may be another process by now
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return None


def _has_booted_since(holder: LockHolder, me: LockHolder) -> bool:
    """Tell whether the holder's machine is this one, before its last boot; never of a container, which may be a copy
    with the same names on another machine."""
    boots = [system.removesuffix(f" {_INITIAL_NAMESPACE}") for system in (holder.system, me.system)]
    outside = holder.system != boots[0] and me.system != boots[1]
    return outside and boots[0] != boots[1] and holder.machine == me.machine != ""


# --- files -----------------------------------------------------------------------------------------------------------


def _name(number: int) -> str:
    return f"{number:06d}"


def _numbers(locks: Path) -> list[int]:
    return [int(name) for name in os.listdir(locks) if name.isdecimal()]


def _highest(locks: Path) -> int:
    try:
        return max(_numbers(locks), default=0)
    except FileNotFoundError:
        return 0


def _read(locks: Path, number: int) -> _Claim | None:
    try:
        return _parse((locks / _name(number)).read_bytes())
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> _Claim:
    first, _, rest = content.decode(errors="replace").partition("\n")
    try:
        holder = LockHolder(**json.loads(rest))
    except (ValueError, TypeError):
        holder = None
    return _Claim(count=first.strip(), holder=holder)


def _write_count(path: Path, count: str, me: LockHolder) -> None:
    """Overwrite the first line in place, which takes no new room on the disk; the file is never created here.

    Raises FolderLockedError if the file is another holder's.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        if _parse(os.read(descriptor, _MAX_BYTES)).holder != me:
            raise FolderLockedError(f"{path} is another holder's")
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, count.ljust(_COUNT_BYTES).encode())
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage(folder: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"the lock of {folder} cannot be {done} ({exc.strerror or type(exc).__name__}); nothing was changed: see "
            "to the disk or its permissions, and try again"
        ) from exc


# --- processes -------------------------------------------------------------------------------------------------------


def _system() -> str:
    """Name the boot of this machine and the namespace of its process ids, or return "" where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _machine() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _process_state(pid: int) -> tuple[str, str] | None:
    """Return the state letter and the start time of a process as Linux tells them; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
