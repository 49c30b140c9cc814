"""Run an untrusted program, such as one that a model wrote, and report how it ended.

For authors of reward functions: code executed in the function's own process could forge its score. `run_untrusted`
starts another interpreter with isolation of its own: user, namespaces, folder and limits. In the sandbox it asks the
worker's supervisor to do that outside, so a program is beside the reward function and never inside of its sandbox: it
can neither see nor name the process that judges it, and shares none of its limits. Standard library only.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from headrace.reward.sandbox import framing
from headrace.reward.sandbox.isolation import (
    LAYERS_VARIABLE,
    Isolation,
    IsolationPlan,
    environment,
    interpreter_paths,
    isolate_call,
    package_folder,
)
from headrace.reward.sandbox.limits import (
    EVERY_LAYER,
    OVER_CPU,
    OVER_MEMORY,
    CallLimits,
    Outcome,
    limits_from,
)
from headrace.reward.sandbox.supervisor import PROGRAM_WANTED, ProgramRequest, remove_leftovers, supervise

if sys.platform != "win32":
    import resource

SMALL = CallLimits(wall_s=5.0, cpu_s=5, memory_mb=512, processes=4)
_PROGRAM = "main.py"
_START = "import sys; sys.path.insert(0, sys.argv[1]); from headrace.reward.sandbox.program import main; \
sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
_PROGRAM_IDS = 1 << 28  # users of programs are above those of workers
_REQUEST_BYTES = 16 << 20  # of a program and its standard input
_HEADER_BYTES = 4096  # of the JSON before them
_HOST_BYTES = 128 << 20  # of address space, for what a call makes the host of its program hold
_CHUNK_BYTES = 65_536
_RETURN_S, _RETURN_SHARE = 2.0, 0.2  # of the time of a call, kept for the reward function after its last program
_STOP_S = 10.0
_MAX_DESCRIPTORS = 1024
_channel = -1  # in the sandbox: the socket on which to ask for programs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The end of a program. What it printed is its own claim: the caller decides what that proves."""

    outcome: Outcome  # RETURNED if the program ended by itself
    status: int  # the exit status of a program that ended by itself
    stdout: str
    stderr: str


def run_untrusted(code: str, stdin: str = "", limits: CallLimits = SMALL) -> ProgramResult:
    """Run Python source text with this standard input. Blocks for as long as the program runs, within the limits.

    OUTPUT, TIMEOUT, CPU and MEMORY are the program's doing; NOT_RUN says nothing about the program. `wall_s` counts
    from the start of the program; starting it may take `import_s`. In a reward function, the limits are at most those
    of the call, and a program ends with TIMEOUT while the call still has time to return.
    """
    if sys.platform == "win32":
        return _not_run("programs run in the sandbox, which only Linux and macOS have (docs/windows.md)")
    if _channel >= 0:
        return _ask_supervisor(code, stdin, limits)
    if os.environ.get(LAYERS_VARIABLE):
        return _not_run("in the sandbox, only the reward function's own process and its forks can call run_untrusted")
    with _read_only_file([_to_bytes(stdin)]) as stdin_file:
        return _run_here(_to_bytes(code), stdin_file, limits, folder=tempfile.gettempdir())


def _to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # half a character is the program's own error


# --- in the sandbox of a reward function -----------------------------------------------------------------------------


def connect(descriptor: int) -> None:
    """Set the socket on which this process, in the sandbox, asks for programs."""
    global _channel
    _channel = descriptor


def _ask_supervisor(code: str, stdin: str, limits: CallLimits) -> ProgramResult:
    """Let the supervisor of this worker run the program outside of this sandbox, where it cannot reach this process."""
    parts = _to_bytes(code), _to_bytes(stdin)
    sizes = tuple(map(len, parts))
    if sum(sizes) > _REQUEST_BYTES:
        return _not_run(f"the program and its standard input have more than {_REQUEST_BYTES >> 20} MB")
    reply: Any = None
    connection = _connect_to_host()
    if connection >= 0:
        with socket.socket(fileno=connection), suppress(ConnectionError):
            framing.send(connection, {"sizes": sizes, "limits": asdict(limits)})
            for part in parts:
                framing.send_bytes(connection, part)
            reply = framing.receive(connection)
    if reply is None:
        return _not_run("the supervisor of this sandbox did not run the program")
    return ProgramResult(
        outcome=Outcome(reply["outcome"]), status=reply["status"], stdout=reply["stdout"], stderr=reply["stderr"]
    )


def _connect_to_host() -> int:
    """Ask the supervisor for a program's host; returns the connection to it, or -1 if there is none."""
    descriptors: list[int] = []
    with suppress(OSError), socket.socket(fileno=os.dup(_channel)) as channel:
        channel.sendall(PROGRAM_WANTED)
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return descriptors[0] if descriptors else -1


def _not_run(reason: str) -> ProgramResult:
    return ProgramResult(outcome=Outcome.NOT_RUN, status=-1, stdout="", stderr=reason)


# --- in the supervisor of a worker -----------------------------------------------------------------------------------


def host_program(request: ProgramRequest, *, most: CallLimits) -> None:
    """Run the program that a call asks for, with limits of at most `most`, and send the result to the call.

    What comes from the call is not trusted: its sizes are checked before it is read, and memory is limited.
    """
    _limit_own_memory()
    order = framing.receive(request.connection, _HEADER_BYTES)
    if order is None:
        return
    code_bytes, stdin_bytes = map(int, order["sizes"])
    if min(code_bytes, stdin_bytes) < 0 or code_bytes + stdin_bytes > _REQUEST_BYTES:
        raise ValueError(f"a program of {code_bytes} bytes with {stdin_bytes} bytes of input")
    code = framing.read_exactly(request.connection, code_bytes)
    if code is None:
        return
    stop_at = request.deadline - min(_RETURN_S, _RETURN_SHARE * most.wall_s)
    limits = _at_most(limits_from(order["limits"]), most)
    with _read_only_file(_chunks(request.connection, stdin_bytes)) as stdin:
        result = _run_here(code, stdin, limits, folder=request.folder, stop_at=stop_at, caller=request.connection)
    if result.outcome is Outcome.NOT_RUN and time.monotonic() >= stop_at and 2 * request.used_s > most.wall_s:
        result = replace(result, outcome=Outcome.TIMEOUT)  # earlier programs used up the time of the call
    framing.send(request.connection, asdict(result))


def _at_most(limits: CallLimits, most: CallLimits) -> CallLimits:
    names = ("cpu_s", "memory_mb", "processes", "open_files", "file_mb", "scratch_mb", "output_bytes")
    return replace(limits, **{name: min(getattr(limits, name), getattr(most, name)) for name in names})


def _limit_own_memory() -> None:
    """Limit the address space of this process, not of the program, to what it has and `_HOST_BYTES` more."""
    with suppress(OSError, ValueError):  # no /proc: not Linux
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + _HOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _chunks(connection: int, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a connection, or fewer if it ends."""
    while size and (chunk := os.read(connection, min(size, _CHUNK_BYTES))):
        size -= len(chunk)
        yield chunk


# --- outside of any sandbox ------------------------------------------------------------------------------------------


@contextmanager
def _read_only_file(chunks: Iterable[bytes]) -> Iterator[int]:
    """Yield a descriptor of a file without a name: the program that inherits it can read it and not fill the disk."""
    descriptor, path = tempfile.mkstemp()
    with open(descriptor, "wb") as file:
        read = os.open(path, os.O_RDONLY)
        os.unlink(path)
        file.writelines(chunks)
    try:
        yield read
    finally:
        os.close(read)


def _run_here(
    code: bytes, stdin: int, limits: CallLimits, *, folder: str, stop_at: float = math.inf, caller: int | None = None
) -> ProgramResult:
    """Run the program in a new process below this one, at the latest until `stop_at`, or until `caller` hangs up."""
    if time.monotonic() >= stop_at:
        return _not_run("the call has no time left")
    ours, theirs = socket.socketpair()
    began, begins = os.pipe()
    with ours, open(began, "rb") as began_file:
        start = _spawn if caller is None else _ForkedProcess.start  # a process that serves a call has no other threads
        with theirs:
            process = start((theirs.fileno(), begins), stdin)
        os.close(begins)
        with process:
            with suppress(ConnectionError):  # the process ended before it read its order: the program has not begun
                framing.send(ours.fileno(), {"size": len(code), "limits": asdict(limits), "scratch": folder})
                framing.send_bytes(ours.fileno(), code)
            result = _follow(process, ours, began_file.fileno(), limits, stop_at=stop_at, caller=caller)
        remove_leftovers(folder, process.pid)
        return result


def _spawn(inherited: tuple[int, int], stdin: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-s", "-P", "-c", _START, str(package_folder().parent), *map(str, inherited)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=tempfile.gettempdir(),
        pass_fds=inherited,
        start_new_session=True,
    )


@dataclass(slots=True)
class _ForkedProcess:
    """A fork of this process that runs `main`, used like a Popen: it saves the start of an interpreter."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    status: int | None = None

    @classmethod
    def start(cls, inherited: tuple[int, int], stdin: int) -> "_ForkedProcess":
        out, err = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
                for descriptor, number in ((stdin, 0), (out[1], 1), (err[1], 2)):
                    os.dup2(descriptor, number)
                for low, high in pairwise((2, *sorted(inherited), _MAX_DESCRIPTORS)):
                    os.closerange(low + 1, high)
                os._exit(main(*inherited))
            finally:
                os._exit(70)
        os.close(out[1])
        os.close(err[1])
        return cls(pid, open(out[0], "rb"), open(err[0], "rb"))

    def __enter__(self) -> "_ForkedProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self.stderr.close()

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for the end. Raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while self.status is None:
            done, raw = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(raw)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            else:
                time.sleep(0.001)
        return self.status


def _follow(
    process: "subprocess.Popen[bytes] | _ForkedProcess",
    lifeline: socket.socket,
    began: int,
    limits: CallLimits,
    *,
    stop_at: float,
    caller: int | None,
) -> ProgramResult:
    """Read the output of the process, up to the limits, until it ends; then end what is left of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), began: bytearray()}
    # the supervisor has the other end of the lifeline until it ends, also when the program closes its streams
    open_ends = {process.stdout.fileno(), process.stderr.fileno(), lifeline.fileno()}
    deadline = min(stop_at, time.monotonic() + limits.import_s)
    over: Outcome | None = None
    with selectors.DefaultSelector() as ready:
        for descriptor in (*outputs, lifeline.fileno(), *([] if caller is None else [caller])):
            ready.register(descriptor, selectors.EVENT_READ)
        while open_ends and over is None:
            left = deadline - time.monotonic()
            if left <= 0:
                over = Outcome.TIMEOUT
            for key, _ in ready.select(max(0.0, left)):
                if key.fd == caller:
                    over = Outcome.NOT_RUN  # nobody waits for it
                    continue
                chunk = b"" if key.fd == lifeline.fileno() else os.read(key.fd, 65_536)
                if key.fd == began:
                    deadline = min(stop_at, time.monotonic() + limits.wall_s)
                if key.fd == began or not chunk:
                    ready.unregister(key.fd)
                    open_ends.discard(key.fd)
                if chunk:
                    outputs[key.fd] += chunk
                    over = Outcome.OUTPUT if len(outputs[key.fd]) > limits.output_bytes else over
    lifeline.close()  # if the supervisor is still there, it ends everything
    status = _wait(process)
    has_begun = outputs.pop(began) or os.read(began, 1)  # its output may have been read first
    out, err = (bytes(data[: limits.output_bytes]).decode(errors="replace") for data in outputs.values())
    outcome = (over or _outcome(status)) if has_begun else Outcome.NOT_RUN
    return ProgramResult(outcome=outcome, status=status, stdout=out, stderr=err)


def _wait(process: "subprocess.Popen[bytes] | _ForkedProcess") -> int:
    """Wait for the supervisor of a program, which has little left to do; one that is stopped is killed."""
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(_STOP_S)


def _outcome(status: int) -> Outcome:
    if status == OVER_CPU:
        return Outcome.CPU
    if status == OVER_MEMORY:
        return Outcome.MEMORY
    return Outcome.CRASHED if status < 0 or status > 128 else Outcome.RETURNED


# --- in the new process ----------------------------------------------------------------------------------------------


def main(control: int, begins: int) -> int:
    """Isolate a process and run the program in it. `begins` gets a byte when the program takes over."""
    order = framing.receive(control)
    code = None if order is None else framing.read_exactly(control, order["size"])
    if code is None:
        return 1
    plan = IsolationPlan(
        layers=EVERY_LAYER,
        readable=tuple(interpreter_paths()),
        scratch=order["scratch"],
        uid_offset=_PROGRAM_IDS + os.getpid(),
        limits=limits_from(order["limits"]),
    )
    work = _ProgramProcesses(code=code, plan=plan, begins=begins)
    return supervise(plan, work, lifeline=control, keep=(begins,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramProcesses:
    """The work of a program's processes: the first inside becomes the program, and the builder waits for it."""

    code: bytes
    plan: IsolationPlan
    begins: int

    def prepare(self, isolation: Isolation) -> None:
        pass

    def run(self, isolation: Isolation, scratch: str, programs: int) -> int:
        """Replace this process by an interpreter that runs the program. Never returns."""
        Path(_PROGRAM).write_bytes(self.code)
        isolate_call(self.plan, isolation.active)
        os.environ.pop(LAYERS_VARIABLE, None)
        os.write(self.begins, b"b")
        os.set_inheritable(self.begins, False)
        os.execv(sys.executable, [sys.executable, "-s", "-P", _PROGRAM])

    def kept_by_builder(self) -> tuple[int, ...]:
        return ()

    def attend(self, supervisor: socket.socket | None) -> bool:
        return False
