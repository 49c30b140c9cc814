"""Run an untrusted program, such as one that a model wrote, and report how it ended.

For authors of reward functions: code executed in the function's own process could forge its score. `run_untrusted`
starts another interpreter with isolation of its own. Inside the sandbox it adds Landlock, seccomp and limits to the
outer layers (other namespaces cannot be made there), so the program sees neither the reward function's files nor its
memory. Standard library only.
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
    LAYERS_VARIABLE,
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
from headrace.reward.sandbox.supervisor import remove_leftovers, supervise

SMALL = CallLimits(wall_s=5.0, cpu_s=5, memory_mb=512, processes=4)
_PROGRAM = "main.py"
_START = "import sys; sys.path.insert(0, sys.argv[1]); from headrace.reward.sandbox.program import main; \
sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
_NOT_INHERITED = frozenset({IsolationLayer.USER, IsolationLayer.UID})  # outer layers that do not cover the program


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
    from the start of the program; starting it may take `import_s`.
    """
    ours, theirs = socket.socketpair()
    began, begins = os.pipe()
    with ours, open(began, "rb") as began_file, tempfile.TemporaryFile() as stdin_file:
        stdin_file.write(stdin.encode(errors="surrogatepass"))
        stdin_file.seek(0)
        with theirs:
            process = _spawn((theirs.fileno(), begins), stdin_file.fileno())
        os.close(begins)
        outer = [layer for layer in os.environ.get(LAYERS_VARIABLE, "").split(",") if layer]
        scratch = tempfile.gettempdir()
        order = {"code": code, "limits": asdict(limits), "outer": outer, "scratch": scratch}
        with process:
            with suppress(ConnectionError):  # the process ended before it read its order: the program has not begun
                framing.send(ours.fileno(), order)
            result = _follow(process, ours, began_file.fileno(), limits, nested=bool(outer))
            ours.close()
        remove_leftovers(scratch, process.pid)
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


def _follow(
    process: "subprocess.Popen[bytes]", lifeline: socket.socket, began: int, limits: CallLimits, *, nested: bool
) -> ProgramResult:
    """Read the output of the process, up to the limits, until it ends; then end what is left of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), began: bytearray()}
    open_streams = {process.stdout.fileno(), process.stderr.fileno()}
    deadline = time.monotonic() + limits.import_s
    over: Outcome | None = None
    with selectors.DefaultSelector() as ready:
        for stream in outputs:
            ready.register(stream, selectors.EVENT_READ)
        while open_streams and over is None:
            left = deadline - time.monotonic()
            if left <= 0:
                over = Outcome.TIMEOUT
            for key, _ in ready.select(max(0.0, left)):
                chunk = os.read(key.fd, 65_536)
                outputs[key.fd] += chunk
                if key.fd == began:
                    deadline = time.monotonic() + limits.wall_s
                if key.fd == began or not chunk:
                    ready.unregister(key.fd)
                    open_streams.discard(key.fd)
                if len(outputs[key.fd]) > limits.output_bytes:
                    over = Outcome.OUTPUT
    if over is not None:
        _end(process, lifeline, nested=nested)
    status = process.wait()
    has_begun = outputs.pop(began) or os.read(began, 1)  # its output may have been read first
    out, err = (bytes(data[: limits.output_bytes]).decode(errors="replace") for data in outputs.values())
    outcome = (over or _outcome(status)) if has_begun else Outcome.NOT_RUN
    return ProgramResult(outcome=outcome, status=status, stdout=out, stderr=err)


def _end(process: "subprocess.Popen[bytes]", lifeline: socket.socket, *, nested: bool) -> None:
    """Cut the lifeline, so that the supervisor ends everything; in an outer sandbox, which has none, kill the group."""
    lifeline.close()
    if nested:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _outcome(status: int) -> Outcome:
    if status in (OVER_CPU, -signal.SIGKILL):  # in an outer sandbox there is no supervisor to report it
        return Outcome.CPU
    if status == OVER_MEMORY:
        return Outcome.MEMORY
    return Outcome.CRASHED if status < 0 or status > 128 else Outcome.RETURNED


# --- in the new process ----------------------------------------------------------------------------------------------


def main(control: int, begins: int) -> int:
    """Isolate this process and run the program in it. `begins` gets a byte when the program takes over."""
    order = framing.receive(control)
    if order is None:
        return 1
    outer = frozenset(map(IsolationLayer, order["outer"])) - _NOT_INHERITED
    nested = bool(order["outer"])
    plan = IsolationPlan(
        layers=frozenset({IsolationLayer.LANDLOCK, IsolationLayer.SECCOMP, IsolationLayer.RLIMITS})
        if nested
        else EVERY_LAYER,
        readable=tuple(interpreter_paths()),
        scratch=order["scratch"],
        uid_offset=os.getpid(),
        limits=limits_from(order["limits"]),
        outer=outer,
    )
    if not nested:
        return supervise(
            plan,
            lambda isolation, _: _exec_program(order["code"], plan, isolation, begins),
            lifeline=control,
            keep=(begins,),
        )
    isolation = Isolation(active=set(outer), reasons={})
    scratch = tempfile.mkdtemp(dir=plan.scratch)
    os.close(control)
    isolate_inside(isolation, plan, scratch)
    os.chdir(scratch)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    return _exec_program(order["code"], plan, isolation, begins)


def _exec_program(code: str, plan: IsolationPlan, isolation: Isolation, begins: int) -> int:
    """Replace this process by an interpreter that runs the program. Never returns."""
    Path(_PROGRAM).write_bytes(code.encode(errors="surrogatepass"))  # half a character is an error of the program
    isolate_call(plan, isolation.active)
    os.environ.pop(LAYERS_VARIABLE, None)
    os.write(begins, b"b")
    os.set_inheritable(begins, False)
    os.execv(sys.executable, [sys.executable, "-s", "-P", _PROGRAM])
