"""Share what all roles do in a worker: messages go out with the coordinator's polls, answers come in batches."""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cluster.engine_access import LeaseCall, LeaseEnd
from headrace.errors import HeadraceError, RolloutError, boundary
from headrace.types import IntArray, SampleRequest

MAX_LOG_LINES = 1000  # that wait for a poll; older ones are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """Ask the coordinator to sample a turn of an episode."""

    id: int
    attempt: int  # at playing a group
    index: int  # of the episode in its group
    request: SampleRequest
    replayable: bool  # the episode's environment is deterministic


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """Ask the coordinator for log-probs, for a user's own rollout."""

    id: int
    attempt: int
    sequences: tuple[IntArray, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Report a line of the worker's log."""

    level: int
    name: str
    text: str


class RoleWorker(ABC):
    """Base of the actors. Every method that the coordinator calls is a coroutine on one event loop."""

    forwards_log = True  # to the coordinator

    def __init__(self) -> None:
        self._outbox: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        if self.forwards_log:
            root = logging.getLogger("headrace")
            root.setLevel(logging.INFO)
            root.addHandler(_OutboxHandler(self._outbox))

    async def ready(self, build: Callable[..., Any]) -> int | HeadraceError:
        """Build what the role works with; return the process id, or the error, which would be the same elsewhere."""
        try:
            with boundary(RolloutError, "a worker cannot be built"):
                self.build(build)
        except HeadraceError as exc:
            return exc
        return os.getpid()

    @abstractmethod
    def build(self, build: Callable[..., Any]) -> None:
        """Build what the role works with."""

    async def poll(self, timeout_s: float) -> list[Any]:
        """Return the messages that have come up; waits for the first, but no longer than `timeout_s`."""
        if not self._outbox:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                pass
        self._arrived.clear()
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    async def answer(self, answers: Sequence[tuple[int, object]]) -> None:
        """Take answers to calls: (id, value or exception)."""
        for id, value in answers:
            future = self._answers.pop(id, None)
            if future is None or future.done():
                continue
            if isinstance(value, BaseException):
                future.set_exception(value)
            else:
                future.set_result(value)

    def next_id(self) -> int:
        """Number a call."""
        self._num_calls += 1
        return self._num_calls

    def send(self, message: SampleCall | ScoreCall | LeaseCall | LeaseEnd) -> None:
        """Send a message to the coordinator, with its next poll."""
        self._outbox.append(message)
        self._arrived.set()

    async def call(self, message: SampleCall | ScoreCall | LeaseCall) -> Any:
        """Send a call to the coordinator and return its answer. The episode's own time limit is the deadline."""
        future = self._answers[message.id] = asyncio.get_running_loop().create_future()
        self.send(message)
        try:
            return await future
        finally:
            self._answers.pop(message.id, None)


class _OutboxHandler(logging.Handler):
    """Puts lines of the log among the messages, from any thread; they go with the next poll."""

    def __init__(self, outbox: deque[Any]) -> None:
        super().__init__(level=logging.INFO)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._outbox) < MAX_LOG_LINES:
            self._outbox.append(LogLine(level=record.levelno, name=record.name, text=record.getMessage()))
