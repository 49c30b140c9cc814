"""Answers of a worker thread to calls that wait in event loops. All that come while a loop is busy, or while the worker
collects them, reach it at once: waking it for each of a few hundred sequences that end in one step, and handing the
interpreter back and forth between the two threads every time, takes longer than what either has to do."""

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
    """For futures that only the worker ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[asyncio.AbstractEventLoop, list[PendingReply]] = {}
        self._collecting = False

    @contextmanager
    def batch_replies(self) -> Iterator[None]:
        """What is answered inside reaches the event loops at the end; for the worker."""
        self._collecting = True
        try:
            yield
        finally:
            with self._lock:
                self._collecting = False
                loops = list(self._pending)
            for loop in loops:
                self._tell(loop)

    async def answer(self, source: "Future[R]") -> R:
        """What the future ends with; it does not notice when nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[R] = loop.create_future()
        source.add_done_callback(partial(self._post, loop, waiting))
        return await waiting

    def _post(self, loop: asyncio.AbstractEventLoop, waiting: "asyncio.Future[R]", source: "Future[R]") -> None:
        with self._lock:
            for ended in [other for other in self._pending if other.is_closed()]:
                del self._pending[ended]
            pending = self._pending.setdefault(loop, [])
            pending.append((waiting, source))
            if self._collecting or len(pending) > 1:  # the loop will be told, or has been
                return
        self._tell(loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self._fetch, loop)
        except RuntimeError:  # the loop is closed, and nobody waits
            with self._lock:
                self._pending.pop(loop, None)

    def _fetch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            pending = self._pending.pop(loop, [])
        for waiting, source in pending:
            if waiting.done():
                continue
            if (exc := source.exception()) is not None:
                waiting.set_exception(exc)
            else:
                waiting.set_result(source.result())
