"""What runs inside the walls: imports the code once, then forks each call into a PID namespace of its own.

A call's process has its own pipes and nothing else: stdin is empty, stdout and stderr are read up to a limit, and the
result goes over a private descriptor, after a nonce that only this call was given. Functions that matter after foreign
code was imported are bound to names here first, so that code which patches `os` or `json` changes its own results
only. Standard library only.
"""

import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.reward import user_function
from headrace.reward.sandbox import framing, linux
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
from headrace.reward.sandbox.supervisor import supervise

_fork, _write, _exit, _dumps = os.fork, os.write, os._exit, json.dumps
_RESULT = 3  # the private descriptor, in a call's process
_MESSAGE_CHARS = 2000


class UserCode(Protocol):
    """Foreign code, imported. `about` tells the other side what to send."""

    @property
    def about(self) -> dict[str, Any]: ...

    def call(self, argument: Any) -> Any: ...


def main(control: int, lifeline: int) -> int:
    """The first frame is the order: the plan of the walls, what to import, and whether calls are forked."""
    control, lifeline = _low(control), _low(lifeline)
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


def _low(descriptor: int) -> int:
    """The same under the lowest free number: a call closes what is below its limit of open files, and only that."""
    low = os.dup(descriptor)
    os.close(descriptor)
    return low


def _serve(walls: Isolation, scratch: str, *, plan: IsolationPlan, order: dict[str, Any], control: int) -> int:
    """Says what stands, imports, then answers calls until the other side is gone."""
    warm = bool(order["warm"]) and may_fork(walls.standing)
    framing.send(control, {"walls": sorted(walls.standing), "reasons": walls.reasons, "warm": warm})
    if framing.receive(control) is None:  # the other side may not want what stands
        return 0
    if not warm:
        isolate_call(plan, walls.standing)
    sys.path += [entry for entry in order["path"] if entry not in sys.path]
    loaded: list[UserCode] = []
    failure = CapturedError(lambda: loaded.append(user_function.load(order["target"])))
    framing.send(control, {"about": loaded[0].about} if loaded else {"failed": failure.text})
    if not loaded:
        return 0
    if warm:
        linux.warm_up()
        gc.collect()
        gc.freeze()  # a collection in a call would copy every page that holds an object
    here = os.pidfd_open(os.getpid()) if warm else -1
    while (request := framing.receive(control)) is not None:
        nonce = request["nonce"].encode()
        if not warm:
            payload = _answer(loaded[0].call, request["argument"])
            framing.send(control, {"outcome": "", "payload": (nonce + payload).decode(errors="replace")})
            return 0
        answer = _Call(plan, walls, scratch, here).run(loaded[0].call, request["argument"], nonce)
        _empty(scratch)  # before the answer: a folder that cannot be emptied ends this worker, and is this call's doing
        framing.send(control, answer)
    return 0


def _empty(folder: str) -> None:
    """The next call finds the folder as this one did."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


class CapturedError:
    """Runs foreign code; whatever it raises, SystemExit too, is text afterwards. `text` is "" when it returned."""

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
    """str(error), whose `__str__` is foreign code as well."""

    def __init__(self, error: BaseException) -> None:
        self.text = "(its message cannot be shown)"
        with self:
            self.text = str(error)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return True


def _answer(function: Callable[[Any], Any], argument: Any) -> bytes:
    results: list[bytes] = []
    caught = CapturedError(lambda: results.append(_dumps(function(argument), allow_nan=True).encode()))
    if results and not caught.text:
        return RETURNED + results[0]
    return (OUT_OF_MEMORY if caught.out_of_memory else RAISED) + _dumps(caught.text).encode()


@dataclass(slots=True)
class _Call:
    """One call in a process of its own: made, watched, ended, cleared away."""

    plan: IsolationPlan
    walls: Isolation
    scratch: str
    here: int  # a descriptor of this process, whose PID namespace the next call's is made in

    def run(self, function: Callable[[Any], Any], argument: Any, nonce: bytes) -> dict[str, Any]:
        pipes = [os.pipe() for _ in range(3)]  # result, stdout, stderr
        linux.setns(self.here, linux.NEW_PID)
        linux.unshare(linux.NEW_PID)
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
        """Never returns."""
        try:
            os.setsid()
            result, out, err = writes
            spare = os.dup(result)  # the three may be where the others go
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.dup2(spare, _RESULT)
            os.closerange(_RESULT + 1, self.plan.limits.open_files + 8)
            isolate_call(self.plan, self.walls.standing)
            data = memoryview(nonce + _answer(function, argument))
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
        taken = {read: bytearray() for read in reads}
        over = _drain(pid, taken, bounds, deadline=time.monotonic() + limits.wall_s)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, raw, used = os.wait4(pid, 0)
        if not over:
            over = _how_it_died(os.waitstatus_to_exitcode(raw), used, limits.cpu_s)
        result, out, err = (bytes(taken[read]).decode(errors="replace") for read in reads)
        shown = {"stdout": out[-_MESSAGE_CHARS:], "stderr": err[-_MESSAGE_CHARS:]}
        return {"outcome": over, "payload": "" if over else result, **shown}


def _drain(pid: int, taken: dict[int, bytearray], bounds: dict[int, int], *, deadline: float) -> str:
    """Reads until the process has ended or something is over its limit: then that outcome."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, *taken):
        poll.register(descriptor, select.POLLIN)
    for read in taken:
        os.set_blocking(read, False)
    try:
        while True:
            left = deadline - time.monotonic()
            ready = poll.poll(max(0, left * 1000)) if left > 0 else []
            if not ready:
                return Outcome.TIMEOUT
            for read, event in ready:
                if read in taken and not _take(read, taken[read], bounds[read]) and event & select.POLLHUP:
                    poll.unregister(read)
                if read in taken and len(taken[read]) > bounds[read]:
                    return Outcome.RESULT_SIZE if read == next(iter(taken)) else Outcome.OUTPUT
            if any(read == ended for read, _ in ready):
                return _last_words(taken, bounds)
    finally:
        os.close(ended)


def _last_words(taken: dict[int, bytearray], bounds: dict[int, int]) -> str:
    """What is still in the pipes of a process that has ended; there is no end of file while an orphan holds them."""
    for position, (read, data) in enumerate(taken.items()):
        while len(data) <= bounds[read] and _take(read, data, bounds[read]):
            pass
        if len(data) > bounds[read]:
            return Outcome.OUTPUT if position else Outcome.RESULT_SIZE
    return ""


def _take(read: int, data: bytearray, bound: int) -> bool:
    try:
        part = os.read(read, min(65_536, bound + 1 - len(data)))
    except BlockingIOError:
        return False
    data += part
    return bool(part)


def _how_it_died(status: int, used: "resource.struct_rusage", cpu_s: int) -> str:
    if status >= 0:
        return ""
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and used.ru_utime + used.ru_stime > cpu_s - 0.5):
        return Outcome.CPU
    return Outcome.MEMORY if status == -signal.SIGKILL else Outcome.CRASHED
