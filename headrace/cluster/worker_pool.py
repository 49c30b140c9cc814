"""Keep workers of one role alive: start each in its place, watch it, and replace it when it dies or falls silent.

Failures of processes and machines end here. They never reach a group as such: who works with a worker gets
`WorkerLostError` and asks for another one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from headrace.cluster.role_worker import LogLine
from headrace.errors import EpisodeError, HeadraceError, RolloutError
from headrace.process.watchdog import watching
from headrace.retry import doubling

logger = logging.getLogger(__name__)

POLL_S = 2.0  # how long a poll waits for a message
TELL_S = 10.0  # between two lines about one wait
MAX_POLLS_PER_S = 400  # of all workers of a role: beyond, messages are gathered into fewer polls and answers
MAX_FAILED_STARTS = 8  # of one worker in a row
T = TypeVar("T")


class WorkerLostError(Exception):
    """The process or the machine of a worker is gone, or does not answer: not the fault of what it worked on."""


class Worker:
    """A worker that is alive, as the coordinator sees it. Answers are sent in batches, in order."""

    def __init__(self, role: str, index: int, actor: Any) -> None:
        self.role, self.index, self.actor = role, index, actor
        self.pid = 0
        self.load = 0  # groups that it works on
        self.unreached = 0  # engine replicas in a row that it could not use
        self.pace_s = 0.0  # between two polls, and between two batches of answers
        self._answers: list[tuple[int, object]] = []
        self._sending: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.role} worker {self.index}"

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker. Raises WorkerLostError if it does not get to answer, and EpisodeError if the
        method itself raises."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self.actor, method).remote(*arguments)
        except RayError as exc:
            if isinstance(exc, RayTaskError):
                raise EpisodeError(f"{self.name} failed: {_last_line(exc)}") from exc
            raise WorkerLostError(f"{self.name} (process {self.pid}) is gone: {_first_line(exc)}") from exc

    def answer(self, id: int, value: object) -> None:
        """Answer a call of the worker, together with others that are answered meanwhile."""
        self._answers.append((id, value))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_answers(), name=f"answers to {self.name}")

    async def _send_answers(self) -> None:
        with contextlib.suppress(WorkerLostError):  # the poll finds out as well, and sees to it
            while self._answers:
                answers, self._answers = self._answers, []
                await self.call("answer", answers)
                await asyncio.sleep(self.pace_s)


class WorkerPool:
    """Keeps `count` workers of a role alive, from `start` to `close`."""

    def __init__(
        self,
        role: str,
        count: int,
        *,
        create: Callable[[int], Any],  # start the actor of this index, in its place
        build: object,  # passed to the worker, which builds what it works with; or Ray's reference to it
        kill: Callable[[Any], None],
        deadline_s: float,  # of a start, of an answer to a poll, and of the wait for a worker
        handle: Callable[[Worker, Any], None] = lambda worker, message: None,  # take a message of a worker
    ) -> None:
        assert count > 0
        self.role, self._count, self._deadline_s = role, count, deadline_s
        self._create, self._build, self._kill = create, build, kill
        self.handle = handle
        self._alive: dict[int, Worker] = {}
        self._begun: set[int] = set()  # places whose worker has been alive
        self._given_up: dict[int, str] = {}  # workers that cannot be started, and why
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: HeadraceError | None = None
        self._changed = asyncio.Event()
        self.num_lost = 0

    def start(self) -> None:
        """Begin to start the workers."""
        assert not self._keepers, "a pool is started once"
        self._keepers = [
            asyncio.create_task(self._keep(index), name=f"{self.role} worker {index}") for index in range(self._count)
        ]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._changed.set())

    async def started(self) -> None:
        """Wait until each worker has been alive once, or was given up. Raises RolloutError at the deadline, and what
        building a worker raised."""
        await self._until(lambda: len(self._begun | self._given_up.keys()) == self._count, "to be started")

    async def close(self) -> None:
        """End all workers."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    @property
    def pids(self) -> list[int]:
        """Return the processes of the workers that are alive."""
        return [worker.pid for worker in self._alive.values()]

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """Lend the worker with the least to do; waits for one to be there. Raises RolloutError if none comes."""
        await self._until(lambda: bool(self._alive), "of which none is alive")
        worker = min(self._alive.values(), key=lambda worker: (worker.load, worker.index))
        worker.load += 1
        try:
            yield worker
        except WorkerLostError:  # lend it to nobody until its keeper has found out and replaced it
            if self._alive.get(worker.index) is worker:
                del self._alive[worker.index]
            raise
        finally:
            worker.load -= 1

    async def _until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached`. Raises RolloutError at the deadline, and when no worker can be started any more."""
        if reached() and self._failure is None and len(self._given_up) < self._count:
            return
        began_s = told_s = time.monotonic()
        with watching(f"{self.role} workers {what}", has_deadline=True):
            while not reached() or self._failure is not None or len(self._given_up) == self._count:
                for keeper in self._keepers:
                    if keeper.done() and not keeper.cancelled():
                        keeper.result()  # our bug, if it raises
                if self._failure is not None:
                    raise self._failure
                if len(self._given_up) == self._count:
                    raise RolloutError(f"no {self.role} worker can be started: {next(iter(self._given_up.values()))}")
                now_s = time.monotonic()
                if now_s - began_s > self._deadline_s:
                    raise RolloutError(
                        f"waited {self._deadline_s:g} s (cluster.deadline_s) for {self._count} {self.role} workers "
                        f"{what}; {self._describe()}"
                    )
                if now_s - told_s > TELL_S:
                    told_s = now_s
                    logger.info("waiting for %d %s workers %s; %s", self._count, self.role, what, self._describe())
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._changed.wait()

    def _describe(self) -> str:
        missing = sorted(set(range(self._count)) - set(self._alive))
        return f"{len(self._alive)} are alive, missing: {', '.join(str(index) for index in missing)}"

    async def _keep(self, index: int) -> None:
        """Start a worker, serve it until it is lost, and start it again; the body of a task for each place."""
        failed_starts, pauses_s, last = 0, doubling(0.2, 10.0), ""
        while True:
            worker, ready = Worker(self.role, index, self._create(index)), False
            try:
                built = await self._within(worker.call("ready", self._build), f"the start of {worker.name}")
                if isinstance(built, HeadraceError):
                    raise built
                worker.pid, ready = built, True
                failed_starts, pauses_s = 0, doubling(0.2, 10.0)
                self._alive[index] = worker
                self._begun.add(index)
                self._changed.set()
                await self._serve(worker)
            except WorkerLostError as exc:
                self.num_lost += 1
                failed_starts += not ready
                logger.warning("%s; it is started again", exc)
                last = str(exc)
            except HeadraceError as exc:  # it would fail on every machine
                self._failure = exc
                return
            finally:
                self._alive.pop(index, None)
                self._kill(worker.actor)
            if failed_starts >= MAX_FAILED_STARTS:
                self._given_up[index] = f"{worker.name} failed {failed_starts} times in a row to start ({last})"
                logger.error("%s: the run goes on without it", self._given_up[index])
                return
            await asyncio.sleep(next(pauses_s))

    async def _serve(self, worker: Worker) -> None:
        """Take the messages of a worker, until it is lost."""
        polled_s = 0.0
        while True:
            messages = await self._within(worker.call("poll", POLL_S), f"a sign of life of {worker.name}")
            for message in messages:
                if isinstance(message, LogLine):
                    logging.getLogger(message.name).log(message.level, "%s: %s", worker.name, message.text)
                else:
                    self.handle(worker, message)
            worker.pace_s = len(self._alive) / MAX_POLLS_PER_S
            wait_s = polled_s + worker.pace_s - time.monotonic()
            if messages and wait_s > 0:
                await asyncio.sleep(wait_s)
            polled_s = time.monotonic()

    async def _within(self, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await call
        except TimeoutError as exc:
            raise WorkerLostError(f"waited {self._deadline_s:g} s (cluster.deadline_s) for {what}") from exc


def _last_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[-1]


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
