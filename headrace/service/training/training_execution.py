"""Run the operations of models on the host: one method for each kind, and what each answers.

Every method submits to the host before its first await, so the order in which operations are started is the order in
which the host runs them.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import assert_never

from headrace.errors import BackendError, HeadraceError, RequestError
from headrace.process.watchdog import to_watched_thread
from headrace.service.host.model_host import FullFinetune, ModelHost
from headrace.service.requests.request_table import Done, Outcome, PendingRequest, done_json
from headrace.service.sampling.sampler_cache import MADE_ROOM, SamplerCache
from headrace.service.store.cleanup import mark_for_deletion
from headrace.service.store.entities import (
    CheckpointEntity,
    CheckpointKind,
    ModelEntity,
    SamplerRecord,
    checkpoint_path,
    folder_name,
    sampler_id,
)
from headrace.service.store.registry import Change, Registry, ServerFault
from headrace.service.telemetry import Telemetry
from headrace.service.training.model_queue import ModelQueue
from headrace.service.training.model_states import ModelStates, Recording, SideEffects
from headrace.service.training.operations import (
    CreateOp,
    ForwardOp,
    InvalidOp,
    LoadOp,
    Operation,
    OptimStepOp,
    SaveOp,
    SnapshotOp,
)
from headrace.service.training.request_metrics import request_metrics
from headrace.service.training.server_gae import forward_with_gae
from headrace.service.wire.messages import PROTOBUF, metric_names, write_forward
from headrace.storage import whole_folder
from headrace.types import DiscardGradient, ForwardOut, UpdateOut


class OperationRunner:
    """Run operations; `clock` counts the requests that have run, and is reported with every forward pass."""

    def __init__(
        self,
        host: ModelHost,
        registry: Registry,
        samplers: SamplerCache,
        states: ModelStates,
        folder: Path,
        telemetry: Telemetry,
        *,
        clock: Callable[[], int],
    ) -> None:
        self._host, self._registry, self._samplers, self._states = host, registry, samplers, states
        self._folder, self._telemetry, self._clock = folder, telemetry, clock
        self._saving: dict[str, asyncio.Future[None]] = {}  # by path or sampler, resolved when the save has ended
        # by path or sampler, the request that saved it, until the journal has it
        self._unrecorded: dict[str, str] = {}

    async def run(
        self, queue: ModelQueue, pending: PendingRequest, operation: Operation, effects: SideEffects
    ) -> Outcome:
        """Run one request and return its outcome; what else becomes true with it is added to `effects`."""
        match operation:
            case CreateOp():
                return await self._create(queue, pending, operation, effects)
            case ForwardOp():
                return await self._forward(queue, operation)
            case OptimStepOp():
                return await self._optim_step(queue, pending, operation, effects)
            case SaveOp():
                return await self._save(queue, pending, operation, effects)
            case SnapshotOp():
                return await self._snapshot(queue, pending, operation, effects)
            case LoadOp():
                return await self._load(queue, pending, operation, effects)
            case InvalidOp():
                raise (ServerFault if operation.server_fault else RequestError)(operation.message)
            case _:
                assert_never(operation)

    async def replay(self, queue: ModelQueue, pending: PendingRequest, operation: Operation) -> None:
        """Run a request that had finished before a restart again, only for what it does to the model."""
        succeeded = pending.row.state == "done"
        match operation:
            case ForwardOp(backward=True) if succeeded:
                await self._run_forward(queue, operation)
            case OptimStepOp():
                if succeeded:
                    queue.unsaved.add(pending.row.seq)
                update = operation.update if succeeded else DiscardGradient()
                await asyncio.wrap_future(self._host.optim_step(queue.model, update))
                self._telemetry.forget(queue.model)
            case LoadOp() if succeeded:
                queue.unsaved.add(pending.row.seq)
                source = self._registry.checkpoint(operation.path, pending.row.owner)
                loaded = self._host.load(queue.model, self._folder / source.folder, optimizer=operation.optimizer)
                await asyncio.wrap_future(loaded)
            case InvalidOp() if succeeded and pending.row.kind == "forward_backward":
                raise BackendError(operation.message)  # the body was valid when it ran first
            case _:
                return

    # --- one method for each operation ---

    async def _create(
        self, queue: ModelQueue, pending: PendingRequest, operation: CreateOp, effects: SideEffects
    ) -> Outcome:
        model = self._model(queue)
        steps = [self._host.create(model.id, model.spec)]
        saving = None
        if operation.source is not None:
            source = self._registry.checkpoint(operation.source, model.owner)
            steps.append(self._host.load(model.id, self._folder / source.folder, optimizer=operation.optimizer))
            saving = self._states.save(pending)
        for step in steps:
            await self._states.result(step, saving, effects)
        if saving is None:
            self._states.record(queue, pending, None, effects)
        else:
            await self._states.record_when_saved(queue, pending, saving, effects)
        kind = "create_model" if operation.source is None else "load_weights"
        return done_json({"model_id": model.id, "path": operation.source, "type": kind})

    async def _forward(self, queue: ModelQueue, operation: ForwardOp) -> Outcome:
        out = await self._run_forward(queue, operation)
        return Done(media=PROTOBUF, body=write_forward(out, clock=self._clock()))

    async def _run_forward(self, queue: ModelQueue, operation: ForwardOp) -> ForwardOut:
        began = time.perf_counter()
        out = await run_forward(self._host, queue.model, operation)
        seconds = self._telemetry.host_seconds(began)
        if operation.backward:
            self._telemetry.forward(queue.model, out, operation.data, seconds=seconds)
        return out

    async def _optim_step(
        self, queue: ModelQueue, pending: PendingRequest, operation: OptimStepOp, effects: SideEffects
    ) -> Outcome:
        began = time.perf_counter()
        updated = self._host.optim_step(queue.model, operation.update)
        saving = self._states.save(pending) if self._states.is_due(queue) else None
        queue.unsaved.add(pending.row.seq)
        step = await self._states.result(updated, saving, effects)
        effects.record = self._telemetry.step(
            queue.model,
            self._model(queue).owner,
            step,
            operation.update,
            seconds=self._telemetry.host_seconds(began),
            depth=queue.depth,
        )
        if saving is not None:
            await self._states.record_when_saved(queue, pending, saving, effects)
        return done_json({"metrics": _step_metrics(step, operation), "type": "optim_step"})

    async def _save(
        self, queue: ModelQueue, pending: PendingRequest, operation: SaveOp, effects: SideEffects
    ) -> Outcome:
        model = self._model(queue)
        path = checkpoint_path(model.id, operation.kind, operation.name)
        with self._reserved(path) as earlier:
            taken = earlier is not None or path in self._unrecorded or path in self._registry.checkpoints
            if taken and not operation.overwrite:
                raise RequestError(f"{path} is there already: choose another name, or save with overwrite=True")
            return await self._save_as(path, pending, operation, effects, earlier)

    async def _save_as(
        self,
        path: str,
        pending: PendingRequest,
        operation: SaveOp,
        effects: SideEffects,
        earlier: "asyncio.Future[None] | None",
    ) -> Outcome:
        """Save to a new folder, and replace what the path named then; `earlier`: a save of the same path that runs."""
        model = self._registry.models[pending.row.target]
        folder = Path("checkpoints") / folder_name(path, str(pending.row.seq))
        with_optimizer = operation.kind is CheckpointKind.TRAINING
        try:
            await asyncio.wrap_future(self._host.save(model.id, self._folder / folder, optimizer=with_optimizer))
        except HeadraceError:
            effects.stale.append(str(folder))
            raise
        size = await to_watched_thread(f"measuring what was saved as {path}", _size, self._folder / folder)
        if earlier is not None:
            await asyncio.wait([earlier])
        now = time.time()
        checkpoint = CheckpointEntity(
            path=path,
            model=model.id,
            owner=model.owner,
            kind=operation.kind,
            name=operation.name,
            folder=str(folder),
            base_model=model.base_model,
            spec=model.spec,
            created=now,
            size_bytes=size,
            expires=None if operation.ttl_s is None else now + operation.ttl_s,
            user_metadata=operation.user_metadata,
            number=self._registry.next_number(),
        )
        self._unrecorded[path] = pending.row.id
        effects.add(path, lambda recording: self._record_checkpoint(checkpoint, recording, pending.row.id))
        answer = {"path": path, "type": pending.row.kind}
        return done_json(answer | ({"size_bytes": size} if operation.kind is CheckpointKind.EXTERNAL else {}))

    def _record_checkpoint(self, checkpoint: CheckpointEntity, recording: Recording, request: str) -> None:
        replaced = self._registry.checkpoints.get(checkpoint.path)
        recording.changes.append(self._keep_saved(checkpoint, checkpoint.path, request))
        if replaced is not None and replaced.folder != checkpoint.folder:
            recording.statements.append(mark_for_deletion(replaced.folder))
            recording.marked.append(replaced.folder)

    def _keep_saved(self, record: CheckpointEntity | SamplerRecord, name: str, request: str) -> Change:
        """Make the change that keeps what a request saved; from then on the record holds the name."""
        keep = self._registry.keep(record)

        def apply() -> None:
            keep.apply()
            if self._unrecorded.get(name) == request:
                del self._unrecorded[name]

        return Change(keep.statement, apply)

    async def _snapshot(
        self, queue: ModelQueue, pending: PendingRequest, operation: SnapshotOp, effects: SideEffects
    ) -> Outcome:
        """Copy the weights for sampling: from memory now, and from a folder after a restart."""
        model = self._model(queue)
        id = sampler_id(model.session, operation.number)
        with self._reserved(id) as earlier:
            if earlier is not None or id in self._unrecorded or id in self._registry.samplers:
                raise RequestError(f"there is a sampling session '{id}' already")
            return await self._snapshot_as(id, pending, model, effects)

    async def _snapshot_as(self, id: str, pending: PendingRequest, model: ModelEntity, effects: SideEffects) -> Outcome:
        folder, full = Path("snapshots") / folder_name(id), isinstance(model.spec, FullFinetune)
        evicted = self._samplers.evict_full_copy(model.owner, training=True) if full else ()
        copied = self._host.snapshot(model.id, id)
        saved = self._host.save(model.id, self._folder / folder, optimizer=False)
        await asyncio.wrap_future(copied)
        await asyncio.wrap_future(saved)
        sampler = SamplerRecord(
            id=id,
            session=model.session,
            owner=model.owner,
            base_model=model.base_model,
            folder=str(folder),
            created=time.time(),
            full=full,
            number=self._registry.next_number(),
        )
        self._samplers.add_snapshot(sampler)
        fingerprint = await to_watched_thread(f"the fingerprint of {id}", _fingerprint, self._folder / folder)

        def record(recording: Recording) -> None:
            keep = self._keep_saved(sampler, id, pending.row.id)
            recording.changes += [keep, *self._samplers.mark_gone(evicted, MADE_ROOM)]
            recording.stale += [old.folder for old in evicted if old.folder is not None]

        self._unrecorded[id] = pending.row.id
        effects.changed += [old.id for old in evicted]
        effects.add(id, record)
        return done_json({"sampling_session_id": id, "fingerprint": fingerprint, "type": "save_weights_for_sampler"})

    @contextlib.contextmanager
    def _reserved(self, name: str) -> "Iterator[asyncio.Future[None] | None]":
        """Hold a name while something is saved under it; yield the save that holds it already, if there is one."""
        earlier, mine = self._saving.get(name), asyncio.get_running_loop().create_future()
        self._saving[name] = mine
        try:
            yield earlier
        finally:
            mine.set_result(None)
            if self._saving.get(name) is mine:
                del self._saving[name]
            if earlier is not None and not earlier.done():  # this one was refused
                self._saving[name] = earlier

    async def _load(
        self, queue: ModelQueue, pending: PendingRequest, operation: LoadOp, effects: SideEffects
    ) -> Outcome:
        source = self._registry.checkpoint(operation.path, self._model(queue).owner)
        loaded = self._host.load(queue.model, self._folder / source.folder, optimizer=operation.optimizer)
        saving = self._states.save(pending)
        queue.unsaved.add(pending.row.seq)
        await self._states.result(loaded, saving, effects)
        self._telemetry.forget(queue.model)
        await self._states.record_when_saved(queue, pending, saving, effects)
        return done_json({"path": operation.path, "type": "load_weights"})

    def _model(self, queue: ModelQueue) -> ModelEntity:
        return self._registry.models[queue.model]


async def run_forward(host: ModelHost, model: str, operation: ForwardOp) -> ForwardOut:
    """Run a forward or forward_backward on the host, with advantages computed there first if it is asked for."""
    run = partial(host.forward_backward, bound=operation.bound) if operation.backward else host.forward
    if operation.gae is not None:
        return await forward_with_gae(host, model, operation.data, operation.loss, operation.gae, run)
    out = await asyncio.wrap_future(run(model, operation.data, operation.loss))
    measured = request_metrics(operation.loss, operation.data, out.logprobs)
    return replace(out, metrics={**measured, **out.metrics})


def _step_metrics(step: UpdateOut, operation: OptimStepOp) -> dict[str, float]:
    """Name the metrics of an update for the wire; the gradient's norm is that before clipping."""
    return {
        "unclipped_grad_l2:mean": step.grad_norm,
        "learning_rate:mean": 0.0 if isinstance(operation.update, DiscardGradient) else operation.update.learning_rate,
        "updated:mean": float(step.updated),
        "num_updates:max": float(step.num_updates),
        **metric_names(step.metrics),
    }


def _fingerprint(folder: Path) -> str:
    """Hash the weights in a folder that was just written; JSON files beside them do not count."""
    files = whole_folder.read_manifest(folder).files
    digest = hashlib.sha256()
    for name in sorted((name for name in files if not name.endswith(".json")), key=Path):
        digest.update(bytes.fromhex(files[name].sha256))
    return digest.hexdigest()[:16]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
