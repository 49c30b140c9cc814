"""Supervise an isolated process from outside: build its isolation, watch its memory, and end everything in it.

Three generations: the supervisor (this file), the builder, which makes the namespaces, and the first process inside,
which is PID 1 of its namespace where there is one, so that everything it started ends with it. The supervisor ends
when its lifeline closes: the other end is in the process that started it, so not even a SIGKILL there leaves
anything behind. It never runs foreign code. Standard library only.
"""

import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headrace.reward.sandbox import linux
from headrace.reward.sandbox.isolation import LAYERS_VARIABLE, Isolation, IsolationPlan, isolate_inside, isolate_outside
from headrace.reward.sandbox.limits import OVER_CPU, OVER_MEMORY
from headrace.reward.sandbox.memory import exceeds, resident_bytes

_POLL_MS = 50

Body = Callable[[Isolation, str], int]  # takes the isolation and the writable folder, returns an exit status


def supervise(plan: IsolationPlan, body: Body, *, lifeline: int, keep: tuple[int, ...]) -> int:
    """Run `body` in isolation and return its exit status (above 128: a signal ended it).

    `keep` are descriptors for `body` alone; the supervisor closes its own copies.
    """
    if linux.available:
        linux.adopt_orphans()
    scratch = tempfile.mkdtemp(prefix=_scratch_prefix(os.getppid(), os.getpid()), dir=plan.scratch)
    builder = os.fork()
    if builder == 0:
        _build(replace(plan, scratch=scratch), body, lifeline)
    for descriptor in keep:
        os.close(descriptor)
    try:
        return _watch(builder, lifeline, memory_bytes=plan.limits.memory_mb << 20)
    finally:
        _kill_all(builder)
        shutil.rmtree(scratch, ignore_errors=True)


def scratch_root() -> str:
    """Return the folder in which workers' temporary folders are made; the same for every user."""
    public = ("/tmp", "/var/tmp", "/usr/tmp")
    return next((path for path in public if os.path.isdir(path) and os.access(path, os.W_OK)), tempfile.gettempdir())


def remove_leftovers(root: str, supervisor: int) -> None:
    """Remove the folder that a supervisor leaves if it is killed. This process started it, and it has ended."""
    for left in Path(root).glob(f"{_scratch_prefix(os.getpid(), supervisor)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _scratch_prefix(owner: int, supervisor: int) -> str:
    return f"headrace-{owner}-{supervisor}-"


def _build(plan: IsolationPlan, body: Body, lifeline: int) -> None:
    """Build the isolation, fork `body` into it, and exit with the status of that process. Never returns."""
    status = 70
    with _exit_with(lambda: status):
        os.setpgid(0, 0)
        os.close(lifeline)
        isolation, scratch = isolate_outside(plan)
        inside = os.fork()
        if inside == 0:
            with _exit_with(lambda: status):
                if linux.available:
                    os.setsid()  # a signal to "my group" must not reach the builder
                isolate_inside(isolation, plan, scratch)
                os.chdir(scratch)
                os.environ.update(
                    {"HOME": scratch, "TMPDIR": scratch, LAYERS_VARIABLE: ",".join(sorted(isolation.active))}
                )
                tempfile.tempdir = scratch  # the module has cached the folder outside
                status = body(isolation, scratch)
        if linux.available:
            linux.die_with_parent()
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.close(descriptor)
        _, raw, used = os.wait4(inside, 0)
        status = os.waitstatus_to_exitcode(raw)
        if status == -signal.SIGKILL and used.ru_utime + used.ru_stime > plan.limits.cpu_s - 0.5:
            status = OVER_CPU
        status = status if status >= 0 else 128 - status


class _exit_with:
    """Exits the process at the end of the block, also on an exception, which is written to stderr."""

    def __init__(self, status: Callable[[], int]) -> None:
        self._status = status

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(self._status())


def _watch(builder: int, lifeline: int, *, memory_bytes: int) -> int:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    parent = os.getppid()
    while True:
        done, raw = os.waitpid(builder, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(raw)
        gone = bool(poll.poll(_POLL_MS)) or os.getppid() != parent
        if gone:
            return 0
        if _exceeds_memory(builder, memory_bytes):
            return OVER_MEMORY


def _exceeds_memory(builder: int, memory_bytes: int) -> bool:
    """Say whether the first process inside uses too much memory; a forked call that does is killed here.

    All other processes are of the one call that the first process runs: its descendants, and orphans, which become
    children of the first process of a PID namespace, or without one of this process.
    """
    for inside in children(builder):
        inherited = resident_bytes(inside)  # by every forked call
        if inherited > memory_bytes:
            return True
        call = [pid for pid in descendants(os.getpid()) if pid not in (builder, inside)]
        if exceeds(call, memory_bytes, inherited=inherited):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(inside, signal.SIGUSR1)  # tells the worker why; it blocks this signal
            for pid in call:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return False


def _kill_all(builder: int) -> None:
    """Kill all descendants until none is left; orphans become children of this process, so they are among them."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(builder, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    pids = children(pid)
    for child in pids:  # grows while it is read
        pids += children(child)
    return pids
