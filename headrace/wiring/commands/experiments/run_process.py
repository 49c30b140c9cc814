"""Run `headrace` in a process of its own, and end it if it gives no sign of life.

A run ends what stalls in it by itself. What it cannot see is told and ended from here: a process that hangs before it
has a run folder, that somebody stopped, or that a disk does not let go of. Signs of life are changes of the files in
the run folder, of which one gets a line every second, and of its lock, in which a heart beats.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.config.schema import RunConfig
from headrace.errors import HeadraceError, Interrupted
from headrace.observe.run_folder import find_runs
from headrace.process.watchdog import Activity, watching
from headrace.storage.folder_lock import LOCK

logger = logging.getLogger(__name__)
PROGRAM = (sys.executable, "-m", "headrace.start")
POLL_S = 5.0
SUSPENDED_S = 30.0  # that a look comes late by where the sweep itself was stopped
GRACE_S, KILL_S = 60.0, 10.0  # for a process that was asked to end beyond its own deadline, and one that was killed


class SilentRunError(HeadraceError):
    """A run gave no sign of life for so long that its process was ended."""


class SignsOfLife:
    """Notices what the runs of a name write below `root`."""

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._name = root, name
        self._before = self._look()

    def seen(self) -> bool:
        """Return whether anything has changed since the last call."""
        before, self._before = self._before, self._look()
        return self._before != before

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        with suppress(OSError, HeadraceError), watching(f"looking into the folder of run {self._name}"):
            for folder in find_runs(self._root, self._name):
                for place in (folder.path, folder.path / LOCK):
                    for entry in os.scandir(place) if place.is_dir() else ():
                        state = entry.stat()
                        found[entry.path] = (state.st_mtime_ns, state.st_size)
        return found


def launch_process(arguments: Sequence[str], *, run: RunConfig, stop_s: float, poll_s: float = POLL_S) -> int:
    """Run `headrace` in a process and wait for it.

    Raises Interrupted if this process is asked to stop meanwhile, and SilentRunError if there was no sign of life for
    `run.load_end_s`. `stop_s`: the deadline of the process itself once it is asked to stop.

    The process is in a session of its own, so that Ctrl-C reaches it once, from here: it saves a checkpoint and ends.
    """
    signs = SignsOfLife(Path(run.folder), run.name)
    process = subprocess.Popen([*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    silent = f"process {process.pid} has written nothing below {run.folder}"
    with (
        _passed_on(process) as received,
        watching(f"run {run.name}", detail=lambda: silent, has_deadline=True) as activity,
    ):
        code = _wait(process, signs, activity, received, run=run, stop_s=stop_s, poll_s=poll_s)
    if received:
        raise Interrupted("the sweep was stopped; the same command goes on with it")
    return code


def _wait(
    process: "subprocess.Popen[bytes]",
    signs: SignsOfLife,
    activity: Activity,
    received: list[float],
    *,
    run: RunConfig,
    stop_s: float,
    poll_s: float,
) -> int:
    looked = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(poll_s)
        now = time.monotonic()
        if signs.seen() or now - looked > poll_s + SUSPENDED_S:  # a sweep that was stopped has seen no signs meanwhile
            activity.beat()
        looked = now
        if received and now - received[0] >= stop_s + GRACE_S:
            logger.error("run %s has not stopped after %.0f s: its process is ended", run.name, now - received[0])
            return end_process(process, grace_s=0.0)
        if run.load_end_s and now - activity.moved >= run.load_end_s:
            end_process(process, grace_s=stop_s + GRACE_S)
            raise SilentRunError(
                f"no sign of life for {run.load_end_s:g} s (run.load_end_s): process {process.pid} was ended"
            )


def end_process(process: "subprocess.Popen[bytes]", *, grace_s: float) -> int:
    """Ask a process to end, also one that was stopped, then kill it with all that it has started in its session.

    Returns its exit code; that of a kill for one that even a kill does not end, because a disk does not let go of it.
    """
    if grace_s:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(KILL_S)
    return -signal.SIGKILL


@contextmanager
def _passed_on(process: "subprocess.Popen[bytes]") -> Iterator[list[float]]:
    """Pass SIGTERM and Ctrl-C on to the process; yields the list of the times at which they came."""
    received: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, frame: object) -> None:
        received.append(time.monotonic())
        process.send_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
