"""Bridge futures of a compute thread to calls that wait in event loops, in batches.

All results that come while a loop is busy, or inside `batch_replies`, reach it with one wake-up. Waking the loop for
each of a few hundred sequences that end in one step, and passing the interpreter lock back and forth every time, would
take longer than the work of either thread.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

R = TypeVar("R")
PendingReply = tuple["asyncio.Future[Any]", "Future[Any]"]


class FutureBridge:
    """Pass on the results of futures that only the compute thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[asyncio.AbstractEventLoop, list[PendingReply]] = {}
        self._batching = False

    @contextmanager
    def batch_replies(self) -> Iterator[None]:
        """Deliver all results of futures that end inside at the end; called on the compute thread."""
        self._batching = True
        try:
            yield
        finally:
            with self._lock:
                self._batching = False
                loops = list(self._pending)
            for loop in loops:
                self._wake(loop)

    async def answer(self, source: "Future[R]") -> R:
        """Wait for the future's result. A caller that is cancelled does not cancel the future."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[R] = loop.create_future()
        source.add_done_callback(partial(self._post, loop, waiting))
        return await waiting

    def _post(self, loop: asyncio.AbstractEventLoop, waiting: "asyncio.Future[R]", source: "Future[R]") -> None:
        with self._lock:
            for closed in [other for other in self._pending if other.is_closed()]:
                del self._pending[closed]
            pending = self._pending.setdefault(loop, [])
            pending.append((waiting, source))
            if self._batching or len(pending) > 1:  # the loop will be woken, or has been
                return
        self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self._deliver, loop)
        except RuntimeError:  # the loop is closed: no call waits in it
            with self._lock:
                self._pending.pop(loop, None)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            pending = self._pending.pop(loop, [])
        for waiting, source in pending:
            if waiting.done():
                continue
            if (exc := source.exception()) is not None:
                waiting.set_exception(exc)
            else:
                waiting.set_result(source.result())
