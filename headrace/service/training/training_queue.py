"""Run training requests, each exactly once: strictly by sequence number within a model, in turn between owners, and
between the models of an owner.

A request waits until those before it are there. `window` of them are handed to the host at a time, which runs them in
the order they were handed over, so it never idles and no model queues far ahead of others.

**Restart.** A model is brought back when it is needed: its saved state is loaded (`model_states`), and every later
request in the journal is run again in order. Those that had finished run only for what they do to the model; their
outcome stays the one that was reported.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import BackendError, HeadraceError, JournalError, RequestError, boundary
from headrace.service.evaluation.reference_scoring import References
from headrace.service.host.model_host import ModelHost
from headrace.service.requests.request_table import RETRY_S, Outcome, PendingRequest, RequestTable, to_failure
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.service.store.checkpoint_folders import CheckpointFolders
from headrace.service.store.entities import ModelEntity
from headrace.service.store.journal import Journal, JournalRow
from headrace.service.store.registry import Registry
from headrace.service.telemetry import Telemetry
from headrace.service.training.model_queue import ModelQueue, lacks_reference
from headrace.service.training.model_states import ModelStates, Recording, SideEffects
from headrace.service.training.operations import CreateOp, ForwardOp, InvalidOp, Operation, OptimStepOp, parse_operation
from headrace.service.training.training_execution import OperationRunner
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks

logger = logging.getLogger(__name__)

FINISHED = "SELECT target, seq FROM requests WHERE state != 'queued' AND kind != 'sample' AND body IS NOT NULL"


class TrainingQueue:
    """Hand the requests of all models to the host. Lives on one event loop; `folder` is the server's."""

    def __init__(
        self,
        host: ModelHost,
        requests: RequestTable,
        registry: Registry,
        journal: Journal,
        folder: Path,
        samplers: SamplerCache,
        references: References,
        checkpoints: CheckpointFolders,
        *,
        window: int = 2,
        max_resident: int = 64,
        full_save_steps: int = 1,
        telemetry: Telemetry | None = None,
        images: ImageChunks = TEXT_ONLY,
    ) -> None:
        assert window > 0
        self._images = images
        self._host, self._requests, self._registry, self._journal = host, requests, registry, journal
        self._folder = folder
        self._references, self._checkpoints = references, checkpoints
        self._window, self._max_resident = window, max_resident
        self._telemetry = telemetry or Telemetry()
        self._states = ModelStates(host, registry, journal, folder, full_save_steps=full_save_steps)
        self._runner = OperationRunner(
            host, registry, samplers, self._states, folder, self._telemetry, clock=lambda: self.clock
        )
        self._queues: dict[str, ModelQueue] = {}
        self._retired: dict[str, tuple[int, ...]] = {}  # of models without a queue, `ModelQueue.finished`
        self._turns: deque[ModelQueue] = deque()
        self._last_turn: dict[str, int] = {}  # by owner
        self._turn_numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._closed = False
        self.clock = 0  # requests run
        self.seconds: dict[str, float] = {}  # that requests took, by kind

    # --- adding and removing ---

    def start(self, unfinished: Iterable[JournalRow]) -> None:
        """Go on where the journal ends; `unfinished` are the queued requests of models."""
        for target, seq in self._journal.query(FINISHED):
            model = self._registry.models.get(target)
            if model is not None and seq > model.saved_seq:
                self._queues.setdefault(target, _reopened(model)).finished.add(seq)
        for row in unfinished:
            pending = self._requests.restore(row, parse_operation(row.kind, row.body or b"", images=self._images))
            pending.accepted.set_result(None)
            self._queues.setdefault(row.target, _reopened(self._registry.models[row.target]))
            self.enqueue(pending)

    def enqueue(self, pending: PendingRequest) -> None:
        """Run a request when those before it have run and it is its model's turn."""
        queue = self._open_queue(pending.row.target)
        self._add(queue, pending)
        if queue not in self._turns:
            self._turns.append(queue)
        self._start_ready()

    def _open_queue(self, model: str) -> ModelQueue:
        """Return the queue of a model; one that was retired goes on behind its saved state."""
        if model not in self._queues:
            known = self._registry.models.get(model)
            if known is None or known.saved_seq < 0:  # about to be created: nothing needs to be brought back
                self._queues[model] = ModelQueue(model=model, resident=True)
            else:
                self._queues[model] = _reopened(known)
                self._queues[model].finished.update(self._retired.pop(model, ()))
        return self._queues[model]

    def _add(self, queue: ModelQueue, pending: PendingRequest) -> None:
        """Queue a request; log-probs of a reference model are computed while it waits."""
        queue.waiting[pending.row.seq] = pending
        if lacks_reference(pending):
            assert isinstance(pending.operation, ForwardOp)
            self._spawn(self._add_reference_logprobs(pending, pending.operation))

    async def cancel(self, pending: PendingRequest) -> bool:
        """Keep a queued request from starting; its number counts as finished. False when it has started.

        Raises JournalError, and the request still waits then.
        """
        queue, seq = self._queues.get(pending.row.target), pending.row.seq
        if queue is None:  # nothing of its model waits
            return False
        if queue.waiting.get(seq) is not pending or pending.replay or isinstance(pending.operation, CreateOp):
            return False
        del queue.waiting[seq]  # it does not start meanwhile, and nothing behind it does
        try:
            why = RequestError("the request was cancelled before it started")
            then = partial(queue.finished.add, seq)
            await self._requests.finish_once(pending, to_failure(why), then=then, never_ran=True)
        except JournalError:
            queue.waiting[seq] = pending
            if queue not in self._turns:  # it left them when nothing else waited
                self._turns.append(queue)
            raise
        finally:
            self._start_ready()
        return True

    async def fail_unreachable(self, model: str, why: str) -> None:
        """Fail the requests that wait for numbers that will not come; what can run, runs."""
        queue = self._queues.get(model)
        for pending in queue.take_unreachable() if queue is not None else ():
            await self._requests.finish(pending, to_failure(RequestError(why)), never_ran=True)

    async def unload(self, model: str) -> None:
        """Take a model that is idle off the host; it is brought back when it is needed."""
        queue = self._queues.get(model)
        if queue is None or not queue.is_idle:
            return
        queue.resident = False
        with contextlib.suppress(HeadraceError):
            await asyncio.wrap_future(self._host.drop(model))

    def retire(self, model: str) -> None:
        """Let go of what is kept for a model whose session has ended, if nothing of it waits or runs."""
        queue = self._queues.get(model)
        if queue is None or queue.resident or queue.restoring or queue.depth or queue.num_unjournalled:
            return
        if queue.unsaved or queue.unrecorded or queue.restore_error or queue in self._turns:
            return
        del self._queues[model]
        if queue.finished:
            self._retired[model] = tuple(queue.finished)
        self._telemetry.end(model, self._registry.models[model].owner)

    def forget(self, model: str) -> None:
        """Forget a retired model that is deleted."""
        assert model not in self._queues
        self._retired.pop(model, None)

    async def close(self) -> None:
        """Stop; requests that run are left to the journal and run again after the next start."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- where things stand ---

    def is_finished(self, model: str, seq: int) -> bool:
        """Say whether this request has an outcome already."""
        known = self._registry.models.get(model)
        if known is not None and seq <= known.saved_seq:
            return True
        return seq in (self._queues[model].finished if model in self._queues else self._retired.get(model, ()))

    def depth(self, model: str | None = None) -> int:
        """Count the requests that wait or run, of one model or of all."""
        if model is None:
            return sum(queue.depth for queue in list(self._queues.values()))
        return self._queues[model].depth if model in self._queues else 0

    def position(self, pending: PendingRequest) -> int:
        """Count the requests of its model before this one."""
        return self._queues[pending.row.target].position(pending.row.seq)

    def missing_seq(self, pending: PendingRequest) -> int | None:
        """Return the number that has to come before this request can run, if it has not come."""
        return self._queues[pending.row.target].missing_seq()

    def is_awaited(self, model: str, seq: int) -> bool:
        """Say whether requests that are here wait for this number, which has not come."""
        queue = self._queues.get(model)
        return queue is not None and bool(queue.waiting) and seq == queue.missing_seq()

    def has_queue(self, model: str) -> bool:
        """Say whether anything is kept for a model; not once it is retired."""
        return model in self._queues

    def is_resident(self, model: str) -> bool:
        return model in self._queues and self._queues[model].resident

    def is_behind(self, model: str) -> bool:
        """Say whether the saved state may lack updates that were made."""
        return self._queues[model].is_behind if model in self._queues else model in self._retired

    @property
    def num_resident(self) -> int:
        return sum(queue.resident for queue in list(self._queues.values()))

    # --- order ---

    def _start_ready(self) -> None:
        """Hand requests to the host while fewer than `window` are there, models taking turns."""
        while self._num_running < self._window and not self._closed:
            queue = self._next_queue()
            if queue is None:
                return
            pending = queue.take_next(time.monotonic())
            self._num_running += 1
            self._spawn(self._run_again(queue, pending) if pending.replay else self._run(queue, pending))

    def _next_queue(self) -> ModelQueue | None:
        """Choose the model whose turn it is; one that the host does not have is brought back first."""
        while True:
            for _ in range(len(self._turns)):  # those without requests leave, the others keep their order
                queue = self._turns.popleft()
                if queue.waiting:
                    self._turns.append(queue)
            ready = [queue for queue in self._turns if not queue.restoring and (not queue.resident or queue.can_run())]
            if not ready:
                return None
            queue = min(ready, key=lambda queue: self._last_turn.get(self._owner(queue), 0))
            self._last_turn[self._owner(queue)] = next(self._turn_numbers)
            self._turns.remove(queue)
            self._turns.append(queue)
            if queue.resident:
                return queue
            queue.restoring = True
            self._spawn(self._restore(queue))

    def _owner(self, queue: ModelQueue) -> str:
        return self._registry.models[queue.model].owner

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add_reference_logprobs(self, pending: PendingRequest, operation: ForwardOp) -> None:
        ready: Operation
        try:
            with boundary(BackendError, f"the reference model '{operation.reference}' failed"):
                ready = await self._references.add_logprobs(operation, pending.row.owner)
        except HeadraceError as exc:
            ready = InvalidOp(message=str(exc), server_fault=to_failure(exc).category == "server")
        if pending.operation is operation:  # it was not cancelled meanwhile
            pending.operation = ready
        self._start_ready()

    # --- running ---

    async def _run(self, queue: ModelQueue, pending: PendingRequest) -> None:
        """Run a request on the host, journal its outcome, and do what follows from it."""
        effects = SideEffects()
        with self._running(queue, pending):
            outcome = await self._outcome(queue, pending, effects)
        recording = await self._finish(queue, pending, outcome, effects)
        self._start_ready()
        if effects.record is not None:
            self._telemetry.log(effects.record)
        for folder in recording.stale:
            await self._checkpoints.remove_folder(folder)
        for folder in recording.marked:
            await self._checkpoints.remove_marked(folder)

    async def _finish(
        self, queue: ModelQueue, pending: PendingRequest, outcome: Outcome, effects: SideEffects
    ) -> Recording:
        """Journal the outcome with what becomes true by it, as often as it takes."""

        def then() -> None:
            queue.num_unjournalled -= 1
            if pending.row.seq > self._registry.models[queue.model].saved_seq:
                queue.finished.add(pending.row.seq)

        while True:
            try:
                async with self._registry.changing(*effects.changed):
                    recording = effects.decide()
                    await self._requests.finish_once(
                        pending, outcome, changes=recording.changes, also=recording.statements, then=then
                    )
                return recording
            except JournalError:  # logged by the journal; others may change the records before the next attempt
                await asyncio.sleep(RETRY_S)

    async def _outcome(self, queue: ModelQueue, pending: PendingRequest, effects: SideEffects) -> Outcome:
        operation = pending.operation
        assert isinstance(operation, Operation)
        try:
            with boundary(BackendError, f"{pending.row.kind} failed"):
                if queue.restore_error:
                    raise BackendError(
                        f"the model is not where it was before the server's restart: {queue.restore_error}"
                    )
                return await self._runner.run(queue, pending, operation, effects)
        except HeadraceError as exc:
            queue.unsaved.discard(pending.row.seq)
            if isinstance(operation, OptimStepOp):
                self._telemetry.forget(queue.model)
                if not queue.restore_error:  # else only the journal still has the way to where it was
                    self._states.record(queue, pending, None, effects)
            return to_failure(exc, self._folder)

    async def _run_again(self, queue: ModelQueue, pending: PendingRequest) -> None:
        """Run a request that had finished before a restart once more."""
        operation = pending.operation
        assert isinstance(operation, Operation)
        with self._running(queue, pending):
            try:
                with boundary(BackendError, f"{pending.row.kind} failed"):
                    await self._runner.replay(queue, pending, operation)
            except HeadraceError as exc:
                logger.error("request %s, run again after a restart, failed: %s", pending.row.id, exc)
                if pending.row.state == "done":
                    queue.restore_error = queue.restore_error or str(exc)

    @contextlib.contextmanager
    def _running(self, queue: ModelQueue, pending: PendingRequest) -> Iterator[None]:
        """Measure a request, and start the next one behind it."""
        pending.running = True
        kind, began = pending.row.kind, time.perf_counter()
        try:
            yield
        finally:
            queue.num_running -= 1
            self._num_running -= 1
            self.clock += 1
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began
            self._start_ready()

    # --- restart ---

    async def _restore(self, queue: ModelQueue) -> None:
        """Bring a model back to the host, and queue the requests that its saved state lacks."""
        model = self._registry.models[queue.model]
        self._telemetry.forget(model.id)
        try:
            with boundary(BackendError, f"model {model.id} cannot be brought back"):
                await self._unload_idle()
                rows = await self._states.finished_after(model)
                await self._states.load(model)
        except HeadraceError as exc:
            queue.restoring = False
            for pending in queue.take_all():
                await self._requests.finish(pending, to_failure(exc, self._folder), never_ran=True)
            return
        for row in rows:
            pending = PendingRequest(
                row=row,
                operation=parse_operation(
                    row.kind, row.body or b"", ran_before=row.state == "done", images=self._images
                ),
                accepted=asyncio.get_running_loop().create_future(),
                since=time.monotonic(),
                replay=True,
            )
            self._add(queue, pending)
        queue.set_restored(model.saved_seq)
        self._start_ready()

    async def _unload_idle(self) -> None:
        """Make room for one more model: those unused for longest go."""
        idle = sorted((queue for queue in self._queues.values() if queue.is_idle), key=lambda queue: queue.last_used)
        for queue in idle[: max(0, self.num_resident + 1 - self._max_resident)]:
            await self.unload(queue.model)


def _reopened(model: ModelEntity) -> ModelQueue:
    """Make the queue of a model that the host does not have; it goes on behind the saved state."""
    return ModelQueue(model=model.id, next_seq=model.saved_seq + 1)
