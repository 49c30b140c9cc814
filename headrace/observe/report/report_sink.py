"""Write the report of a run again now and then while it lasts, on a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.report.run_report import write_report

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
        self._thread: threading.Thread | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._clock() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._check_owner()
        self._thread = threading.Thread(target=self._write, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a report that is being written, for at most `CLOSE_S`."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the report of %s is not written after %g s, and is left out", self._folder, CLOSE_S)

    def _write(self) -> None:
        began_s = self._clock()
        try:
            with boundary(RunFolderError, f"the report of {self._folder} cannot be written"):
                write_report(self._folder)
        except RunFolderError as exc:
            logger.warning("%s", exc)
        now_s = self._clock()
        self._due_s = now_s + max(self._every_s, (now_s - began_s) / MAX_SHARE)
