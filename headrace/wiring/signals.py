"""Handle the signals that stop a run, and its log file. Knows no stage and no model."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.printable import OneLineFormatter

logger = logging.getLogger(__name__)
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the run again


class StopRequest:
    """A request to stop: an event, and whether a person made it at the keyboard."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.by_ctrl_c = False


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, *, deadline_s: float) -> Iterator[None]:
    """Set `stop` at the first SIGTERM or Ctrl-C, which asks for a checkpoint; end at once at the second.

    A run that has not ended `deadline_s` after the first is ended where it is, as by a kill: the checkpoint before
    counts. Outside of the main thread signals are the caller's business.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    timer = threading.Timer(deadline_s, _end_at_once, [deadline_s])  # a thread: the event loop may get busy
    timer.daemon = True

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask() -> None:
        timer.start()
        stop.event.set()
        logger.warning("asked to stop: saving a checkpoint (ask again to end at once)")

    def on_signal(number: int, frame: object) -> None:  # it may have interrupted anything, so it takes no lock
        restore()
        stop.by_ctrl_c = number == signal.SIGINT
        loop.call_soon_threadsafe(ask)

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        timer.cancel()
        restore()


def _end_at_once(deadline_s: float) -> None:
    logger.error("no checkpoint within %g s (checkpoint.deadline_s): the run ends without it", deadline_s)
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)


class _LogFile(logging.FileHandler):
    """A log file whose disk may fail: the run goes on without its lines and says so once."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            logger.warning("%s cannot be written (%s); lines are missing from it", self.baseFilename, error.strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write what this package logs to a file too. Raises RunFolderError if that cannot be opened."""
    with boundary(RunFolderError, f"the log {path} cannot be written"):
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("headrace")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
