"""Attend to the calls of a warm worker from its builder, outside of its PID namespace, so that no call sees another's.

The worker imports the code and forks a process for each call. It never reads a request or a result: those go between
this process and the call's own, over descriptors that the worker only passes on. So a call is a copy of a process
that has seen the import and nothing else. Its folder for temporary files is a new file system, mounted for this call.
Foreign code has run in the worker: whatever it sends is checked, and each wait for it has a deadline. Standard library
only.
"""

import array
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.reward.sandbox import framing, linux
from headrace.reward.sandbox.isolation import INSIDE_ID, SCRATCH
from headrace.reward.sandbox.limits import CallLimits, Outcome

# to the worker with the descriptors of a call; from the call's process; to the worker, which may now let it end
FORK, FORKED, KNOWN = b"f", b"p", b"k"
ENDS = {b"0": "", b"c": Outcome.CPU, b"m": Outcome.MEMORY, b"x": Outcome.CRASHED}  # how a call's process ended
CALL_EVENT = struct.Struct("=cd")  # to the supervisor: which, and the call's deadline by the monotonic clock
CALL_BEGAN, CALL_ENDED = b"b", b"e"  # the first comes with the socket on which the call asks for programs
NUM_CALL_DESCRIPTORS = 5  # request, result, stdout, stderr, programs

_CREDENTIALS = struct.Struct("=iII")  # PID, user and group of a sender, filled in by the kernel
_STATUS_S = 10.0  # for the worker to say how a call's process ended, after it was killed
TAIL_CHARS = 2000


def mount_scratch(limits: CallLimits) -> None:
    """Mount an empty file system on the writable folder. Raises OSError."""
    size = f"size={limits.scratch_mb}m,nr_inodes=4096,mode=700,uid={INSIDE_ID},gid={INSIDE_ID}"
    linux.mount("scratch", SCRATCH, "tmpfs", linux.NOSUID | linux.NODEV, size)


def unmount_scratch() -> None:
    linux.unmount(SCRATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendant:
    """Serves the trainer on behalf of one worker."""

    control: int  # the connection to the trainer
    worker: socket.socket
    supervisor: socket.socket
    limits: CallLimits

    def serve(self) -> None:
        """Pass on the import's messages, then attend to calls until the trainer or the worker is gone."""
        self.worker.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        if not self._relay_import():
            return
        mount_scratch(self.limits)
        while (request := self._next_request()) is not None:
            answer = self._call(request)
            self.supervisor.send(CALL_EVENT.pack(CALL_ENDED, 0.0))
            if answer is None:
                return  # the trainer sees no answer, and starts another worker
            framing.send(self.control, answer)
            unmount_scratch()
            mount_scratch(self.limits)

    def _relay_import(self) -> bool:
        """Pass on the layers, the trainer's permission, and what the code says about itself."""
        return (
            self._relay(self.worker.fileno(), self.control)
            and self._relay(self.control, self.worker.fileno())
            and self._relay(self.worker.fileno(), self.control)
        )

    def _relay(self, source: int, target: int) -> bool:
        head = framing.read_exactly(source, framing.LENGTH.size)
        if head is None:
            return False
        framing.send_bytes(target, head)
        left = framing.LENGTH.unpack(head)[0]
        while left:
            chunk = os.read(source, min(left, 65_536))
            if not chunk:
                return False
            framing.send_bytes(target, chunk)
            left -= len(chunk)
        return True

    def _next_request(self) -> bytes | None:
        """Wait for a request, however long; a worker that ends or speaks meanwhile is not used again."""
        if _wait_for((self.control, self.worker.fileno()), deadline=None) != {self.control}:
            return None
        head = framing.read_exactly(self.control, framing.LENGTH.size)
        return None if head is None else framing.read_exactly(self.control, framing.LENGTH.unpack(head)[0])

    def _call(self, request: bytes) -> dict[str, Any] | None:
        """Make one call; returns the answer to the trainer, or None if the worker is of no use any more."""
        deadline = time.monotonic() + self.limits.wall_s
        pipes = [os.pipe() for _ in range(3)]  # result, stdout, stderr
        reads = [read for read, _ in pipes]
        try:
            self._send_call(request, [write for _, write in pipes], deadline)
            process = self._open_process(deadline)
            if process is None:
                return None
            try:
                return self._watch(process, reads, deadline)
            finally:
                os.close(process)
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            for read in reads:
                os.close(read)

    def _send_call(self, request: bytes, writes: Sequence[int], deadline: float) -> None:
        """Give the worker the descriptors of the next call, and close them here."""
        body = os.memfd_create("request")
        for_supervisor, for_call = socket.socketpair()
        try:
            framing.send_bytes(body, framing.LENGTH.pack(len(request)) + request)
            os.lseek(body, 0, os.SEEK_SET)
            _send_descriptors(self.supervisor, CALL_EVENT.pack(CALL_BEGAN, deadline), [for_supervisor.fileno()])
            _send_descriptors(self.worker, FORK, [body, *writes, for_call.fileno()])
        finally:
            for_supervisor.close()
            for_call.close()
            for descriptor in (body, *writes):
                os.close(descriptor)

    def _open_process(self, deadline: float) -> int | None:
        """Return a pidfd of the call's process, which the kernel names as the sender of what it announces itself with.

        Nothing inside sends descriptors: those on their way are limited for all processes of a user together.
        """
        if not _wait_for((self.worker.fileno(),), deadline=deadline):
            return None  # it is stopped, or the machine is too slow for it
        data, control, _, _ = self.worker.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        sent = [item for level, kind, item in control if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
        if data != FORKED or len(sent) != 1:
            return None
        try:
            process = os.pidfd_open(_CREDENTIALS.unpack(sent[0])[0])
        except OSError:
            return None  # it has ended, although the worker must keep its number until it is known
        self.worker.send(KNOWN)
        return process

    def _watch(self, process: int, reads: list[int], deadline: float) -> dict[str, Any] | None:
        limits = self.limits
        bounds = dict(zip(reads, (limits.result_bytes, limits.output_bytes, limits.output_bytes), strict=True))
        outputs = {read: bytearray() for read in reads}
        over = _drain(process, outputs, bounds, deadline=deadline)
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError:
            return None  # not the pidfd of a process inside
        if not _wait_for((self.worker.fileno(),), deadline=time.monotonic() + _STATUS_S):
            return None
        end = ENDS.get(self.worker.recv(1))
        if end is None:
            return None
        over = over or end
        result, out, err = (bytes(outputs[read]).decode(errors="replace") for read in reads)
        tails = {"stdout": out[-TAIL_CHARS:], "stderr": err[-TAIL_CHARS:]}
        return {"outcome": over, "payload": "" if over else result, **tails}


def _send_descriptors(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    rights = array.array("i", descriptors)
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _wait_for(descriptors: Sequence[int], *, deadline: float | None) -> set[int]:
    """Wait until one of the descriptors can be read or is at its end; empty if the deadline passes first."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    return {descriptor for descriptor, _ in poll.poll(left_ms)}


def _drain(process: int, outputs: dict[int, bytearray], bounds: dict[int, int], *, deadline: float) -> str:
    """Read until the process of this pidfd has ended (returns "") or exceeds a limit (returns that outcome)."""
    poll = select.poll()
    for descriptor in (process, *outputs):
        poll.register(descriptor, select.POLLIN)
    for read in outputs:
        os.set_blocking(read, False)
    while True:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0, left * 1000)) if left > 0 else []
        if not ready:
            return Outcome.TIMEOUT
        for read, event in ready:
            if read in outputs and not _read_chunk(read, outputs[read], bounds[read]) and event & select.POLLHUP:
                poll.unregister(read)
            if read in outputs and len(outputs[read]) > bounds[read]:
                return Outcome.RESULT_SIZE if read == next(iter(outputs)) else Outcome.OUTPUT
        if any(read == process for read, _ in ready):
            return _drain_rest(outputs, bounds)


def _drain_rest(outputs: dict[int, bytearray], bounds: dict[int, int]) -> str:
    """Read the rest of the pipes of a process that has ended; while an orphan holds them there is no end of file."""
    for position, (read, data) in enumerate(outputs.items()):
        while len(data) <= bounds[read] and _read_chunk(read, data, bounds[read]):
            pass
        if len(data) > bounds[read]:
            return Outcome.OUTPUT if position else Outcome.RESULT_SIZE
    return ""


def _read_chunk(read: int, data: bytearray, bound: int) -> bool:
    try:
        part = os.read(read, min(65_536, bound + 1 - len(data)))
    except BlockingIOError:
        return False
    data += part
    return bool(part)
