"""Save the state of a model behind its updates, and bring it back from there.

A state is saved after every request that changes the weights (`ModelEntity.saved_seq`, `ModelEntity.folder`), a full
model's after every few of them; later requests are in the journal with their bodies and can be run again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from headrace.errors import BackendError, HeadraceError, boundary
from headrace.service.host.model_host import FullFinetune, ModelHost
from headrace.service.requests.request_table import PendingRequest
from headrace.service.store.entities import ModelEntity, folder_name
from headrace.service.store.journal import Journal, JournalRow, Statement, forget_bodies
from headrace.service.store.registry import Change, Registry
from headrace.service.telemetry import MetricsRecord
from headrace.service.training.model_queue import ModelQueue

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(slots=True)
class Recording:
    """Changes that the journal gets together with an outcome, and folders to remove once it has them."""

    changes: list[Change] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # folders that nothing needs any more
    marked: list[str] = field(default_factory=list)  # such folders, which the statements mark for deletion


@dataclass(slots=True)
class SideEffects:
    """Changes that become true with an outcome.

    Records may change until it is written, so what to write is decided then, while `changed` are held, and once more if
    the journal could not be written.
    """

    changed: list[str] = field(default_factory=list)  # ids of records
    decisions: list[Callable[[Recording], None]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # folders that nothing needs, whatever is written
    record: MetricsRecord | None = None

    def add(self, id: str, decide: Callable[[Recording], None]) -> None:
        """Add a change of one record."""
        self.changed.append(id)
        self.decisions.append(decide)

    def decide(self) -> Recording:
        recording = Recording(stale=list(self.stale))
        for decide in self.decisions:
            decide(recording)
        return recording


@dataclass(frozen=True, slots=True)
class SavingState:
    """A state that the host is writing."""

    folder: Path  # relative to the server's
    written: "Future[None]"


class ModelStates:
    """Save, record and load the states of models; `folder` is the server's."""

    def __init__(
        self, host: ModelHost, registry: Registry, journal: Journal, folder: Path, *, full_save_steps: int
    ) -> None:
        assert full_save_steps > 0
        self._host, self._registry, self._journal, self._folder = host, registry, journal, folder
        self._full_save_steps = full_save_steps

    # --- saving ---

    def is_due(self, queue: ModelQueue) -> bool:
        """Say whether to save behind the next update; saving all parameters takes long, and updates can be run
        again."""
        full = isinstance(self._registry.models[queue.model].spec, FullFinetune)
        return len(queue.unsaved) + 1 >= (self._full_save_steps if full else 1)

    def save(self, pending: PendingRequest) -> SavingState:
        """Ask the host to save the state as it is behind this request."""
        folder = Path("states") / folder_name(pending.row.target) / f"{pending.row.seq:012d}"
        return SavingState(folder, self._host.save(pending.row.target, self._folder / folder, optimizer=True))

    async def result(self, work: "Future[R]", saving: SavingState | None, effects: SideEffects) -> R:
        """Wait for what the host does. If it fails, the state to be saved behind it is not needed."""
        try:
            return await asyncio.wrap_future(work)
        except HeadraceError:
            if saving is not None:
                await asyncio.wait([asyncio.wrap_future(saving.written)])
                effects.stale.append(str(saving.folder))
            raise

    async def record_when_saved(
        self, queue: ModelQueue, pending: PendingRequest, saving: SavingState, effects: SideEffects
    ) -> None:
        """Wait for the state and record it. One that cannot be saved is no failure of the request: the journal can make
        it again."""
        try:
            with boundary(BackendError, "the state cannot be saved"):
                await asyncio.wrap_future(saving.written)
        except HeadraceError as exc:
            logger.error("model %s: %s", queue.model, exc)
            return
        queue.unsaved = {seq for seq in queue.unsaved if seq > pending.row.seq}
        queue.unrecorded.add(pending.row.seq)
        self.record(queue, pending, saving.folder, effects)

    def record(self, queue: ModelQueue, pending: PendingRequest, folder: Path | None, effects: SideEffects) -> None:
        """Record that the saved state includes this request; None: the weights are as they were saved before, and no
        gradient is accumulated."""
        effects.add(queue.model, lambda recording: self._record(queue, pending.row.seq, folder, recording))

    def _record(self, queue: ModelQueue, seq: int, folder: Path | None, recording: Recording) -> None:
        model = self._registry.models[queue.model]
        if seq <= model.saved_seq:  # a later state was faster
            recording.stale += [] if folder is None else [str(folder)]
            queue.unrecorded.discard(seq)
            return
        if folder is None and any(number < seq for number in queue.unsaved | queue.unrecorded):
            return
        if folder is not None and model.folder is not None:
            recording.stale.append(model.folder)
        saved = replace(model, saved_seq=seq, folder=str(folder) if folder else model.folder, last_request=time.time())
        keep = self._registry.keep(saved)

        def apply() -> None:
            keep.apply()
            queue.finished = {number for number in queue.finished if number > seq}
            queue.unrecorded = {number for number in queue.unrecorded if number > seq}

        recording.changes.append(Change(keep.statement, apply))
        recording.statements.append(forget_bodies(model.id, up_to=seq))

    # --- bringing back ---

    async def finished_after(self, model: ModelEntity) -> list[JournalRow]:
        """Read the finished requests that the saved state lacks."""
        condition = "target = ? AND seq > ? AND state != 'queued'"
        return await asyncio.wrap_future(self._journal.requests(condition, (model.id, model.saved_seq)))

    async def load(self, model: ModelEntity) -> None:
        """Bring the model to its saved state on the host; one that was never created is left to its first request."""
        if model.saved_seq < 0:
            return
        steps = [self._host.drop(model.id), self._host.create(model.id, model.spec)]
        if model.folder is not None:
            steps.append(self._host.load(model.id, self._folder / model.folder, optimizer=True))
        for step in steps:
            await asyncio.wrap_future(step)
