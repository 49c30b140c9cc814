"""Supervise an isolated process from outside: build its isolation, watch its memory, and end everything in it.

Three generations: the supervisor (this file), the builder, which makes the namespaces, and the first process inside,
which is PID 1 of its namespace where there is one, so that everything it started ends with it. The supervisor ends
when its lifeline closes: the other end is in the process that started it, so not even a SIGKILL there leaves
anything behind. It never runs foreign code. For a worker it also starts the programs that its calls ask for: beside
the worker and not inside it, so that a program cannot reach the call that judges it. Standard library only.
"""

import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from headrace.reward.sandbox import linux
from headrace.reward.sandbox.attendant import CALL_BEGAN, CALL_EVENT
from headrace.reward.sandbox.cgroup import PREFIX, MemoryCgroup, remove_cgroups
from headrace.reward.sandbox.isolation import LAYERS_VARIABLE, Isolation, IsolationPlan, isolate_inside, isolate_outside
from headrace.reward.sandbox.limits import OVER_CPU, OVER_MEMORY, CallLimits
from headrace.reward.sandbox.memory import exceeds, own_bytes

_POLL_MS = 50
_PROGRAMS_AT_ONCE = 8  # of one call; further ones wait
PROGRAM_WANTED = b"p"  # from a call; it comes back with the connection to the program's host
_END_S = 5.0  # for the kernel to end processes that were killed
_OVERHEAD_BYTES = 64 << 20  # of a cgroup: the builder, structures of the kernel, and pages of files in use
_LATE_S = 1.0  # after the deadline of its call, a program's host is ended


class SandboxedWork(Protocol):
    """The work of the processes that a supervisor starts."""

    def prepare(self, isolation: Isolation) -> None:
        """Prepare in the builder, before it forks the first process inside."""

    def run(self, isolation: Isolation, scratch: str, programs: int) -> int:
        """Run in the first process inside, with its writable folder and its socket for programs (-1: none)."""

    def attend(self, supervisor: socket.socket | None) -> bool:
        """Attend in the builder until the work is over; returns False if there is nothing to do but wait for it."""

    def kept_by_builder(self) -> tuple[int, ...]:
        """List the descriptors that `attend` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """A program that a call asks for."""

    connection: int  # to the call's process
    folder: str  # for temporary folders of programs
    deadline: float  # of the call, by the monotonic clock
    used_s: float  # by earlier programs of this call


ProgramHost = Callable[[ProgramRequest], None]


def supervise(
    plan: IsolationPlan,
    work: SandboxedWork,
    *,
    lifeline: int,
    keep: tuple[int, ...],
    host: ProgramHost | None = None,
) -> int:
    """Run `work` in isolation and return its exit status (above 128: a signal ended it).

    `keep` are descriptors for `work` alone; the supervisor closes its own copies. `host` runs the programs that are
    asked for from inside, in a process of its own for each.
    """
    if linux.available:
        linux.adopt_orphans()
    prefix = _scratch_prefix(os.getppid(), os.getpid())
    scratch = tempfile.mkdtemp(prefix=prefix, dir=plan.scratch)
    cgroup = MemoryCgroup.create(os.path.basename(scratch).removeprefix(PREFIX), _cgroup_bytes(plan.limits))
    programs = None if host is None else _Programs.open(host, plan, prefix, cgroup)
    builder = os.fork()
    if builder == 0:
        if cgroup is not None:
            cgroup.enter()
        _build(replace(plan, scratch=scratch), work, lifeline, programs)
    for descriptor in keep:
        os.close(descriptor)
    if programs is not None:
        programs.close_inside()
        programs.builder_pid = builder
    try:
        status = _watch(builder, lifeline, programs, cgroup, memory_bytes=plan.limits.memory_mb << 20)
        return OVER_MEMORY if status and cgroup is not None and cgroup.has_killed() else status
    finally:
        _kill_all(builder)
        if cgroup is not None:
            cgroup.remove()
        for folder in (scratch, *([programs.folder] if programs is not None and programs.folder else [])):
            shutil.rmtree(folder, ignore_errors=True)


def scratch_root() -> str:
    """Return the folder in which workers' temporary folders are made; the same for every user."""
    public = ("/tmp", "/var/tmp", "/usr/tmp")
    return next((path for path in public if os.path.isdir(path) and os.access(path, os.W_OK)), tempfile.gettempdir())


def remove_leftovers(root: str, supervisor: int) -> None:
    """Remove the folder that a supervisor leaves if it is killed. This process started it, and it has ended."""
    prefix = _scratch_prefix(os.getpid(), supervisor)
    for left in Path(root).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    remove_cgroups(prefix.removeprefix(PREFIX))


def _scratch_prefix(owner: int, supervisor: int) -> str:
    return f"{PREFIX}{owner}-{supervisor}-"


def _cgroup_bytes(limits: CallLimits, *, forked_from: int = 0) -> int:
    """Return the limit of a worker's cgroup: what a call may use, its folder, and what all its processes came from."""
    return ((limits.memory_mb + limits.scratch_mb) << 20) + _OVERHEAD_BYTES + forked_from


def _build(plan: IsolationPlan, work: SandboxedWork, lifeline: int, programs: "_Programs | None") -> None:
    """Build the isolation, fork `work` into it, and exit with the status of that process. Never returns."""
    status = 70
    with _exit_with(lambda: status):
        os.setpgid(0, 0)
        os.close(lifeline)
        supervisor, first_channel = (None, -1) if programs is None else programs.enter_builder()
        isolation, scratch = isolate_outside(plan)
        work.prepare(isolation)
        inside = os.fork()
        if inside == 0:
            with _exit_with(lambda: status):
                if linux.available:
                    os.setsid()  # a signal to "my group" must not reach the builder
                if supervisor is not None:
                    supervisor.close()
                isolate_inside(isolation, plan, scratch)
                os.chdir(scratch)
                os.environ.update(
                    {"HOME": scratch, "TMPDIR": scratch, LAYERS_VARIABLE: ",".join(sorted(isolation.active))}
                )
                tempfile.tempdir = scratch  # the module has cached the folder outside
                status = work.run(isolation, scratch, first_channel)
        if linux.available:
            linux.die_with_parent()
        kept = (*work.kept_by_builder(), *([] if supervisor is None else [supervisor.fileno()]))
        for descriptor in range(3, 64):
            if descriptor not in kept:
                with suppress(OSError):
                    os.close(descriptor)
        if work.attend(supervisor):
            os.kill(inside, signal.SIGKILL)
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


def _watch(
    builder: int, lifeline: int, programs: "_Programs | None", cgroup: MemoryCgroup | None, *, memory_bytes: int
) -> int:
    parent = os.getppid()
    next_check = 0.0
    while True:
        for pid, raw in _reap():
            if pid == builder:
                return os.waitstatus_to_exitcode(raw)
            if programs is not None:
                programs.note_end(pid)
        poll = select.poll()
        for descriptor in (lifeline, *(() if programs is None else programs.descriptors())):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(_POLL_MS)}
        if lifeline in ready or os.getppid() != parent:
            return 0
        if programs is not None:
            programs.handle(ready, lifeline)
        if time.monotonic() >= next_check:
            was_killed = cgroup is not None and cgroup.has_killed()
            if programs is not None and programs.forked_calls:
                is_over = _exceeds_in_forking_worker(builder, memory_bytes, was_killed=was_killed)
            else:
                hosts = () if programs is None else programs.running
                is_over = was_killed or _exceeds_together(builder, memory_bytes, hosts)
            if is_over:
                return OVER_MEMORY
            next_check = time.monotonic() + _POLL_MS / 1000


def _reap() -> Iterator[tuple[int, int]]:
    """Yield the PID and status of each child that has ended; processes whose parent was killed are among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


@dataclass(slots=True)
class _Programs:
    """Starts the programs that the current call asks for, and ends them with it."""

    host: ProgramHost
    limits: CallLimits
    root: str  # in which `folder` is made when the first program is asked for
    prefix: str
    builder: socket.socket  # says when calls begin and end
    channel: socket.socket | None  # on which the current call asks; at first the import, or the only call
    inside: tuple[socket.socket, socket.socket]  # the other ends of both
    cgroup: MemoryCgroup | None  # of the worker; each program has its own
    folder: str = ""
    deadline: float | None = None  # of the current call
    used_s: float = 0.0  # by programs of the current call that have ended
    running: dict[int, float] = field(default_factory=dict)  # when the host of each program started
    builder_pid: int = 0
    forked_calls: bool = False  # a call began, apart from the import

    @classmethod
    def open(cls, host: ProgramHost, plan: IsolationPlan, prefix: str, cgroup: MemoryCgroup | None) -> "_Programs":
        builder, for_builder = socket.socketpair()
        channel, for_inside = socket.socketpair()
        return cls(
            host=host,
            limits=plan.limits,
            root=plan.scratch,
            prefix=prefix,
            builder=builder,
            channel=channel,
            inside=(for_builder, for_inside),
            cgroup=cgroup,
        )

    def close_inside(self) -> None:
        for end in self.inside:
            end.close()

    def enter_builder(self) -> tuple[socket.socket, int]:
        """Close the supervisor's ends, in the builder; returns the builder's and the first process's."""
        self.builder.close()
        if self.channel is not None:
            self.channel.close()
        return self.inside[0], self.inside[1].detach()

    def descriptors(self) -> tuple[int, ...]:
        """List the descriptors to wait for. A call that has too many programs is not listened to."""
        listened = (self.builder, self.channel if len(self.running) < _PROGRAMS_AT_ONCE else None)
        return tuple(item.fileno() for item in listened if item is not None and item.fileno() >= 0)

    def note_end(self, pid: int) -> None:
        """Count the time of a program whose host has ended."""
        if pid in self.running:
            self.used_s += time.monotonic() - self.running.pop(pid)

    def handle(self, ready: set[int], lifeline: int) -> None:
        if self.builder.fileno() in ready:
            self._follow_call()
        elif self.channel is not None and self.channel.fileno() in ready:
            self._start(lifeline)

    def _follow_call(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self.builder, CALL_EVENT.size, 1)
        if len(data) < CALL_EVENT.size:  # the builder has ended
            self.builder.close()
            return
        self._end_programs()
        event, deadline = CALL_EVENT.unpack(data)
        if event == CALL_BEGAN:
            self.channel, self.deadline = socket.socket(fileno=descriptors[0]), deadline
            self._begin_forked_call()

    def _begin_forked_call(self) -> None:
        if self.cgroup is not None:
            self.cgroup.begin_call()
            if not self.forked_calls:
                with suppress(OSError):
                    self.cgroup.limit(_cgroup_bytes(self.limits, forked_from=self.cgroup.own_bytes()))
        self.forked_calls = True

    def _end_programs(self) -> None:
        """End the programs of the last call and their hosts, and remove their folders."""
        if self.folder:
            _kill_all_but(self.builder_pid)
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder, self.running, self.used_s = "", {}, 0.0
        if self.channel is not None:
            self.channel.close()
        self.channel, self.deadline = None, None

    def _start(self, lifeline: int) -> None:
        """Start a host for the program that is asked for, and send its connection to the process that asks."""
        assert self.channel is not None
        data = b""
        with suppress(OSError):
            data = self.channel.recv(1)
        if not data:
            self.channel.close()
            self.channel = None
            return
        if data != PROGRAM_WANTED:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._fork_host(lifeline, ours, theirs)
            with suppress(OSError):  # one that asks and does not listen gets no answer
                socket.send_fds(self.channel, [PROGRAM_WANTED], [theirs.fileno()], socket.MSG_DONTWAIT)

    def _fork_host(self, lifeline: int, ours: socket.socket, theirs: socket.socket) -> None:
        if not self.folder:
            self.folder = tempfile.mkdtemp(prefix=self.prefix, dir=self.root)
            os.chmod(self.folder, 0o711)  # the users of programs enter it
        now = time.monotonic()
        request = ProgramRequest(
            connection=ours.fileno(),
            folder=self.folder,
            deadline=self.deadline or now + self.limits.import_s + self.limits.wall_s,
            used_s=self.used_s + sum(now - started for started in self.running.values()),
        )
        pid = os.fork()
        if pid == 0:
            with _exit_with(lambda: 0):
                os.close(lifeline)
                self.builder.close()
                theirs.close()
                if self.channel is not None:
                    self.channel.close()
                if linux.available:
                    linux.die_with_parent()
                signal.setitimer(signal.ITIMER_REAL, max(0.0, request.deadline - now) + _LATE_S)
                self.host(request)
        self.running[pid] = now


def _exceeds_together(builder: int, memory_bytes: int, hosts: Iterable[int]) -> bool:
    """Say whether the processes inside use too much memory: of an import, the only call of a worker, or a program.

    They are all that is below this process but the `hosts` of programs: without a PID namespace, orphans become its
    children.
    """
    apart = {builder, *(pid for host in hosts for pid in (host, *descendants(host)))}
    return exceeds([pid for pid in descendants(os.getpid()) if pid not in apart], memory_bytes, inherited=0)


def _exceeds_in_forking_worker(builder: int, memory_bytes: int, *, was_killed: bool) -> bool:
    """Say whether the process that forks calls uses too much memory; a call that does is killed here.

    With `was_killed` the kernel has ended one of its processes at the limit of the cgroup.

    It is PID 1 of a namespace, so that all processes of a call are below it. Programs are not.
    """
    for inside in children(builder):
        inherited = own_bytes(inside)  # by every forked call
        if inherited > memory_bytes:
            return True
        call = descendants(inside)
        if was_killed or exceeds(call, memory_bytes, inherited=inherited):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(inside, signal.SIGUSR1)  # tells the worker why; it blocks this signal
            for pid in call:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return False


def _kill_all_but(builder: int) -> None:
    """Kill and reap all descendants but the builder and those below it."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        others = [child for child in children(os.getpid()) if child != builder]
        if not others:
            return
        for pid in (*others, *(pid for child in others for pid in descendants(child))):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for child in others:
            os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)


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
