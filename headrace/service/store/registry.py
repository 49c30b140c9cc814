"""Keep sessions, models, samplers and checkpoints in memory, as the journal has them. Everything has one owner.

What another user owns is reported as not found; every user may read a public checkpoint. The journal comes first: a
change is written, and memory follows when it is on disk (`commit`). Whoever changes what it has read holds the record
meanwhile (`changing`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError

from headrace.errors import HeadraceError, JournalError, RequestError
from headrace.service.store.entities import (
    CheckpointEntity,
    CheckpointKind,
    ModelEntity,
    SamplerRecord,
    Session,
    age_order,
    split_path,
)
from headrace.service.store.journal import Journal, Statement, put, remove

Record = Session | ModelEntity | SamplerRecord | CheckpointEntity
_KINDS: Mapping[type[Record], str] = {
    Session: "session", ModelEntity: "model", SamplerRecord: "sampler", CheckpointEntity: "checkpoint",
}  # fmt: skip
_ADAPTERS: Mapping[type[Record], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


class NotFound(RequestError):
    """Raised for what does not exist or belongs to another user."""


class Gone(RequestError):
    """Raised for what existed and does not any more."""


class ServerFault(HeadraceError):
    """Raised when this server, or one that it asks, failed; the request was right."""


@dataclass(frozen=True, slots=True)
class Change:
    """A statement for the journal, and what memory does once the journal has it."""

    statement: Statement
    apply: Callable[[], object] = lambda: None


class Registry:
    """Look things up by id and owner. Lives on one event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.sessions: dict[str, Session] = _load(journal, Session)
        self.models: dict[str, ModelEntity] = _load(journal, ModelEntity)
        self.samplers: dict[str, SamplerRecord] = _load(journal, SamplerRecord)
        self.checkpoints: dict[str, CheckpointEntity] = _load(journal, CheckpointEntity)
        tables = (self.sessions, self.models, self.samplers, self.checkpoints)
        self._last_number = max((record.number for table in tables for record in table.values()), default=0)

    # --- changes ---

    def next_number(self) -> int:
        """Return the number of a new record, above those of all records that are there."""
        self._last_number += 1
        return self._last_number

    def keep(self, record: Record) -> Change:
        """Make the change that keeps a record, in place of the one with its id."""
        kind, table, id = type(record), self._table(record), _id(record)
        statement = put(_KINDS[kind], id, _ADAPTERS[kind].dump_python(record, mode="json"))
        return Change(statement, lambda: table.update({id: record}))

    def forget(self, record: Record) -> Change:
        """Make the change that removes a record."""
        table, id = self._table(record), _id(record)
        return Change(remove(_KINDS[type(record)], id), lambda: table.pop(id, None))

    async def commit(self, *changes: Change, also: Sequence[Statement] = ()) -> None:
        """Write changes to the journal, all or none, then make them in memory. Raises JournalError, and nothing has
        changed then. A caller that stops waiting stops neither."""
        if changes or also:
            await asyncio.shield(asyncio.ensure_future(self._commit(changes, also)))

    async def _commit(self, changes: Sequence[Change], also: Sequence[Statement]) -> None:
        await asyncio.wrap_future(self._journal.write([*(change.statement for change in changes), *also]))
        for change in changes:
            change.apply()

    @contextlib.asynccontextmanager
    async def changing(self, *ids: str) -> AsyncIterator[None]:
        """Hold records inside the block, so that nobody else changes them between reading and committing."""
        locks = [self._locks.setdefault(id, asyncio.Lock()) for id in sorted(set(ids))]
        async with contextlib.AsyncExitStack() as held:
            for lock in locks:
                await held.enter_async_context(lock)
            yield

    # --- lookup ---

    def _table(self, record: Record) -> dict[str, Any]:
        tables: Mapping[type[Record], dict[str, Any]] = {
            Session: self.sessions,
            ModelEntity: self.models,
            SamplerRecord: self.samplers,
            CheckpointEntity: self.checkpoints,
        }
        return tables[type(record)]

    def session(self, id: str, owner: str) -> Session:
        session = self.sessions.get(id)
        if session is None or session.owner != owner:
            raise NotFound(f"there is no session '{id}'")
        return session

    def model(self, id: str, owner: str) -> ModelEntity:
        model = self.models.get(id)
        if model is None or model.owner != owner:
            raise NotFound(f"there is no model '{id}'")
        return model

    def sampler(self, id: str, owner: str) -> SamplerRecord:
        sampler = self.samplers.get(id)
        if sampler is None or sampler.owner != owner:
            raise NotFound(f"there is no sampling session '{id}'")
        return sampler

    def checkpoint(self, path: str, owner: str) -> CheckpointEntity:
        """Find a checkpoint that the owner may read. Raises NotFound, and RequestError on a path that is none."""
        split_path(path)
        checkpoint = self.checkpoints.get(path)
        expired = checkpoint is not None and checkpoint.expires is not None and checkpoint.expires <= time.time()
        if checkpoint is None or expired or not (checkpoint.owner == owner or checkpoint.public):
            raise NotFound(f"there is no checkpoint {path}")
        return checkpoint

    def own_checkpoint(self, path: str, owner: str) -> CheckpointEntity:
        """Find a checkpoint that may be changed."""
        checkpoint = self.checkpoint(path, owner)
        if checkpoint.owner != owner:
            raise NotFound(f"there is no checkpoint {path}")
        return checkpoint

    def checkpoints_of(self, model: str) -> list[CheckpointEntity]:
        """List a model's checkpoints, newest first."""
        checkpoints = [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.model == model]
        return sorted(checkpoints, key=age_order, reverse=True)

    def latest(self, model: str, kind: CheckpointKind) -> CheckpointEntity | None:
        return next((checkpoint for checkpoint in self.checkpoints_of(model) if checkpoint.kind is kind), None)


def _load(journal: Journal, kind: type[Any]) -> dict[str, Any]:
    records = journal.records(_KINDS[kind])
    try:
        return {id: _ADAPTERS[kind].validate_python(value) for id, value in records.items()}
    except ValidationError as exc:
        raise JournalError(
            f"the journal {journal.name} has a {_KINDS[kind]} that cannot be read ({exc.errors()[0]['msg']}): put back "
            "a copy of the journal, or start the version of headrace that wrote it"
        ) from exc


def _id(record: Record) -> str:
    return record.path if isinstance(record, CheckpointEntity) else record.id
