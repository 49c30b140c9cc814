"""Processes of a sweep that give no sign of life, with small programs in place of `headrace`."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.schema import RunConfig
from headrace.process import watchdog
from headrace.process.watchdog import Watchdog
from headrace.wiring.commands.experiments import run_process
from headrace.wiring.commands.experiments.run_process import SilentRunError, end_process, launch_process

HANGS = "import time; time.sleep(600)"
IS_STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
WRITES = """
import sys, time
from pathlib import Path
folder = Path("runs/seed-0_2026-01-01T00-00-00Z")
folder.mkdir(parents=True)
(folder / "config.toml").write_text("")
for number in range(20):
    time.sleep(0.1)
    with (folder / "activity.jsonl").open("a") as file:
        file.write("{}\\n")
sys.exit(3)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watchdog, "_open", {})  # without what other tests left running


def launch(program: str, monkeypatch: pytest.MonkeyPatch, *, end_s: float = 1.0) -> int:
    monkeypatch.setattr(run_process, "PROGRAM", (sys.executable, "-c", program))
    return launch_process([], run=RunConfig(name="seed-0", load_end_s=end_s), stop_s=1.0, poll_s=0.05)


@pytest.mark.parametrize("program", [HANGS, IS_STOPPED])
def test_a_process_without_a_sign_of_life_is_ended(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SilentRunError, match=r"no sign of life for 1 s \(run.load_end_s\)") as caught:
        launch(program, monkeypatch)
    found = re.search(r"process (\d+) was ended", str(caught.value))
    assert found is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)


def test_it_is_told_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Watchdog(tell_s=0.2, end_s=0.5), pytest.raises(SilentRunError):
        launch(HANGS, monkeypatch)
    assert "no progress: run seed-0" in caplog.text
    assert "has written nothing below runs" in caplog.text


def test_a_process_that_writes_to_its_run_folder_lives_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert launch(WRITES, monkeypatch) == 3
    assert time.monotonic() - began > 1.5


def test_no_process_is_ended_if_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch("import time; time.sleep(1.5)", monkeypatch, end_s=0.0) == 0


def test_a_process_that_does_not_hear_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end_process(process, grace_s=0.2) == -signal.SIGKILL


def test_a_sweep_that_was_stopped_for_hours_ends_no_healthy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Suspended:
        """A process that was stopped with the sweep for five hours, and ends after that."""

        clock, looks = 0.0, 0

        def monotonic(self) -> float:
            return self.clock

        def wait(self, _: float) -> int:
            self.looks += 1
            if self.looks > 2:
                return 0
            self.clock += 5 * 3600.0
            raise subprocess.TimeoutExpired("headrace", 5.0)

    process: Any = Suspended()
    signs: Any = SimpleNamespace(seen=lambda: False)
    activity: Any = SimpleNamespace(moved=0.0)
    activity.beat = lambda: setattr(activity, "moved", process.clock)
    monkeypatch.setattr(run_process, "time", process)
    run = RunConfig(name="seed-0", load_end_s=4 * 3600.0)
    assert run_process._wait(process, signs, activity, [], run=run, stop_s=1.0, poll_s=5.0) == 0
