"""Runs inside the isolation: imports the code once, then forks each call and ends everything that it started.

This process is the first of its PID namespace, and has no capability when foreign code is imported. A call's process
has its own pipes and nothing else: stdin is empty, stdout and stderr are read up to a limit, and the result goes over a
private descriptor, after a nonce that only this call was given. Functions that matter after foreign code was imported
are bound to names here first, so that code which patches `os` or `json` changes its own results only. Standard library
only.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.reward import user_function
from headrace.reward.sandbox import framing
from headrace.reward.sandbox.isolation import Isolation, IsolationPlan, isolate_call
from headrace.reward.sandbox.limits import (
    OUT_OF_MEMORY,
    RAISED,
    RETURNED,
    IsolationLayer,
    Outcome,
    limits_from,
    may_fork,
)
from headrace.reward.sandbox.scratch import capture
from headrace.reward.sandbox.supervisor import supervise

_fork, _write, _exit, _kill, _waitpid, _dumps = os.fork, os.write, os._exit, os.kill, os.waitpid, json.dumps
_RESULT = 3  # the private descriptor, in a call's process
_MESSAGE_CHARS = 2000
_MEMORY_SIGNALS = (signal.SIGUSR1,)  # the supervisor has killed a call because of its memory
_LEFT_PROCESSES = "importing it left {} processes behind, which were ended: start them inside the function"


class UserCode(Protocol):
    """Foreign code, imported."""

    @property
    def about(self) -> dict[str, Any]: ...  # tells the trainer how to call it

    def call(self, argument: Any) -> Any: ...


def main(control: int, lifeline: int) -> int:
    """Receive the order (isolation plan, code to import, whether calls are forked) and serve under a supervisor."""
    control, lifeline = _renumber(control), _renumber(lifeline)
    order = framing.receive(control)
    if order is None:
        return 0
    plan = IsolationPlan(
        layers=frozenset(map(IsolationLayer, order["layers"])),
        readable=tuple(order["readable"]),
        scratch=order["scratch"],
        uid_offset=order["uid_offset"],
        limits=limits_from(order["limits"]),
    )
    body = partial(_serve, plan=plan, order=order, control=control)
    return supervise(plan, body, lifeline=lifeline, keep=(control,))


def _renumber(descriptor: int) -> int:
    """Move a descriptor to the lowest free number, because a call closes only those below its limit of open files."""
    low = os.dup(descriptor)
    os.close(descriptor)
    return low


def _serve(isolation: Isolation, scratch: str, *, plan: IsolationPlan, order: dict[str, Any], control: int) -> int:
    """Report the active layers, import the code, then answer calls until the trainer is gone."""
    warm = bool(order["warm"]) and may_fork(isolation.active)
    framing.send(control, {"layers": sorted(isolation.active), "reasons": isolation.reasons, "warm": warm})
    if framing.receive(control) is None:  # the trainer may refuse these layers
        return 0
    if not warm:
        isolate_call(plan, isolation.active)
    if warm:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, no process of its namespace can signal PID 1
    sys.path += [entry for entry in order["path"] if entry not in sys.path]
    loaded: list[UserCode] = []
    failure = CapturedError(lambda: loaded.append(user_function.load(order["target"])))
    about = loaded[0].about if loaded else {}
    if warm and loaded and (ended := end_other_processes()):
        about = {**about, "notices": [*about["notices"], _LEFT_PROCESSES.format(ended)]}
    framing.send(control, {"about": about} if loaded else {"failed": failure.text})
    if not loaded:
        return 0
    if warm:
        imported = capture(scratch)
        gc.collect()
        gc.freeze()  # a collection in a call would copy every page that holds an object
        signal.pthread_sigmask(signal.SIG_BLOCK, _MEMORY_SIGNALS)
    while (request := framing.receive(control)) is not None:
        nonce = request["nonce"].encode()
        if not warm:
            payload = _call_to_bytes(loaded[0].call, request["argument"])
            framing.send(control, {"outcome": "", "payload": (nonce + payload).decode(errors="replace")})
            return 0
        answer = _Call(plan, isolation).run(loaded[0].call, request["argument"], nonce)
        imported.restore()  # before replying: a folder that cannot be emptied fails this call and ends this worker
        framing.send(control, answer)
    return 0


def end_other_processes() -> int:
    """End and reap every other process of this PID namespace, whose first process this is; returns how many there were.

    The kernel signals all of them at once, and a process that is being ended cannot fork, so none escapes.
    """
    assert os.getpid() == 1
    with suppress(ProcessLookupError):
        _kill(-1, signal.SIGKILL)
    count = 0
    with suppress(ChildProcessError):
        while True:
            _, raw = _waitpid(-1, 0)
            count += os.WIFSIGNALED(raw)
    return count


class CapturedError:
    """Runs foreign code and keeps what it raised, also SystemExit, as text. `text` is "" if it returned."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.text, self.out_of_memory = "", False
        with self:
            body()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.out_of_memory = isinstance(error, MemoryError)
            self.text = type(error).__name__
            if not isinstance(error, MemoryError):
                described = SafeMessage(error)
                self.text = f"{self.text}: {described.text}"[:_MESSAGE_CHARS]
        return True


class SafeMessage:
    """Holds str(error), or a fixed text if that raises: `__str__` is foreign code as well."""

    def __init__(self, error: BaseException) -> None:
        self.text = "(its message cannot be shown)"
        with self:
            self.text = str(error)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return True


def _call_to_bytes(function: Callable[[Any], Any], argument: Any) -> bytes:
    results: list[bytes] = []
    caught = CapturedError(lambda: results.append(_dumps(function(argument), allow_nan=True).encode()))
    if results and not caught.text:
        return RETURNED + results[0]
    return (OUT_OF_MEMORY if caught.out_of_memory else RAISED) + _dumps(caught.text).encode()


@dataclass(slots=True)
class _Call:
    """Runs one call in a process of its own: forks it, watches it, ends it."""

    plan: IsolationPlan
    isolation: Isolation

    def run(self, function: Callable[[Any], Any], argument: Any, nonce: bytes) -> dict[str, Any]:
        pipes = [os.pipe() for _ in range(3)]  # result, stdout, stderr
        pid = _fork()
        if pid == 0:
            self._in_call(function, argument, nonce, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        reads = [read for read, _ in pipes]
        try:
            return self._watch(pid, reads)
        finally:
            for read in reads:
                os.close(read)

    def _in_call(self, function: Callable[[Any], Any], argument: Any, nonce: bytes, writes: list[int]) -> None:
        """Run the call in the forked process. Never returns."""
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _MEMORY_SIGNALS)
            result, out, err = writes
            spare = os.dup(result)  # the pipes may have the numbers that dup2 overwrites
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.dup2(spare, _RESULT)
            os.closerange(_RESULT + 1, self.plan.limits.open_files + 8)
            isolate_call(self.plan, self.isolation.active)
            data = memoryview(nonce + _call_to_bytes(function, argument))
            while data:
                data = data[_write(_RESULT, data) :]
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            _exit(0)

    def _watch(self, pid: int, reads: list[int]) -> dict[str, Any]:
        limits = self.plan.limits
        bounds = dict(zip(reads, (limits.result_bytes, limits.output_bytes, limits.output_bytes), strict=True))
        outputs = {read: bytearray() for read in reads}
        over = _drain(pid, outputs, bounds, deadline=time.monotonic() + limits.wall_s)
        with suppress(ProcessLookupError):
            _kill(-1, signal.SIGKILL)  # the call and everything it started: nothing else is in this namespace
        _, raw, used = os.wait4(pid, 0)
        end_other_processes()
        over_memory = signal.sigtimedwait(_MEMORY_SIGNALS, 0) is not None
        if not over:
            over = _death_outcome(os.waitstatus_to_exitcode(raw), used, limits.cpu_s, over_memory=over_memory)
        result, out, err = (bytes(outputs[read]).decode(errors="replace") for read in reads)
        tails = {"stdout": out[-_MESSAGE_CHARS:], "stderr": err[-_MESSAGE_CHARS:]}
        return {"outcome": over, "payload": "" if over else result, **tails}


def _drain(pid: int, outputs: dict[int, bytearray], bounds: dict[int, int], *, deadline: float) -> str:
    """Read until the process has ended (returns "") or exceeds a limit (returns that outcome)."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, *outputs):
        poll.register(descriptor, select.POLLIN)
    for read in outputs:
        os.set_blocking(read, False)
    try:
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
            if any(read == ended for read, _ in ready):
                return _drain_rest(outputs, bounds)
    finally:
        os.close(ended)


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


def _death_outcome(status: int, used: "resource.struct_rusage", cpu_s: int, *, over_memory: bool) -> str:
    if status >= 0:
        return ""
    if status == -signal.SIGKILL and over_memory:
        return Outcome.MEMORY
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and used.ru_utime + used.ru_stime > cpu_s - 0.5):
        return Outcome.CPU
    return Outcome.CRASHED
