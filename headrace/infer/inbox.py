"""Queue the tasks that event loops hand to the compute thread, which runs them between two steps. Knows no model."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from headrace.model.compute_thread import ComputeThread


@dataclass(frozen=True, slots=True)
class WorkerTask:
    run: Callable[[], None]  # called on the compute thread
    future: "Future[Any] | None"  # fails if the engine ends before the task has run


class Inbox:
    """Queue tasks for the compute thread `worker`. The engine's lock guards `append` and `drain`."""

    def __init__(self, worker: ComputeThread) -> None:
        self.closed = False  # the engine is closed: no further task runs
        self._worker = worker
        self._tasks: deque[WorkerTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def append(self, task: WorkerTask) -> None:
        self._tasks.append(task)

    def receive(self) -> None:
        """Run all waiting tasks, in order; called on the compute thread."""
        while self._tasks and not self.closed:
            self._tasks[0].run()  # the task stays queued until it is done, so that a failure reaches its future
            self._tasks.popleft()

    def drain(self) -> deque[WorkerTask]:
        """Remove and return the tasks that have not run."""
        tasks, self._tasks = self._tasks, deque()
        return tasks

    @property
    def is_wanted(self) -> bool:
        """True if the compute thread should come back soon: a task waits in the inbox, a request waits for the thread,
        or the engine is closing."""
        return bool(self._tasks) or self.closed or self._worker.is_wanted

    @property
    def must_yield(self) -> bool:
        """True if the engine is closing or another user of the compute thread waits for it."""
        return self.closed or self._worker.is_wanted
