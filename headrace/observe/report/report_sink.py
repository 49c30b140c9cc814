"""Write the report of a run again now and then while it lasts, in a process of its own."""

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.report.report_process import finish_report, start_report

logger = logging.getLogger(__name__)

EVERY_S = 60.0  # the least time between the end of a report and the begin of the next
MAX_SHARE = 0.02  # of the time that a run spends on them
CLOSE_S = 60.0


class ReportSink:
    """Takes what is logged as a sign that there is something new to report.

    `check_owner` raises if the run folder is another process's by now. A report that cannot be written is a warning.
    """

    def __init__(
        self,
        folder: Path,
        *,
        check_owner: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._check_owner, self._every_s, self._clock = folder, check_owner, every_s, clock
        self._due_s = clock() + every_s
        self._thread: threading.Thread | None = None  # waits for the process
        self._process: subprocess.Popen[str] | None = None
        self._left_out = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._clock() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._check_owner()
        self._thread = threading.Thread(target=self._write, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a report that is being written, for at most `CLOSE_S`; then it is left out."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._left_out = True
                if self._process is not None:
                    self._process.kill()
                logger.warning("the report of %s is not written after %g s, and is left out", self._folder, CLOSE_S)

    def _write(self) -> None:
        began_s = self._clock()
        try:
            with boundary(RunFolderError, "its process cannot be started"):
                self._process = start_report(self._folder)
            if self._left_out:  # meanwhile
                self._process.kill()
            finish_report(self._process)
        except RunFolderError as exc:
            if not self._left_out:
                logger.warning("the report of %s cannot be written: %s", self._folder, exc)
        now_s = self._clock()
        self._due_s = now_s + max(self._every_s, (now_s - began_s) / MAX_SHARE)
