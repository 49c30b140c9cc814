"""Programs cannot harm the reward function that judges them, and no call sees or marks another."""

import asyncio
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from headrace.reward.sandbox import pool
from headrace.reward.sandbox.limits import CallLimits, CallResult, Outcome
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings, SandboxWorker
from headrace.reward.sandbox.program import run_untrusted
from support import sandbox_attacks_judge as attacks
from support.sandbox_modes import Mode, a_row, modes, skip_unless_possible, weakened_modes

ATTACKS = Path(attacks.__file__)
LIMITS = CallLimits(wall_s=60.0, memory_mb=256, scratch_mb=8, file_mb=4)


@pytest.fixture(params=modes(), ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    skip_unless_possible(request.param)
    chosen: Mode = request.param
    return chosen


async def run_calls(mode: Mode, *calls: tuple[str, dict[str, object]], limits: CallLimits = LIMITS) -> list[CallResult]:
    """One after another on one worker for each function; the workers see calls of all kinds."""
    sandboxes = {name: Sandbox({"spec": f"{ATTACKS}:{name}"}, mode.settings(limits=limits)) for name, _ in calls}
    answers = [await sandboxes[name].call({"rows": [a_row(**data)]}) for name, data in calls]
    for sandbox in sandboxes.values():
        await sandbox.close()
    return answers


# --- programs --------------------------------------------------------------------------------------------------------


async def judge_all(mode: Mode) -> dict[str, CallResult]:
    sandbox = Sandbox({"spec": f"{ATTACKS}:judge"}, mode.settings(limits=LIMITS))
    answers = await asyncio.gather(*(sandbox.call({"rows": [a_row(program=name)]}) for name in attacks.PROGRAMS))
    await sandbox.close()
    return dict(zip(attacks.PROGRAMS, answers, strict=True))


@pytest.fixture(scope="module", params=modes(), ids=lambda mode: mode.name)
def judged(request: pytest.FixtureRequest) -> dict[str, CallResult]:
    skip_unless_possible(request.param)
    return asyncio.run(judge_all(request.param))


@pytest.mark.parametrize("name", attacks.PROGRAMS)
def test_a_program_that_attacks_its_judge_scores_as_one_that_fails(judged: dict[str, CallResult], name: str) -> None:
    assert _verdict(judged[name]) == _right_verdict(name), judged[name]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", weakened_modes(), ids=lambda mode: mode.name)
def test_without_a_layer_programs_do_not_break_their_judge(mode: Mode) -> None:
    skip_unless_possible(mode)
    answers = asyncio.run(judge_all(mode))
    assert {name: answer for name, answer in answers.items() if _verdict(answer) != _right_verdict(name)} == {}


def _verdict(answer: CallResult) -> object:
    return json.loads(answer.result)[0] if answer.outcome is Outcome.RETURNED else answer.outcome


def _right_verdict(name: str) -> object:
    return {"score": float(name == "right"), "parts": {"changed": 0.0}}


@pytest.mark.slow
async def test_programs_leave_their_judge_the_time_to_return(mode: Mode) -> None:
    limits = CallLimits(wall_s=10.0)
    [answer] = await run_calls(mode, ("runs_slow_programs", {}), limits=limits)
    assert answer.outcome is Outcome.RETURNED, answer
    assert json.loads(answer.result) == [{"score": 0.0, "parts": {"timeouts": 4.0}}]


async def test_a_program_has_a_user_and_namespaces_of_its_own(mode: Mode) -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:waits_for_program"}, mode.settings(limits=LIMITS, workers=1))
    await sandbox.describe()
    [pid] = sandbox.pids
    supervisor = psutil.Process(pid)
    [builder] = supervisor.children()
    [first] = builder.children()
    running = asyncio.ensure_future(sandbox.call({"rows": [a_row()]}))
    program = None
    while program is None and not running.done():
        await asyncio.sleep(0.01)
        program = next((child for child in supervisor.children(recursive=True) if _is_program(child)), None)
    assert program is not None, running.result()
    for kind in ("pid", "mnt", "user"):
        assert _namespace(program, kind) != _namespace(first, kind)
    [host] = [child for child in supervisor.children() if child != builder]
    assert _max_address_space(host) in range(1 << 30)  # it reads what the call sends
    if os.getuid() == 0 and mode.user is None:
        assert program.uids().real not in (0, first.uids().real)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not program.is_running()
    await sandbox.close()


async def test_the_host_of_a_program_reads_no_more_than_it_must(mode: Mode) -> None:
    answers = await run_calls(mode, *[("orders_directly", {"order": order}) for order in attacks.ORDERS])
    scores = [json.loads(answer.result)[0]["score"] for answer in answers]
    assert dict(zip(attacks.ORDERS, scores, strict=True)) == {name: float(name == "right") for name in attacks.ORDERS}


async def test_a_call_does_not_pay_for_programs_of_the_one_before(mode: Mode) -> None:
    """They end even if the process that should end them is stopped."""
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1))
    await sandbox.describe()
    [pid] = sandbox.pids
    supervisor = psutil.Process(pid)
    [builder] = supervisor.children()
    [first] = builder.children()
    running = asyncio.ensure_future(sandbox.call({"rows": [a_row(attack="waits_for_hog")]}))
    programs: list[psutil.Process] = []
    while not any(map(_is_large, programs)) and not running.done():
        await asyncio.sleep(0.01)
        programs = [one for host in supervisor.children() if host != builder for one in host.children(recursive=True)]
    for process in programs[:1]:
        process.suspend()
    for call in first.children():
        call.kill()
    assert (await running).outcome is Outcome.CRASHED
    answer = await sandbox.call({"rows": [a_row(attack="uses_memory")]})
    assert json.loads(answer.result or "null") == [{"score": 1.0}], answer
    assert sandbox.pids == [pid]
    assert not any(process.is_running() for process in programs)
    await sandbox.close()


def _is_large(process: psutil.Process) -> bool:
    try:
        return bool(process.memory_info().rss > 200 << 20)
    except psutil.Error:
        return False


def _is_program(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["main.py"]
    except psutil.Error:
        return False


def _max_address_space(process: psutil.Process) -> int:
    [limit] = re.findall(r"Max address space +(\S+)", Path(f"/proc/{process.pid}/limits").read_text())
    return -1 if limit == "unlimited" else int(limit)


def _namespace(process: psutil.Process, kind: str) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/{kind}")


def test_a_program_that_closes_its_streams_does_not_outlast_its_limit() -> None:
    result = run_untrusted(attacks.PROGRAMS["outlasts_its_output"], "", CallLimits(wall_s=0.5))
    assert result.outcome is Outcome.TIMEOUT


# --- traces ----------------------------------------------------------------------------------------------------------


async def test_a_call_leaves_no_mark_on_the_folder_of_the_next(mode: Mode) -> None:
    answers = await run_calls(mode, *[("leaves_marks", {})] * 3)
    first, *rest = [json.loads(answer.result)[0] for answer in answers]
    assert first["parts"] == {"mode": 0o700, "inode": first["parts"]["inode"], "entries": 1, "attributes": 0, "old": 0}
    assert rest == [first, first]


@pytest.mark.parametrize("look", ["looks_through_frames", "looks_through_memory"])
async def test_a_call_sees_nothing_of_an_earlier_one(mode: Mode, look: str) -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1))
    secret = "TASK123456789012" * 100
    earlier = await sandbox.call({"rows": [a_row(attack="keeps_a_secret", secret=secret)]})
    assert json.loads(earlier.result) == [{"score": 0.73125}]
    answer = await sandbox.call({"rows": [a_row(attack=look)]})
    assert json.loads(answer.result) == [{"score": 0.0}]
    await sandbox.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", weakened_modes(), ids=lambda mode: mode.name)
async def test_without_a_layer_no_call_leaves_or_finds_a_trace(mode: Mode) -> None:
    skip_unless_possible(mode)
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1))
    rows = [{"attack": "keeps_a_secret", "secret": "TASK123456789012" * 100}, {"attack": "leaves_marks"}]
    rows += [{"attack": name} for name in ("looks_through_frames", "looks_through_memory", "leaves_marks")]
    answers = [await sandbox.call({"rows": [a_row(**row)]}) for row in rows]
    await sandbox.close()
    kept, first, frames, memory, second = answers
    assert json.loads(kept.result) == [{"score": 0.73125}]
    assert [json.loads(frames.result), json.loads(memory.result)] == [[{"score": 0.0}]] * 2
    for found in (first, second):
        if found.outcome is Outcome.RAISED:  # seccomp denies what read-only mounts would not stop
            assert "PermissionError" in found.detail
            continue
        parts = json.loads(found.result)[0]["parts"]
        assert (parts["entries"], parts["attributes"], parts["old"]) == (1, 0, 0)


async def test_each_call_has_the_state_that_the_import_built(mode: Mode) -> None:
    answers = await run_calls(mode, *[("grows_cache", {})] * 3)
    assert [json.loads(answer.result) for answer in answers] == [[{"score": 2.0}]] * 3


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_STOP_S", 1.0)


@pytest.mark.parametrize("generation", ["supervisor", pytest.param("builder", marks=pytest.mark.slow), "first inside"])
async def test_a_worker_that_is_stopped_does_not_hold_up_the_pool(quick_stop: None, generation: str) -> None:
    settings = SandboxSettings(limits=CallLimits(wall_s=1.0), workers=1)
    sandbox = Sandbox({"spec": f"{ATTACKS}:grows_cache"}, settings)
    await sandbox.describe()
    [pid] = sandbox.pids
    supervisor = psutil.Process(pid)
    [builder] = supervisor.children()
    [first] = builder.children()
    {"supervisor": supervisor, "builder": builder, "first inside": first}[generation].send_signal(signal.SIGSTOP)
    async with asyncio.timeout(60):
        answer = await sandbox.call({"rows": [a_row()]})
        assert answer.outcome in (Outcome.RETURNED, Outcome.TIMEOUT)
        await sandbox.close()
    _, living = psutil.wait_procs((supervisor, builder, first), timeout=30)
    assert living == []


def test_a_supervisor_that_cannot_be_killed_does_not_hold_up_the_pool(quick_stop: None) -> None:
    class Unkillable:
        pid = 2**22 + 1  # above every process

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "a wait without a deadline"
            raise subprocess.TimeoutExpired("supervisor", timeout)

        def kill(self) -> None:
            pass

    read, write = os.pipe()
    worker = SandboxWorker(SandboxSettings(), Unkillable(), write)  # type: ignore[arg-type]
    assert asyncio.run(worker.stop()) == -signal.SIGKILL
    os.close(read)
