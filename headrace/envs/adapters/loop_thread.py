"""Run coroutines of asynchronous packages for callers on plain threads: one event loop on a daemon thread."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Owns one event loop, started when it is first used; its thread does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start `work` on the loop and return its future."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it, for as long as it takes."""
        return self.submit(work).result()
