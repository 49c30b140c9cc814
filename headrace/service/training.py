"""Training requests in order: strictly by sequence number within a model, in turn between models, each exactly once.

A request waits until those before it are there. `window` of them are handed to the host at a time, which runs them in
the order they were handed over, so it never idles and nobody queues far ahead of others.

**Restart.** A model's state is saved after every request that changes its weights (`Model.saved_seq`, `folder`), a full
model's after every few of them; later requests are in the journal with their bodies. A model is brought back when it is
needed: created, loaded, and every later request run again in order. Those that had ended are run for what they do to
the model alone; their outcome stays the one that was told.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from headrace.errors import BackendError, HeadraceError, RequestError, boundary
from headrace.service.futures import Done, Outcome, PendingRequest, RequestTable, done_json, failed
from headrace.service.gae import run_forward
from headrace.service.host import FullFinetune, ModelHost
from headrace.service.journal import Journal, JournalRow, Statement, forget_bodies
from headrace.service.leftovers import mark_for_deletion, unmark
from headrace.service.open_samplers import MADE_ROOM, SamplerCache
from headrace.service.records import (
    Checkpoint,
    CheckpointKind,
    Model,
    SamplerRecord,
    checkpoint_path,
    folder_name,
    sampler_id,
)
from headrace.service.references import References
from headrace.service.registry import Registry, ServerFault
from headrace.service.telemetry import MetricsRecord, Telemetry
from headrace.service.wire import PROTOBUF, metric_names, write_forward
from headrace.service.work import (
    CreateOp,
    ForwardOp,
    InvalidOp,
    LoadOp,
    Operation,
    OptimStepOp,
    SaveOp,
    SnapshotOp,
    parse_operation,
)
from headrace.types import Discard, StepOut

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(slots=True)
class SideEffects:
    """What becomes true together with an outcome, and folders that nothing needs once it is on disk."""

    statements: list[Statement] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    replaced: str | None = None  # the folder of a checkpoint, which the statements say will go
    record: MetricsRecord | None = None  # of metrics


@dataclass(slots=True, eq=False)
class ModelQueue:
    """The requests of one model. `settled`: numbers beyond the saved state whose outcome has been told; `unsaved`:
    those of updates that the saved state lacks."""

    model: str
    next_seq: int = 0
    resident: bool = False
    restoring: bool = False
    inflight: int = 0
    used: float = 0.0
    waiting: dict[int, PendingRequest] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    unsaved: set[int] = field(default_factory=set)
    untold: int = 0  # requests that were begun, and whose result is not in the journal yet
    lost: str = ""  # why what was done before a restart could not be done again: the model is not where it was


class TrainingQueue:
    """Lives on one event loop; `folder` holds states and checkpoints."""

    def __init__(
        self,
        host: ModelHost,
        requests: RequestTable,
        registry: Registry,
        journal: Journal,
        folder: Path,
        samplers: SamplerCache,
        references: References,
        *,
        window: int = 2,
        max_resident: int = 64,
        full_save_steps: int = 1,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert window > 0
        assert full_save_steps > 0
        self._host, self._requests, self._registry, self._journal = host, requests, registry, journal
        self._folder = folder
        self._samplers, self._references = samplers, references
        self._window = window
        self._max_resident = max_resident
        self._full_save_steps = full_save_steps
        self._telemetry = telemetry or Telemetry()
        self._lines: dict[str, ModelQueue] = {}
        self._turns: deque[ModelQueue] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inflight = 0
        self._closed = False
        self.clock = 0  # requests run
        self.seconds: dict[str, float] = {}

    # --- what the service calls ---

    def start(self, unfinished: Iterable[JournalRow]) -> None:
        """Take up where the journal ends: `unfinished` are the queued requests of models."""
        told = "SELECT target, seq FROM requests WHERE state != 'queued' AND kind != 'sample' AND body IS NOT NULL"
        for model in self._registry.models.values():
            self._lines[model.id] = ModelQueue(model=model.id, next_seq=model.saved_seq + 1)
        for target, seq in self._journal.query(told):
            if target in self._lines and seq > self._registry.models[target].saved_seq:
                self._lines[target].settled.add(seq)
        for row in unfinished:
            pending = self._requests.restore(row, parse_operation(row.kind, row.body or b""))
            pending.accepted.set_result(None)
            self.enqueue(pending)

    def add(self, model: Model) -> None:
        """A model that is about to be created: nothing needs to be brought back."""
        if model.id not in self._lines:
            self._lines[model.id] = ModelQueue(model=model.id, resident=True)

    def is_finished(self, model: str, seq: int) -> bool:
        """Whether this request has ended already."""
        line = self._lines.get(model)
        if line is None:  # a copy, which nobody trains
            return False
        return seq <= self._registry.models[model].saved_seq or seq in line.settled

    def enqueue(self, pending: PendingRequest) -> None:
        line = self._lines[pending.row.target]
        self._wait(line, pending)
        if line not in self._turns:
            self._turns.append(line)
        self._pump()

    def _wait(self, line: ModelQueue, pending: PendingRequest) -> None:
        """What a request needs to know of other models is found out while it waits."""
        line.waiting[pending.row.seq] = pending
        if not _is_ready(pending):
            self._spawn(self._prepare(pending, pending.work))

    def depth(self, model: str | None = None) -> int:
        """Requests that wait or run."""
        lines = list(self._lines.values()) if model is None else [self._lines[model]] if model in self._lines else []
        return sum(len(line.waiting) + line.inflight for line in lines)

    def position(self, pending: PendingRequest) -> int:
        """How many requests of its model are before it."""
        line = self._lines[pending.row.target]
        return line.inflight + sum(seq < pending.row.seq for seq in line.waiting)

    def missing(self, pending: PendingRequest) -> int | None:
        """The number that has to come before this request can run, if it has not."""
        line = self._lines[pending.row.target]
        return None if line.next_seq in line.waiting or line.inflight else line.next_seq

    def is_resident(self, model: str) -> bool:
        return model in self._lines and self._lines[model].resident

    def is_behind(self, model: str) -> bool:
        """Whether the saved state may lack updates that were made."""
        line = self._lines[model]
        return bool(line.unsaved) or (not line.resident and bool(line.settled))

    @property
    def num_resident(self) -> int:
        return sum(line.resident for line in list(self._lines.values()))

    async def cancel(self, pending: PendingRequest) -> bool:
        """A queued request never starts; its number counts as done. False when it has started."""
        line = self._lines[pending.row.target]
        if line.waiting.get(pending.row.seq) is not pending or pending.replay or isinstance(pending.work, CreateOp):
            return False
        pending.work = InvalidOp(message="the request was cancelled before it started")
        return True

    async def fail_unreachable(self, model: str, why: str) -> None:
        """Fail what waits for numbers that will not come; what can run, runs."""
        line = self._lines.get(model)
        if line is None:
            return
        seq = line.next_seq
        while seq in line.waiting:
            seq += 1
        for pending in [line.waiting.pop(number) for number in list(line.waiting) if number > seq]:
            line.settled.add(pending.row.seq)
            await self._requests.finish(pending, failed(RequestError(why)))

    async def unload(self, model: str) -> None:
        """Free the host of a model that nobody uses; it is brought back when it is needed."""
        line = self._lines.get(model)
        if line is None or not line.resident or line.waiting or line.inflight:
            return
        line.resident = False
        with contextlib.suppress(HeadraceError):
            await asyncio.wrap_future(self._host.drop(model))

    async def close(self) -> None:
        """What runs is left to the journal: it is run again after the next start."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- order ---

    def _pump(self) -> None:
        while self._inflight < self._window and not self._closed:
            line = self._whose_turn()
            if line is None:
                return
            pending = line.waiting.pop(line.next_seq)
            line.next_seq += 1
            line.inflight += 1
            line.untold += not pending.replay
            line.used = time.monotonic()
            self._inflight += 1
            self._spawn(self._run(line, pending))

    def _whose_turn(self) -> ModelQueue | None:
        for _ in range(len(self._turns)):
            line = self._turns.popleft()
            if not line.waiting:
                continue
            self._turns.append(line)
            if line.restoring:
                continue
            if not line.resident:
                line.restoring = True
                self._spawn(self._restore(line))
                continue
            while line.next_seq in line.settled and line.next_seq not in line.waiting:
                line.next_seq += 1  # it was abandoned, and is done with
            pending = line.waiting.get(line.next_seq)
            if pending is not None and _is_ready(pending) and not (line.untold and isinstance(pending.work, LoadOp)):
                return line  # a checkpoint is there for others when its save is told
        return None

    async def _prepare(self, pending: PendingRequest, work: ForwardOp) -> None:
        ready: Operation
        try:
            with boundary(BackendError, f"the reference model '{work.reference}' failed"):
                ready = await self._references.filled(work, pending.row.owner)
        except HeadraceError as exc:
            ready = InvalidOp(message=str(exc), ours=failed(exc).category == "server")
        if pending.work is work:  # it was not cancelled meanwhile
            pending.work = ready
        self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, line: ModelQueue, pending: PendingRequest) -> None:
        """One request on the host. What is submitted is submitted before the first await: that is the order."""
        pending.running = True
        also = SideEffects()
        began = time.perf_counter()
        try:
            with boundary(BackendError, f"{pending.row.kind} failed"):
                if pending.replay:
                    await self._repeat(line, pending)
                    return
                if line.lost:
                    raise BackendError(f"the model is not where it was before the server's restart: {line.lost}")
                outcome: Outcome = await self._execute(pending, pending.work, also)
        except HeadraceError as exc:
            if pending.replay:
                logger.error("request %s, run again after a restart, failed: %s", pending.row.id, exc)
                if pending.row.state == "done":
                    line.lost = line.lost or str(exc)
                return
            outcome = failed(exc, self._folder)
            line.unsaved.discard(pending.row.seq)
            if isinstance(pending.work, OptimStepOp):
                self._telemetry.forget(line.model)
                if not line.lost:  # else the journal is all that has the way to where it was
                    self._saved(pending, None, also)
        finally:
            line.inflight -= 1
            self._inflight -= 1
            self.clock += 1
            kind = pending.row.kind
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began
            self._pump()
        if pending.row.seq > self._registry.models[line.model].saved_seq:
            line.settled.add(pending.row.seq)
        try:
            await self._requests.finish(pending, outcome, also.statements)
        finally:
            line.untold -= 1
            self._pump()
        if also.record is not None:
            self._telemetry.log(also.record)
        for folder in also.stale:
            await self.remove_folder(folder)
        if also.replaced is not None:
            await self.remove_checkpoint(also.replaced)

    # --- what each request is ---

    async def _execute(self, pending: PendingRequest, work: Operation, also: SideEffects) -> Outcome:
        model = self._registry.models[pending.row.target]
        began = time.perf_counter()
        match work:
            case CreateOp():
                return await self._create(pending, model, work, also)
            case ForwardOp():
                out = await run_forward(self._host, model.id, work)
                seconds = self._telemetry.host_seconds(began)
                if work.backward:
                    self._telemetry.forward(model.id, out, work.data, seconds=seconds)
                return Done(media=PROTOBUF, body=write_forward(out, clock=self.clock))
            case OptimStepOp():
                stepped = self._host.optim_step(model.id, work.update)
                saved = self._save_state(pending) if self._is_due(model) else None
                self._lines[model.id].unsaved.add(pending.row.seq)
                step = await self._done(stepped, saved, also)
                also.record = self._telemetry.step(
                    model.id,
                    model.owner,
                    step,
                    work.update,
                    seconds=self._telemetry.host_seconds(began),
                    depth=self.depth(model.id),
                )
                await self._when_saved(pending, saved, also)
                return done_json({"metrics": _step_metrics(step, work), "type": "optim_step"})
            case SaveOp():
                return await self._save(pending, model, work, also)
            case SnapshotOp():
                return await self._snapshot(model, work, also)
            case LoadOp():
                source = self._registry.checkpoint(work.path, model.owner)
                loaded = self._host.load(model.id, self._folder / source.folder, optimizer=work.optimizer)
                saved = self._save_state(pending)
                self._lines[model.id].unsaved.add(pending.row.seq)
                await self._done(loaded, saved, also)
                self._telemetry.forget(model.id)
                await self._when_saved(pending, saved, also)
                return done_json({"path": work.path, "type": "load_weights"})
            case InvalidOp():
                raise ServerFault(work.message) if work.ours else RequestError(work.message)
            case _:
                assert_never(work)

    async def _create(self, pending: PendingRequest, model: Model, work: CreateOp, also: SideEffects) -> Outcome:
        steps = [self._host.create(model.id, model.spec)]
        saved = None
        if work.source is not None:
            source = self._registry.checkpoint(work.source, model.owner)
            steps.append(self._host.load(model.id, self._folder / source.folder, optimizer=work.optimizer))
            saved = self._save_state(pending)
        for step in steps:
            await self._done(step, saved, also)
        if saved is None:
            self._saved(pending, None, also)
        await self._when_saved(pending, saved, also)
        kind = "create_model" if work.source is None else "load_weights"
        return done_json({"model_id": model.id, "path": work.source, "type": kind})

    async def _save(self, pending: PendingRequest, model: Model, work: SaveOp, also: SideEffects) -> Outcome:
        path = checkpoint_path(model.id, work.kind, work.name)
        if path in self._registry.checkpoints and not work.overwrite:
            raise RequestError(f"{path} is there already: choose another name, or save with overwrite=True")
        folder = Path("checkpoints") / folder_name(path, str(pending.row.seq))
        replaced = self._registry.checkpoints.get(path)
        full = work.kind is CheckpointKind.TRAINING
        await asyncio.wrap_future(self._host.save(model.id, self._folder / folder, optimizer=full))
        size = await asyncio.to_thread(_size, self._folder / folder)
        now = time.time()
        checkpoint = Checkpoint(
            path=path,
            model=model.id,
            owner=model.owner,
            kind=work.kind,
            name=work.name,
            folder=str(folder),
            base_model=model.base_model,
            spec=model.spec,
            created=now,
            size_bytes=size,
            expires=None if work.ttl_s is None else now + work.ttl_s,
            user_metadata=work.user_metadata,
        )
        also.statements.append(self._registry.keep(checkpoint))
        if replaced is not None and replaced.folder != checkpoint.folder:
            also.statements.append(mark_for_deletion(replaced.folder))
            also.replaced = replaced.folder
        told = {"path": path, "type": pending.row.kind}
        return done_json(told | ({"size_bytes": size} if work.kind is CheckpointKind.EXTERNAL else {}))

    async def _snapshot(self, model: Model, work: SnapshotOp, also: SideEffects) -> Outcome:
        """The snapshot is sampled from memory; its folder brings it back after a restart."""
        id = sampler_id(model.session, work.number)
        if id in self._registry.samplers:
            raise RequestError(f"there is a sampling session '{id}' already")
        folder, full = Path("snapshots") / folder_name(id), isinstance(model.spec, FullFinetune)
        retired = self._samplers.evict_full_copy(model.owner, training=True) if full else ()
        taken = self._host.snapshot(model.id, id)
        saved = self._host.save(model.id, self._folder / folder, optimizer=False)
        await asyncio.wrap_future(taken)
        await asyncio.wrap_future(saved)
        sampler = SamplerRecord(
            id=id,
            session=model.session,
            owner=model.owner,
            base_model=model.base_model,
            folder=str(folder),
            created=time.time(),
            full=full,
        )
        also.statements += [self._registry.keep(sampler), *self._samplers.mark_gone(retired, MADE_ROOM)]
        also.stale += [old.folder for old in retired if old.folder is not None]
        self._samplers.snapshot_taken(sampler)
        made_of = await asyncio.to_thread(_fingerprint, self._folder / folder)
        return done_json({"sampling_session_id": id, "fingerprint": made_of, "type": "save_weights_for_sampler"})

    # --- state ---

    def _save_state(self, pending: PendingRequest) -> "tuple[Path, Future[None]]":
        folder = Path("states") / folder_name(pending.row.target) / f"{pending.row.seq:012d}"
        return folder, self._host.save(pending.row.target, self._folder / folder, optimizer=True)

    async def _done(self, work: "Future[R]", saving: "tuple[Path, Future[None]] | None", also: SideEffects) -> R:
        """What came of it. If it failed, nobody needs the state that was to be saved behind it."""
        try:
            return await asyncio.wrap_future(work)
        except HeadraceError:
            if saving is not None:
                await asyncio.wait([asyncio.wrap_future(saving[1])])
                also.stale.append(str(saving[0]))
            raise

    def _is_due(self, model: Model) -> bool:
        """Whether the state is saved after this update; one of all parameters takes long, and can be made again."""
        steps = self._full_save_steps if isinstance(model.spec, FullFinetune) else 1
        return len(self._lines[model.id].unsaved) + 1 >= steps

    async def _when_saved(
        self, pending: PendingRequest, saving: "tuple[Path, Future[None]] | None", also: SideEffects
    ) -> None:
        """A state that could not be saved is no failure of the request: the journal can still make it again."""
        if saving is None:
            return
        folder, saved = saving
        try:
            with boundary(BackendError, "the state cannot be saved"):
                await asyncio.wrap_future(saved)
        except HeadraceError as exc:
            logger.error("model %s: %s", pending.row.target, exc)
            return
        line = self._lines[pending.row.target]
        line.unsaved = {seq for seq in line.unsaved if seq > pending.row.seq}
        self._saved(pending, folder, also)

    def _saved(self, pending: PendingRequest, folder: Path | None, also: SideEffects) -> None:
        """The state includes this request; None: weights are as they were, and nothing is accumulated."""
        model, line, seq = self._registry.models[pending.row.target], self._lines[pending.row.target], pending.row.seq
        if seq <= model.saved_seq or any(update < seq for update in line.unsaved):
            return
        if folder is not None and model.folder is not None:
            also.stale.append(model.folder)
        kept = replace(model, saved_seq=seq, folder=str(folder) if folder else model.folder, last_request=time.time())
        line.settled = {number for number in line.settled if number > seq}
        also.statements += [self._registry.keep(kept), forget_bodies(model.id, up_to=seq)]

    async def remove_folder(self, folder: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder / folder, ignore_errors=True)

    async def remove_checkpoint(self, folder: str) -> None:
        """Of which the journal says that it will go; that it has gone need not be waited for."""
        await self.remove_folder(folder)
        self._journal.write([unmark(folder)])

    async def _restore(self, line: ModelQueue) -> None:
        model = self._registry.models[line.model]
        self._telemetry.forget(model.id)
        try:
            with boundary(BackendError, f"model {model.id} cannot be brought back"):
                await self._make_room()
                rows = await asyncio.wrap_future(
                    self._journal.requests("target = ? AND seq > ? AND state != 'queued'", (model.id, model.saved_seq))
                )
                if model.saved_seq >= 0:
                    steps = [self._host.drop(model.id), self._host.create(model.id, model.spec)]
                    if model.folder is not None:
                        steps.append(self._host.load(model.id, self._folder / model.folder, optimizer=True))
                    for step in steps:
                        await asyncio.wrap_future(step)
        except HeadraceError as exc:
            line.restoring = False
            for pending in [line.waiting.pop(number) for number in sorted(line.waiting)]:
                line.settled.add(pending.row.seq)
                await self._requests.finish(pending, failed(exc, self._folder))
            return
        for row in rows:
            pending = PendingRequest(
                row=row,
                work=parse_operation(row.kind, row.body or b""),
                accepted=asyncio.get_running_loop().create_future(),
                since=time.time(),
                replay=True,
            )
            self._wait(line, pending)
        line.next_seq, line.resident, line.restoring = model.saved_seq + 1, True, False
        line.unsaved, line.lost = set(), ""
        self._pump()

    async def _repeat(self, line: ModelQueue, pending: PendingRequest) -> None:
        ended_well = pending.row.state == "done"
        match pending.work:
            case ForwardOp(backward=True) if ended_well:
                began = time.perf_counter()
                out = await run_forward(self._host, line.model, pending.work)
                seconds = self._telemetry.host_seconds(began)
                self._telemetry.forward(line.model, out, pending.work.data, seconds=seconds)
            case OptimStepOp():
                update = pending.work.update if ended_well else Discard()
                if ended_well:
                    line.unsaved.add(pending.row.seq)
                await asyncio.wrap_future(self._host.optim_step(line.model, update))
                self._telemetry.forget(line.model)
            case LoadOp() if ended_well:
                line.unsaved.add(pending.row.seq)
                source = self._registry.checkpoint(pending.work.path, pending.row.owner)
                folder = self._folder / source.folder
                await asyncio.wrap_future(self._host.load(line.model, folder, optimizer=pending.work.optimizer))
            case InvalidOp() if ended_well and pending.row.kind == "forward_backward":
                raise BackendError(pending.work.message)  # it was whole when it ran first
            case _:
                return

    async def _make_room(self) -> None:
        idle = [line for line in self._lines.values() if line.resident and not line.waiting and not line.inflight]
        idle.sort(key=lambda line: line.used)
        for line in idle[: max(0, self.num_resident + 1 - self._max_resident)]:
            await self.unload(line.model)


def _is_ready(pending: PendingRequest) -> bool:
    return not isinstance(pending.work, ForwardOp) or pending.work.reference is None


def _step_metrics(step: StepOut, work: OptimStepOp) -> dict[str, float]:
    """The norm before clipping is always there."""
    return {
        "unclipped_grad_l2:mean": step.grad_norm,
        "learning_rate:mean": 0.0 if isinstance(work.update, Discard) else work.update.learning_rate,
        "updated:mean": float(step.updated),
        "num_updates:max": float(step.num_updates),
        **metric_names(step.metrics),
    }


def _fingerprint(folder: Path) -> str:
    """The same for the same weights; what is said about them beside, in JSON, does not count."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".json"):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
