"""Write states beside training: copied in the order of requests, written on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress

from headrace.errors import BackendError, boundary
from headrace.process.watchdog import watching_thread


class StateWriter:
    """Writes the states of one backend. One is under way at most, so that there is one copy in memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-save")
        self._last: Future[None] | None = None

    def wait(self) -> None:
        """Return when nothing is being written; what has failed was told to those who asked for it."""
        if self._last is not None:
            wait([self._last])

    def write_copy(self, copying: "Future[Callable[[], None]]") -> "Future[None]":
        """Call what `copying` returns, which writes a copied state; the result is done when that has returned."""
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()

        def write(copied: "Future[Callable[[], None]]") -> None:
            if (error := copied.exception()) is not None:
                written.set_exception(error)
                return
            try:
                self._last = self._pool.submit(_guarded, copied.result())
            except RuntimeError:
                written.set_exception(BackendError("the state was not written: this backend is closed"))
                return
            self._last.add_done_callback(lambda ended: pass_on(ended, written))

        copying.add_done_callback(write)
        return written

    def close(self) -> None:
        """Wait for what is being written."""
        self._pool.shutdown(wait=True)


def pass_on(ended: "Future[None]", written: "Future[None]") -> None:
    """Give a future the outcome of another one, unless it has one."""
    with suppress(InvalidStateError):
        if (error := ended.exception()) is not None:
            written.set_exception(error)
        else:
            written.set_result(None)


def _guarded(write: Callable[[], None]) -> None:
    with watching_thread("the trainer: writing a state"), boundary(BackendError, "save_state failed"):
        write()
