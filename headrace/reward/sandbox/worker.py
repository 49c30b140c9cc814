"""Runs inside the isolation: imports the code once, then forks each call, whose processes it ends before the next.

The process that forks sees neither requests nor results: `attendant` exchanges them with the call's process, which
has its own descriptors and nothing else: stdin is empty, stdout and stderr are read up to a limit, and the result goes
over a private descriptor, after a nonce that only this call was given. Functions that matter after foreign
code was imported are bound to names here first, so that code which patches `os` or `json` changes its own results
only. Standard library only.
"""

import fcntl
import gc
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.errors import HeadraceError
from headrace.reward import user_function
from headrace.reward.raised import describe
from headrace.reward.sandbox import framing, linux, program
from headrace.reward.sandbox.attendant import (
    FORK,
    FORKED,
    KNOWN,
    NUM_CALL_DESCRIPTORS,
    TAIL_CHARS,
    Attendant,
    mount_scratch,
    unmount_scratch,
)
from headrace.reward.sandbox.isolation import Isolation, IsolationPlan, isolate_call
from headrace.reward.sandbox.limits import (
    OUT_OF_MEMORY,
    RAISED,
    RETURNED,
    IsolationLayer,
    limits_from,
    may_fork,
)
from headrace.reward.sandbox.scratch import ScratchState, capture
from headrace.reward.sandbox.supervisor import supervise

_fork, _write, _exit, _dumps, _close, _wait4 = os.fork, os.write, os._exit, json.dumps, os.close, os.wait4
_DESCRIPTORS = struct.Struct(f"={NUM_CALL_DESCRIPTORS}i")
_CMSG_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CONTROL_SPACE = socket.CMSG_SPACE(_DESCRIPTORS.size)
_RESULT, _PROGRAMS = 3, 4  # the private descriptors of a call's process
_MAX_DESCRIPTORS = 1 << 16
_MEMORY_SIGNALS = (signal.SIGUSR1,)  # the supervisor has killed a call because of its memory
_LEFT_PROCESSES = "importing it left {} processes behind, which were ended: start them inside the function"
_UNREAD_FILES = "importing it left files that cannot be read and are not there in calls: {}"
_kill, _waitpid, _describe = os.kill, os.waitpid, describe


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
    work = _WorkerProcesses(plan=plan, order=order, control=control)
    host = partial(program.host_program, most=plan.limits)
    return supervise(plan, work, lifeline=lifeline, keep=(control,), host=host)


def _renumber(descriptor: int) -> int:
    """Move a descriptor to the lowest free number, because a call closes only those below its limit of open files."""
    low = os.dup(descriptor)
    os.close(descriptor)
    return low


@dataclass(slots=True, kw_only=True)
class _WorkerProcesses:
    """The work of a worker's processes: the first inside runs foreign code, and the builder attends to forked calls."""

    plan: IsolationPlan
    order: dict[str, Any]
    control: int
    pair: tuple[socket.socket, socket.socket] | None = None  # builder and first process, if calls are forked

    def prepare(self, isolation: Isolation) -> None:
        """Choose whether calls are forked: it takes a PID namespace and a new folder for each of them."""
        if self.order["warm"] and may_fork(isolation.active):
            with suppress(OSError):  # the user namespace gives the right to mount in a mount namespace of its own only
                linux.unshare(linux.NEW_MOUNT)
                mount_scratch(self.plan.limits)
                unmount_scratch()
                self.pair = socket.socketpair()

    def run(self, isolation: Isolation, scratch: str, programs: int) -> int:
        program.connect(programs)
        if self.pair is None:
            return _serve_one_call(isolation, self.plan, self.order, self.control)
        os.close(self.control)
        self.pair[0].close()
        return _serve_forks(isolation, scratch, self.plan, self.order, self.pair[1])

    def kept_by_builder(self) -> tuple[int, ...]:
        return () if self.pair is None else (self.control, self.pair[0].fileno())

    def attend(self, supervisor: socket.socket | None) -> bool:
        if self.pair is None:
            return False
        assert supervisor is not None
        with suppress(OSError):  # the trainer, the supervisor or the worker is gone: so is this process
            Attendant(control=self.control, worker=self.pair[0], supervisor=supervisor, limits=self.plan.limits).serve()
        return True


def _import_code(
    isolation: Isolation, plan: IsolationPlan, order: dict[str, Any], control: int, scratch: str
) -> tuple[UserCode, ScratchState] | None:
    """Report the active layers and import the code, if the trainer agrees; returns it and the files that it made.

    Returns None if it is not to run. `scratch` is "" for a worker of one call.
    """
    warm = bool(scratch)
    framing.send(control, {"layers": sorted(isolation.active), "reasons": isolation.reasons, "warm": warm})
    if framing.receive(control) is None:  # the trainer may refuse these layers
        return None
    if warm:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, no process of its namespace can signal PID 1
    else:
        isolate_call(plan, isolation.active)
    sys.path += [entry for entry in order["path"] if entry not in sys.path]
    loaded: list[UserCode] = []
    failure = CapturedError(lambda: loaded.append(user_function.load(order["target"])))
    about = loaded[0].about if loaded else {}
    files = ScratchState("", ())
    if warm and loaded:
        ended = end_other_processes()
        files = capture(scratch)  # before the folder of the first call covers it
        notices = [_LEFT_PROCESSES.format(ended)] if ended else []
        notices += [_UNREAD_FILES.format(", ".join(files.unread[:3]))] if files.unread else []
        about = {**about, "notices": [*about["notices"], *notices]}
    reply = {"failed": failure.description, "refused": failure.is_ours}
    framing.send(control, {"about": about} if loaded else reply)
    return (loaded[0], files) if loaded else None


def _serve_one_call(isolation: Isolation, plan: IsolationPlan, order: dict[str, Any], control: int) -> int:
    """Import the code and answer one call in this process: a cold worker."""
    imported = _import_code(isolation, plan, order, control, "")
    request = None if imported is None else framing.receive(control)
    if imported is not None and request is not None:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            payload = _call_to_bytes(imported[0].call, request["argument"])
        tails = {"stdout": out.getvalue()[-TAIL_CHARS:], "stderr": err.getvalue()[-TAIL_CHARS:]}
        answer = (request["nonce"].encode() + payload).decode(errors="replace")
        framing.send(control, {"outcome": "", "payload": answer, **tails})
    return 0


def _serve_forks(
    isolation: Isolation, scratch: str, plan: IsolationPlan, order: dict[str, Any], attendant: socket.socket
) -> int:
    """Import the code and fork a process for each call, until the attendant is gone.

    Nothing of a call comes into this process but the descriptors that its own process needs, and how that ended.
    """
    receive, receive_plain, send = attendant.recvmsg, attendant.recv, attendant.send
    imported = _import_code(isolation, plan, order, attendant.fileno(), scratch)
    if imported is None:
        return 0
    code, files = imported
    signal.pthread_sigmask(signal.SIG_BLOCK, _MEMORY_SIGNALS)
    gc.collect()
    gc.freeze()  # a collection in a call would copy every page that holds an object
    while True:
        data, control, _, _ = receive(1, _CONTROL_SPACE, _CMSG_CLOEXEC)
        if data != FORK:
            return 0
        descriptors = list(_DESCRIPTORS.unpack(control[0][2]))
        pid = _fork()
        if pid == 0:
            _run_call(code.call, plan, isolation, files, descriptors, announce=send)
        for descriptor in descriptors:
            _close(descriptor)
        if receive_plain(1) != KNOWN:  # until then its number must not be given to another
            return 0
        _, raw, used = _wait4(pid, 0)
        end_other_processes()
        over_memory = signal.sigtimedwait(_MEMORY_SIGNALS, 0) is not None
        send(_death(os.waitstatus_to_exitcode(raw), used, plan.limits.cpu_s, over_memory=over_memory))


def _run_call(
    function: Callable[[Any], Any],
    plan: IsolationPlan,
    isolation: Isolation,
    files: ScratchState,
    descriptors: list[int],
    *,
    announce: Callable[[bytes], int],
) -> None:
    """Run one call in the process forked for it. Never returns."""
    try:
        announce(FORKED)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _MEMORY_SIGNALS)
        request, result, out, err, programs = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PROGRAMS + 1) if descriptor <= _PROGRAMS else descriptor
            for descriptor in descriptors
        )
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(result, _RESULT)
        os.dup2(programs, _PROGRAMS, inheritable=False)
        program.connect(_PROGRAMS)
        order = framing.receive(request)
        nonce = order["nonce"].encode()
        os.closerange(_PROGRAMS + 1, _MAX_DESCRIPTORS)
        os.chdir(files.folder)  # mounted for this call
        files.restore()
        isolate_call(plan, isolation.active)
        data = memoryview(nonce + _call_to_bytes(function, order["argument"]))
        while data:
            data = data[_write(_RESULT, data) :]
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        _exit(0)


def _death(status: int, used: "resource.struct_rusage", cpu_s: int, *, over_memory: bool) -> bytes:
    """Say how a call's process ended, as a key of `ENDS`."""
    if status >= 0:
        return b"0"
    if status == -signal.SIGKILL and over_memory:
        return b"m"
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and used.ru_utime + used.ru_stime > cpu_s - 0.5):
        return b"c"
    return b"x"


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


# --- foreign code ----------------------------------------------------------------------------------------------------


class CapturedError:
    """Runs foreign code and keeps a description of what it raised, also SystemExit; {} if it returned."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.description: dict[str, str] = {}
        self.out_of_memory = self.is_ours = False
        with self:
            body()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.out_of_memory, self.is_ours = isinstance(error, MemoryError), isinstance(error, HeadraceError)
            self.description = {"text": f"{type(error).__name__}: (its message cannot be shown)"}
            with _Suppressed():  # attributes of an exception are foreign code as well
                self.description = {"text": str(error)} if self.is_ours else _describe(error)
        return True


class _Suppressed:
    """Suppresses every exception."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return True


def _call_to_bytes(function: Callable[[Any], Any], argument: Any) -> bytes:
    results: list[bytes] = []
    caught = CapturedError(lambda: results.append(_dumps(function(argument), allow_nan=True).encode()))
    if results and not caught.description:
        return RETURNED + results[0]
    return (OUT_OF_MEMORY if caught.out_of_memory else RAISED) + _dumps(caught.description).encode()
