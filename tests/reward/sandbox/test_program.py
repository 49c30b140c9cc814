"""Programs that nobody has read: run from outside the sandbox, and from within a reward function, with equal ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.reward.sandbox.limits import CallLimits, Outcome
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
from headrace.reward.sandbox.program import ProgramResult, run_untrusted
from support.paths import ROOT
from support.sandbox_modes import a_row

LIMITS = CallLimits(wall_s=90.0, cpu_s=30, memory_mb=256, processes=6, output_bytes=4096)

AUTHOR = """
from headrace.reward.sandbox.limits import CallLimits
from headrace.reward.sandbox.program import run_untrusted

SECRET = "the tests, which the program must not see"

def f(messages, code, stdin, limits, **kwargs):
    with open("notes", "w") as file:
        file.write(SECRET)
    ended = run_untrusted(code, stdin, CallLimits(**limits))
    print(ended.outcome, ended.status, ended.stdout[:500], ended.stderr[-500:], sep="|", end="")
    return 1.0
"""


async def ended(where: str, tmp_path: Path, code: str, stdin: str = "", **limits: float) -> ProgramResult:
    """How a program ends, run here or by a reward function in the sandbox."""
    chosen = {name: getattr(LIMITS, name) for name in ("wall_s", "cpu_s", "memory_mb", "processes", "output_bytes")}
    chosen |= limits
    if where == "outside":
        return run_untrusted(code, stdin, CallLimits(**chosen))
    file = tmp_path / "author.py"
    file.write_text(AUTHOR)
    sandbox = Sandbox({"spec": f"{file}:f"}, SandboxSettings(limits=CallLimits(wall_s=180.0), workers=1))
    answer = await sandbox.call({"rows": [a_row(code=code, stdin=stdin, limits=chosen)]})
    await sandbox.close()
    assert answer.outcome is Outcome.RETURNED, answer
    assert json.loads(answer.result) == [{"score": 1.0}]
    outcome, status, stdout, stderr = answer.stdout.split("|", 3)
    return ProgramResult(outcome=Outcome(outcome), status=int(status), stdout=stdout, stderr=stderr)


@pytest.fixture(params=["outside", "within"])
def where(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


async def test_a_program_reads_and_prints(where: str, tmp_path: Path) -> None:
    result = await ended(where, tmp_path, "print(sum(map(int, input().split())))", "1 2 3\n")
    assert (result.outcome, result.status, result.stdout) == (Outcome.RETURNED, 0, "6\n")


def test_a_virtual_environment_behind_a_link_runs_programs(tmp_path: Path) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("there is no virtual environment")
    linked = tmp_path / "environment"
    linked.symlink_to(os.path.realpath(sys.prefix))
    code = (
        "from headrace.reward.sandbox.limits import CallLimits\n"
        "from headrace.reward.sandbox.program import run_untrusted\n"
        "print(run_untrusted('print(6)', '', CallLimits(wall_s=90.0)).stdout)"
    )
    command = [str(linked / "bin" / "python"), "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() == "6"


async def test_its_exit_status_and_traceback_are_its_own(where: str, tmp_path: Path) -> None:
    result = await ended(where, tmp_path, "import sys; sys.exit(3)")
    assert (result.outcome, result.status) == (Outcome.RETURNED, 3)
    result = await ended(where, tmp_path, "1 / 0")
    assert (result.outcome, result.status) == (Outcome.RETURNED, 1)
    assert "ZeroDivisionError" in result.stderr
    result = await ended(where, tmp_path, "print('\ud83d')", "\ud83d")
    assert (result.outcome, result.status) == (Outcome.RETURNED, 1)
    assert "SyntaxError" in result.stderr


@pytest.mark.parametrize(
    ("code", "limits", "outcome"),
    [
        ("import time; time.sleep(1000)", {"wall_s": 0.001}, Outcome.TIMEOUT),
        ("while True: pass", {"cpu_s": 1}, Outcome.CPU),
        ("while True: print('x' * 1000)", {}, Outcome.OUTPUT),
        ("import ctypes; ctypes.string_at(0)", {}, Outcome.CRASHED),
    ],
)
async def test_limits_are_its_own_doing(
    where: str, tmp_path: Path, code: str, limits: dict[str, float], outcome: Outcome
) -> None:
    """Time is counted from where the program begins: an interpreter takes longer than a millisecond to start."""
    assert (await ended(where, tmp_path, code, **limits)).outcome == outcome


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("kept = bytearray(1 << 30)", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("open('/etc/passwd')", "Error"),
        ("open('/scratch/notes')", "Error"),  # the reward function's own temporary files
        ("open('{author}')", "Error"),  # and its source
        ("open('/written', 'w')", "Error"),
        ("import os; os.kill({trainer}, 9)", "Error"),
        ("import ctypes, os\nif ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0): raise OSError(1)", "OSError"),
        ("import os\nfor descriptor in range(3, 64): os.fstat(descriptor)", "Bad file descriptor"),
        ("import os; os.write(0, b'x')", "Bad file descriptor"),  # its input is a file of the machine
    ],
)
async def test_it_reaches_nothing(where: str, tmp_path: Path, code: str, error: str) -> None:
    filled = code.replace("{author}", str(tmp_path / "author.py")).replace("{trainer}", str(os.getpid()))
    result = await ended(where, tmp_path, filled)
    assert (result.outcome, result.status) == (Outcome.RETURNED, 1)
    assert error in result.stderr.splitlines()[-1]


TWO_PROCESSES = """
import os, time
os.fork()
kept = bytearray(48 << 20)
kept[::4096] = b"x" * len(kept[::4096])
time.sleep(1000)
"""


async def test_its_first_process_counts_with_the_others(where: str, tmp_path: Path) -> None:
    """Each has less than the limit, both together have more."""
    result = await ended(where, tmp_path, TWO_PROCESSES, memory_mb=80)
    assert result.outcome is Outcome.MEMORY


async def test_a_call_gets_no_more_output_than_its_own_limit(tmp_path: Path) -> None:
    """The process that keeps it for the call is outside of every limit of memory."""
    result = await ended("within", tmp_path, "print('x' * 100_000)", output_bytes=1_000_000)
    assert result.outcome is Outcome.OUTPUT


async def test_a_program_too_large_to_send_is_not_run(tmp_path: Path) -> None:
    result = await ended("within", tmp_path, "print('x')", "x" * (17 << 20))
    assert result.outcome is Outcome.NOT_RUN
    assert "16 MB" in result.stderr


async def test_it_cannot_end_the_reward_function(tmp_path: Path) -> None:
    """PID 1 of a namespace gets no signal from inside that it does not ask for."""
    result = await ended("within", tmp_path, "import os; os.kill(1, 9); print('done')")
    assert "done" in result.stdout or "PermissionError" in result.stderr
