"""Queue sampling requests by owner and run many at a time. Owners that wait get the same number of sequences, however
many they ask for in one request."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import HeadraceError, SamplerError, boundary
from headrace.service.host.model_host import ModelHost, TopLogprobs
from headrace.service.requests.request_table import Done, Failed, Outcome, PendingRequest, RequestTable, to_failure
from headrace.service.sampling.sample_execution import add_rankings, draw_sequences, top_logprobs_host
from headrace.service.sampling.sample_job import SampleJob
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.service.store.entities import SamplerRecord
from headrace.service.store.registry import Registry
from headrace.service.wire.messages import PROTOBUF, write_sample
from headrace.types import Completion, FloatArray, IntArray, SampleRequest

logger = logging.getLogger(__name__)

CANCELLED = Failed(message="the request was cancelled", category="user")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Sequences that wait for their owner's turn."""

    size: int  # how many sequences
    start: Callable[[], object]  # runs them
    pending: PendingRequest | None = None  # the request they belong to; None: a caller waits in `turn`


@dataclass(slots=True)
class SamplingQueue:
    """Keep at most `max_running` sequences with the host. Lives on one event loop."""

    host: ModelHost
    samplers: SamplerCache
    requests: RequestTable
    registry: Registry
    folder: Path
    tempered: bool = False
    max_running: int = 256
    running: int = 0
    num_tokens: int = 0
    accepted_seqs: dict[str, set[int]] = field(default_factory=dict)  # since the start, by sampling session
    _queues: dict[str, "deque[_Waiting]"] = field(default_factory=dict)  # by owner
    _started: dict[str, int] = field(default_factory=dict)  # sequences, by owner
    _floor: int = 0  # what the owner had who was served last
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _turns: "set[asyncio.Future[bool]]" = field(default_factory=set)
    _closed: bool = False

    @property
    def depth(self) -> int:
        return sum(len(queue) for queue in list(self._queues.values())) + len(self._tasks)

    # --- journalled requests ---

    def enqueue(self, pending: PendingRequest) -> None:
        """Run a sampling request when it is its owner's turn."""
        job = pending.operation
        assert isinstance(job, SampleJob)

        def start() -> None:
            self._tasks[pending.row.id] = asyncio.get_running_loop().create_task(self._run(pending, job))

        self._add(pending.row.owner, _Waiting(len(job.params), start, pending))

    async def cancel(self, pending: PendingRequest, outcome: Failed = CANCELLED) -> None:
        """Fail a request: one that is queued never starts, the decoding of one that runs is stopped."""
        queue = self._queues.get(pending.row.owner)
        for waiting in [waiting for waiting in queue or () if waiting.pending is pending]:
            assert queue is not None
            queue.remove(waiting)
        task = self._tasks.get(pending.row.id)
        if task is not None:
            task.cancel()
        await self.requests.finish(pending, outcome)

    async def _run(self, pending: PendingRequest, job: SampleJob) -> None:
        pending.running = True
        try:
            with boundary(SamplerError, "sampling failed"):
                sampler = self.registry.sampler(pending.row.target, pending.row.owner)
                outcome: Outcome = await self._sample(sampler, job)
        except HeadraceError as exc:
            outcome = to_failure(exc, self.folder)
        finally:
            self._tasks.pop(pending.row.id, None)
            self._give_back(len(job.params))
        await self.requests.finish(pending, outcome)

    async def _sample(self, sampler: SamplerRecord, job: SampleJob) -> Outcome:
        async with self.samplers.using(sampler) as name:
            sampled = await draw_sequences(self.host, name, job, tempered=self.tempered)
            self.num_tokens += sum(len(completion.tokens) for completion in sampled.completions)
            sampled = await add_rankings(self.host, name, job, sampled)
        return Done(media=PROTOBUF, body=write_sample(sampled))

    # --- requests that are answered at once, and not journalled ---

    async def draw(self, sampler: SamplerRecord, request: SampleRequest) -> Completion:
        """Sample one sequence in its owner's turn."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "sampling failed"):
                completion = await self.host.sample(name, request)
        self.num_tokens += len(request.prompt) + len(completion.tokens) - request.num_given
        return completion

    async def score(self, sampler: SamplerRecord, sequence: IntArray) -> FloatArray:
        """Return the log-prob of every token given those before it; entry 0 is NaN."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "scoring failed"):
                (logprobs,) = await self.host.score(name, [sequence])
        return logprobs

    async def tops(self, sampler: SamplerRecord, sequence: IntArray, k: int) -> TopLogprobs:
        """Return the k likeliest tokens at every position."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "scoring failed"):
                return await top_logprobs_host(self.host).top_logprobs(name, sequence, k)

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, sequences: int) -> AsyncIterator[None]:
        """Wait for the owner's turn and hold room for so many sequences inside the block."""
        ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if ready.done():  # no caller waits any more; the caller, `_start_waiting`, goes on
                self.running -= sequences
            else:
                ready.set_result(True)

        self._turns.add(ready)
        self._add(owner, _Waiting(sequences, start))
        try:
            if self._closed or not await ready:
                raise SamplerError("the server is closing")
        except asyncio.CancelledError:
            if not ready.cancelled():  # it came in the same moment
                self._give_back(sequences)
            raise
        finally:
            self._turns.discard(ready)
        try:
            yield
        finally:
            self._give_back(sequences)

    # --- turns ---

    def _add(self, owner: str, waiting: _Waiting) -> None:
        if owner not in self._queues:  # whoever was away has no claim to what others got meanwhile
            self._queues[owner] = deque()
            self._started[owner] = max(self._started.get(owner, 0), self._floor)
        self._queues[owner].append(waiting)
        self._start_waiting()

    def _give_back(self, sequences: int) -> None:
        self.running -= sequences
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start waiting sequences while there is room, of the owner who has had fewest."""
        while self.running < self.max_running and self._queues and not self._closed:
            owner = min(self._queues, key=self._started.__getitem__)
            queue = self._queues.pop(owner)
            if not queue:
                continue
            waiting = queue.popleft()
            if queue:
                self._queues[owner] = queue
            self._floor = self._started[owner]
            self._started[owner] += waiting.size
            self.running += waiting.size
            waiting.start()

    async def close(self) -> None:
        """Stop everything; journalled requests are run again after the next start."""
        self._closed = True
        for ready in [ready for ready in self._turns if not ready.done()]:
            ready.set_result(False)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
