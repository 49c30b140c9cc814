import asyncio
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.config.introspect import default_of, keys
from headrace.process import watchdog
from headrace.process.watchdog import Watchdog, beat, describe_tasks, open_activities, watching, watching_thread
from headrace.service.settings import Limits


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep activities of services that other tests left running out of the table."""
    monkeypatch.setattr(watchdog, "_open", {})


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="headrace.process.watchdog")
    return caplog


def dog(tell_s: float = 10.0, end_s: float = 100.0) -> tuple[Watchdog, list[int]]:
    exits: list[int] = []
    return Watchdog(tell_s=tell_s, end_s=end_s, go_on="; go on with X", exit=exits.append), exits


def test_what_has_not_moved_is_told_once_and_again_after_twice_as_long(told: pytest.LogCaptureFixture) -> None:
    watch, exits = dog()
    with watching("the checkpoint of step 3", detail=lambda: "on a slow disk") as activity:
        for seconds, number in ((9, 0), (10, 1), (19, 1), (20, 2), (39, 2), (40, 3)):
            watch.check(activity.moved + seconds)
            first = [line for line in told.messages if line.startswith("no progress: the checkpoint of step 3")]
            assert len(first) == number, seconds
    assert "(10 s without progress, MainThread): on a slow disk" in told.text
    assert not exits


def test_a_beat_starts_the_time_again(told: pytest.LogCaptureFixture) -> None:
    watch, _ = dog()
    with watching_thread("the trainer"):
        (activity,) = (activity for activity in watchdog._open.values() if activity.what == "the trainer")
        activity.moved -= 50
        beat()
        watch.check(time.monotonic() + 9)
    assert "the trainer" not in told.text


def test_a_beat_outside_of_watched_work_does_nothing() -> None:
    beat()


def test_what_loads_may_take_longer_and_is_ended_too(told: pytest.LogCaptureFixture) -> None:
    exits: list[int] = []
    watch = Watchdog(tell_s=10.0, end_s=100.0, load_end_s=1000.0, exit=exits.append)
    with watching("a long start", loads=True) as activity:
        watch.check(activity.moved + 999)
        assert "no progress: a long start" in told.text
        assert not exits
        watch.check(activity.moved + 1001)
    assert exits == [75]
    assert "a long start: nothing moved for 1000 s, so the process ends" in told.text


def test_a_load_has_no_end_if_none_is_wanted_and_other_work_keeps_its_own() -> None:
    exits: list[int] = []
    watch = Watchdog(tell_s=10.0, end_s=100.0, load_end_s=0.0, exit=exits.append)
    with watching("loading a model", loads=True) as activity:
        watch.check(activity.moved + 1e6)
    assert not exits
    with watching("the trainer") as activity:
        watch.check(activity.moved + 101)
    assert exits == [75]


ENDLESS_START = """
import time
from headrace.process import watchdog
watchdog.STALL_WARN_S, watchdog.LOAD_END_S = 0.1, 0.3
with watchdog.watching_start("the start of the server"):
    time.sleep(600)
"""


def test_an_endless_start_of_a_command_without_a_run_ends_with_a_code() -> None:
    command = [sys.executable, "-c", ENDLESS_START]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 75
    assert "the start of the server: nothing moved for 0.3 s, so the process ends; start it again" in ended.stderr


def test_work_on_the_thread_of_the_event_loop_beats_for_it_and_a_long_load_does_not_end_it() -> None:
    async def run() -> None:
        exits: list[int] = []
        with Watchdog(tell_s=1000.0, end_s=4000.0, exit=exits.append) as watch:
            (loop,) = (activity for activity in watchdog._open.values() if activity.what == "the event loop")
            loop.moved -= 5000
            beat()
            watch.check(time.monotonic())
            assert not exits
            with watching_thread("loading a model", loads=True):
                watch.check(time.monotonic() + 5000)
                assert not exits
            watch.check(time.monotonic() + 5000)
            assert exits == [75]
        beat()

    asyncio.run(run())


GREEDY = """
import ctypes, sys, time
from pathlib import Path
from headrace.process.watchdog import Watchdog
log = Path(sys.argv[1])
def keep_the_interpreter():
    ctypes.PyDLL(None).sleep(2)  # it does not let other threads run
with Watchdog(tell_s=0.2, end_s=0.0, stacks=log):
    end = time.monotonic() + 60
    while b"keep_the_interpreter" not in log.read_bytes() and time.monotonic() < end:
        keep_the_interpreter()
size = log.stat().st_size
time.sleep(1)
assert log.stat().st_size == size
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library")
def test_stacks_are_written_also_if_a_thread_keeps_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GREEDY, str(tmp_path / "log.txt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "keep_the_interpreter" in (tmp_path / "log.txt").read_text()


def test_the_table_is_empty_afterwards() -> None:
    with pytest.raises(ValueError, match="x"), watching("work"):
        raise ValueError("x")
    assert "work" not in open_activities()


def test_it_says_what_else_goes_on_and_where_threads_stand(told: pytest.LogCaptureFixture) -> None:
    watch, _ = dog()
    go, waits = threading.Event(), threading.Event()

    def hang_here() -> None:
        with watching("the reward of group 7"):
            waits.set()
            go.wait(60)

    thread = threading.Thread(target=hang_here, name="reward-thread")
    thread.start()
    waits.wait(60)
    with watching("a batch of groups", detail=lambda: 1 / 0) as activity:
        watch.check(activity.moved + 10)
    go.set()
    thread.join()
    assert "meanwhile: the reward of group 7" in told.text
    assert "thread reward-thread:" in told.text
    assert "hang_here" in told.text
    assert "cannot be described: ZeroDivisionError" in told.text


def test_what_has_a_deadline_of_its_own_is_never_ended_from_here(told: pytest.LogCaptureFixture) -> None:
    watch, exits = dog()
    with watching("a batch", has_deadline=True) as activity:
        watch.check(activity.moved + 1000)
    assert not exits
    with watching("the trainer: optim_step") as activity:
        watch.check(activity.moved + 1000)
    assert exits == [75]
    assert "the trainer: optim_step: nothing moved for 100 s, so the process ends; go on with X" in told.text


def test_no_end_if_none_is_wanted() -> None:
    watch, exits = dog(end_s=0.0)
    with watching("the trainer") as activity:
        watch.check(activity.moved + 1e6)
    assert not exits


@contextmanager
def until(told: pytest.LogCaptureFixture, text: str) -> Iterator[None]:
    yield
    end = time.monotonic() + 60
    while text not in told.text and time.monotonic() < end:
        time.sleep(0.01)
    assert text in told.text


def test_a_blocked_event_loop_is_told(told: pytest.LogCaptureFixture) -> None:
    async def block() -> None:
        with Watchdog(tell_s=0.2, end_s=0.0):
            await asyncio.sleep(0.5)  # an idle loop answers
            assert "no progress" not in told.text
            with until(told, "no progress: the event loop"):
                pass  # `until` sleeps on the loop's own thread

    asyncio.run(block())


def test_tasks_are_told_by_the_place_where_they_wait() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    async def run() -> list[str]:
        tasks = [asyncio.create_task(outer()) for _ in range(3)]
        await asyncio.sleep(0)
        lines = list(describe_tasks(asyncio.get_running_loop()))
        for task in tasks:
            task.cancel()
        return lines

    lines = asyncio.run(run())
    assert any(line.startswith("3 tasks at Event.wait") and "inner" in line and "outer" in line for line in lines), (
        lines
    )


ENDLESS = """
import time
from headrace.process.watchdog import Watchdog, watching
with Watchdog(tell_s=0.1, end_s=0.3, go_on="; resume it"), watching("the trainer"):
    time.sleep(600)
"""


def test_an_endless_wait_ends_the_process_with_a_code_that_schedulers_know() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 75
    assert "the trainer: nothing moved for 0.3 s, so the process ends; resume it" in ended.stderr


def test_by_default_every_wait_has_a_deadline() -> None:
    """Of every time that a configuration may set, and of the watchdog, which ends what nothing else does."""
    times = {path: default_of(owner, name) for path, owner, name in keys() if name.endswith("_s")}
    known = {"run.stall_warn_s", "run.stall_end_s", "run.load_end_s", "rl.async.task_timeout_s", "cluster.deadline_s"}
    assert known <= times.keys()
    assert [path for path, seconds in times.items() if not 0 < seconds < math.inf] == []
    served = {entry.name: getattr(Limits(), entry.name) for entry in fields(Limits) if entry.name.endswith("_s")}
    assert served
    assert [name for name, seconds in served.items() if not 0 < seconds < math.inf] == []
    assert 0 < watchdog.STALL_WARN_S < watchdog.STALL_END_S < watchdog.LOAD_END_S < math.inf
