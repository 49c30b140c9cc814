"""Runs a program that nobody has read, such as one that a model wrote, and says how it ended.

For authors of reward functions: code executed in the function's own process could forge its score. `run_untrusted`
starts another interpreter behind walls of its own. Within the sandbox these are walls within walls: Landlock, seccomp
and limits are added to what stands around (other namespaces cannot be made there), so the program sees neither the
reward function's files nor its memory. Standard library only.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.reward.sandbox import framing
from headrace.reward.sandbox.isolation import (
    AROUND,
    Isolation,
    IsolationPlan,
    environment,
    interpreter_paths,
    isolate_call,
    isolate_inside,
    package_folder,
)
from headrace.reward.sandbox.limits import (
    EVERY_LAYER,
    OVER_CPU,
    OVER_MEMORY,
    CallLimits,
    IsolationLayer,
    Outcome,
    limits_from,
)
from headrace.reward.sandbox.supervisor import supervise, sweep

SMALL = CallLimits(wall_s=5.0, cpu_s=5, memory_mb=512, processes=4)
_PROGRAM = "main.py"
_START = "import sys; sys.path.insert(0, sys.argv[1]); from headrace.reward.sandbox.program import main; \
sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
_NOT_WITHIN = frozenset(
    {IsolationLayer.USER, IsolationLayer.UID}
)  # of the walls around: what a process inside has no part in


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """`outcome` is RETURNED whenever the program ended by itself; then `status` is its exit status. What it printed is
    its own claim: it is up to the caller what that proves."""

    outcome: Outcome
    status: int
    stdout: str
    stderr: str


def run_untrusted(code: str, stdin: str = "", limits: CallLimits = SMALL) -> ProgramResult:
    """Run Python source text with this standard input. Blocks for as long as the program runs, within the limits.

    OUTPUT, TIMEOUT, CPU and MEMORY are the program's doing; NOT_RUN is not: then nothing is known about it. `wall_s` is
    counted from where the program begins; until then it has `import_s`.
    """
    ours, theirs = socket.socketpair()
    began, begins = os.pipe()
    with ours, open(began, "rb") as began_file, tempfile.TemporaryFile() as given:
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        with theirs:
            process = _spawn((theirs.fileno(), begins), given.fileno())
        os.close(begins)
        around = [layer for layer in os.environ.get(AROUND, "").split(",") if layer]
        scratch = tempfile.gettempdir()
        order = {"code": code, "limits": asdict(limits), "around": around, "scratch": scratch}
        with process:
            with suppress(ConnectionError):  # it ended before it read its order: it has not begun
                framing.send(ours.fileno(), order)
            ended = _followed(process, ours, began_file.fileno(), limits, within=bool(around))
            ours.close()
        sweep(scratch, process.pid)
        return ended


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


def _followed(
    process: "subprocess.Popen[bytes]", lifeline: socket.socket, began: int, limits: CallLimits, *, within: bool
) -> ProgramResult:
    """Read what it prints, up to the limits, until it has ended; then end what is left of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    taken = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), began: bytearray()}
    open_streams = {process.stdout.fileno(), process.stderr.fileno()}
    deadline = time.monotonic() + limits.import_s
    over: Outcome | None = None
    with selectors.DefaultSelector() as ready:
        for stream in taken:
            ready.register(stream, selectors.EVENT_READ)
        while open_streams and over is None:
            left = deadline - time.monotonic()
            if left <= 0:
                over = Outcome.TIMEOUT
            for key, _ in ready.select(max(0.0, left)):
                part = os.read(key.fd, 65_536)
                taken[key.fd] += part
                if key.fd == began:
                    deadline = time.monotonic() + limits.wall_s
                if key.fd == began or not part:
                    ready.unregister(key.fd)
                    open_streams.discard(key.fd)
                if len(taken[key.fd]) > limits.output_bytes:
                    over = Outcome.OUTPUT
    if over is not None:
        _end(process, lifeline, within=within)
    status = process.wait()
    has_begun = taken.pop(began) or os.read(began, 1)  # its last words may have come first
    out, err = (bytes(data[: limits.output_bytes]).decode(errors="replace") for data in taken.values())
    outcome = (over or _outcome(status)) if has_begun else Outcome.NOT_RUN
    return ProgramResult(outcome=outcome, status=status, stdout=out, stderr=err)


def _end(process: "subprocess.Popen[bytes]", lifeline: socket.socket, *, within: bool) -> None:
    """Outside, the supervisor ends everything when its lifeline is cut; within walls, their own end does the rest."""
    lifeline.close()
    if within:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _outcome(status: int) -> Outcome:
    if status in (OVER_CPU, -signal.SIGKILL):  # within walls there is no supervisor to say it
        return Outcome.CPU
    if status == OVER_MEMORY:
        return Outcome.MEMORY
    return Outcome.CRASHED if status < 0 or status > 128 else Outcome.RETURNED


# --- in the new process ----------------------------------------------------------------------------------------------


def main(control: int, begins: int) -> int:
    """`begins` gets a byte when the program takes over: whatever ends before that was not its doing."""
    order = framing.receive(control)
    if order is None:
        return 1
    around = frozenset(map(IsolationLayer, order["around"])) - _NOT_WITHIN
    within = bool(order["around"])
    plan = IsolationPlan(
        layers=frozenset({IsolationLayer.LANDLOCK, IsolationLayer.SECCOMP, IsolationLayer.RLIMITS})
        if within
        else EVERY_LAYER,
        readable=tuple(interpreter_paths()),
        scratch=order["scratch"],
        uid_offset=os.getpid(),
        limits=limits_from(order["limits"]),
        around=around,
    )
    if not within:
        return supervise(
            plan, lambda walls, _: _become(order["code"], plan, walls, begins), lifeline=control, keep=(begins,)
        )
    walls = Isolation(standing=set(around), reasons={})
    scratch = tempfile.mkdtemp(dir=plan.scratch)
    os.close(control)
    isolate_inside(walls, plan, scratch)
    os.chdir(scratch)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    return _become(order["code"], plan, walls, begins)


def _become(code: str, plan: IsolationPlan, walls: Isolation, begins: int) -> int:
    """Never returns: an interpreter that knows nothing of this one takes its place."""
    Path(_PROGRAM).write_bytes(code.encode(errors="surrogatepass"))  # half a character is the program's own mistake
    isolate_call(plan, walls.standing)
    os.environ.pop(AROUND, None)
    os.write(begins, b"b")
    os.set_inheritable(begins, False)
    os.execv(sys.executable, [sys.executable, "-s", "-P", _PROGRAM])
