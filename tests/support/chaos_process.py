"""Run `headrace` commands under a fault, each in a process forked from one that has imported torch."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from support.faulty_disk import DiskFault, library
from support.paths import ROOT, TESTS

Point = tuple[str, int]
T = TypeVar("T")
SEED = os.environ.get("CHAOS_SEED", "1")
MINUTES = float(os.environ.get("CHAOS_MINUTES", "0"))  # for each part of the suite; 0: a fixed number of tries


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """All that happens to one process: a fault of its disk, a kill at a protocol step, signals in time."""

    fault: DiskFault | None = None
    points: Sequence[Point] = ()
    signals: Sequence[tuple[float, str, int, float]] = ()  # seconds, "self" or "worker", number, pause of a stop
    stop_s: float = 0.5
    pick: int = 0
    lines: int = 0  # of metrics.jsonl: the seconds of signals count from when a run has so many
    among: Sequence[str] = ()  # "worker" is a process below with one of these words in its command line; (): any


UNDISTURBED = Disturbance()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended, and what it said."""

    code: int
    hung: bool
    seconds: float
    sent: int
    said: str
    operations: int = 0  # of its disk, of the fault's kinds; 0: not counted, or killed
    struck: int = 0

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def last_line(self) -> str:
        return (self.said.strip().splitlines() or [""])[-1]


class ChaosProcess:
    """One process that forks commands, one at a time; use it from one thread, and `signal` from any."""

    def __init__(self) -> None:
        compiled = library()
        assert compiled is not None
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(compiled),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(TESTS / "support" / "chaos_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._pid: int | None = None
        assert self._read() == "ready"

    def run(
        self,
        folder: Path,
        *argv: str,
        disturbed: Disturbance = UNDISTURBED,
        log: Path | None = None,
        deadline_s: float = 120.0,
    ) -> Ended:
        """Run one command in `folder`; its output goes into a file beside the folder."""
        output = folder.with_name(folder.name + ".txt")
        output.write_text("")
        request = {
            "argv": argv, "folder": str(folder), "output": str(output), "points": list(disturbed.points),
            "signal": int(signal.SIGKILL), "fault": None if disturbed.fault is None else disturbed.fault.as_json(),
            "log": None if log is None else str(log), "signals": list(disturbed.signals), "stop_s": disturbed.stop_s,
            "deadline_s": deadline_s, "pick": disturbed.pick,
            "among": list(disturbed.among), "lines": disturbed.lines,
        }  # fmt: skip
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        with self._lock:
            self._pid = int(self._read().removeprefix("pid "))
        answer: dict[str, Any] = json.loads(self._read())
        with self._lock:
            self._pid = None
        return Ended(said=output.read_text(errors="replace"), **answer)

    def signal(self, number: int) -> bool:
        """Send a signal to the command that runs now; False if there is none."""
        with self._lock:
            if self._pid is None:
                return False
            try:
                os.kill(self._pid, number)
            except ProcessLookupError:
                return False
            return True

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks commands has ended"
        return line.strip()

    def close(self) -> None:
        """End it and any command that still runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class ChaosPool:
    """Processes that fork commands, started when they are first needed."""

    def __init__(self) -> None:
        self._idle, self._all = list[ChaosProcess](), list[ChaosProcess]()
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[ChaosProcess]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = ChaosProcess()
            self._all.append(process)
        try:
            yield process
        finally:
            with self._lock:
                self._idle.append(process)

    def each(self, tries: Iterable[T], attempt: Callable[[ChaosProcess, T], None], *, at_once: int = 2) -> float:
        """Make all tries, two at a time, or those that begin within CHAOS_MINUTES; return the seconds it took."""
        began, rest, lock = time.monotonic(), iter(tries), threading.Lock()

        def work() -> None:
            with self.borrow() as process:
                while True:
                    with lock:
                        over = MINUTES and time.monotonic() > began + 60 * MINUTES
                        chosen = () if over else tuple(itertools.islice(rest, 1))
                    if not chosen:
                        return
                    attempt(process, chosen[0])

        with ThreadPoolExecutor(at_once) as threads:
            for future in [threads.submit(work) for _ in range(at_once)]:
                future.result()
        return time.monotonic() - began

    def close(self) -> None:
        for process in self._all:
            process.close()
