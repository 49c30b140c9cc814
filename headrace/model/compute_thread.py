"""The thread that computes. Requests run one after the other, in the order they were submitted.

Trainer and engine on the same weights share one compute thread, so neither sees the other's half-made changes. On a CPU
that is faster, too: every thread that calls torch keeps a pool of arithmetic threads of its own, and once there are
more of those than cores, they stop waiting actively for work, which costs a decode step a third of its time.

On CUDA every compute thread has a stream of its own, so that an engine with its own thread samples while the trainer
trains. A request begins after the work that the submitting thread has queued on the device.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.errors import BackendError, HeadraceError
from headrace.process.watchdog import watching_thread

R = TypeVar("R")
# Held while transformers makes or loads a model: it replaces functions of its own classes meanwhile, among them the one
# that ties the head to the embedding, so that two threads at once would leave parameters without data.
MODEL_CONSTRUCTION = threading.RLock()
CLOSED = "this worker is closed: nothing can be computed on it any more"


class ComputeThread:
    """Runs requests on one thread, with `threads` threads of arithmetic, or as many as the calling thread has."""

    def __init__(self, *, threads: int | None = None) -> None:
        count = threads or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="headrace-compute", initializer=_start_thread, initargs=(count,)
        )
        self._closed = False
        self._queued = 0
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Return whether a request waits behind the running one, or `close` waits for its end."""
        return self._queued > 0 or self._closed

    def submit(self, run: Callable[[], R], *, what: str = "a request") -> "Future[R]":
        """Queue a request and return its future. Raises BackendError after `close`."""
        ordered = _after_queued_kernels(run)

        def unless_closed() -> R:
            self._count(-1)
            if self._closed:
                raise BackendError(CLOSED)
            with watching_thread(what):
                return ordered()

        self._count(1)
        try:
            future = self._pool.submit(unless_closed)
        except RuntimeError as exc:
            self._count(-1)
            raise BackendError(CLOSED) from exc
        future.add_done_callback(lambda ended: self._count(-1) if ended.cancelled() else None)  # it never ran
        return future

    def _count(self, change: int) -> None:
        with self._lock:
            self._queued += change

    def close(self) -> None:
        """Wait for the running request; those behind it fail with BackendError."""
        self._closed = True
        self._pool.shutdown(wait=True)


class InlineWorker:
    """Runs each request at once on the thread that submits it, for code that is on a compute thread already."""

    def submit(self, run: Callable[[], R], *, what: str = "a request") -> "Future[R]":
        future: Future[R] = Future()
        try:
            future.set_result(run())
        except HeadraceError as exc:
            future.set_exception(exc)
        return future

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


def _start_thread(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a model is on the device
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def _after_queued_kernels(run: Callable[[], R]) -> Callable[[], R]:
    """Make `run` wait for the kernels that the calling thread has queued on its CUDA stream, if there is one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return run
    queued = torch.cuda.current_stream().record_event()

    def ordered() -> R:
        torch.cuda.current_stream().wait_event(queued)
        return run()

    return ordered


def limit_torch_threads() -> int:
    """Leave the calling thread one thread of arithmetic; return how many it had, for a `ComputeThread`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
