"""Sessions, models, samplers and checkpoints in memory, as the journal has them. Everything has one owner.

What belongs to somebody else is answered like what is not there; a public checkpoint is everybody's to read.
"""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from headrace.errors import HeadraceError, RequestError
from headrace.service.journal import Journal, Statement, put, remove
from headrace.service.records import Checkpoint, CheckpointKind, Model, SamplerRecord, Session, split_path

Record = Session | Model | SamplerRecord | Checkpoint
_KINDS: Mapping[type[Record], str] = {
    Session: "session", Model: "model", SamplerRecord: "sampler", Checkpoint: "checkpoint",
}  # fmt: skip
_ADAPTERS: Mapping[type[Record], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}


class NotFound(RequestError):
    """There is no such thing, or it is somebody else's."""


class Gone(RequestError):
    """It was here, and is not any more."""


class ServerFault(HeadraceError):
    """What failed is this server's, or one that it asks; the request was right."""


class Registry:
    def __init__(self, journal: Journal) -> None:
        self.sessions: dict[str, Session] = _load(journal, Session)
        self.models: dict[str, Model] = _load(journal, Model)
        self.samplers: dict[str, SamplerRecord] = _load(journal, SamplerRecord)
        self.checkpoints: dict[str, Checkpoint] = _load(journal, Checkpoint)

    def keep(self, record: Record) -> Statement:
        """True in memory from now on; the statement makes it true in the journal."""
        self._table(record)[_id(record)] = record
        kind = type(record)
        return put(_KINDS[kind], _id(record), _ADAPTERS[kind].dump_python(record, mode="json"))

    def forget(self, record: Record) -> Statement:
        self._table(record).pop(_id(record), None)
        return remove(_KINDS[type(record)], _id(record))

    def _table(self, record: Record) -> dict[str, Any]:
        tables: Mapping[type[Record], dict[str, Any]] = {
            Session: self.sessions, Model: self.models, SamplerRecord: self.samplers, Checkpoint: self.checkpoints,
        }  # fmt: skip
        return tables[type(record)]

    def session(self, id: str, owner: str) -> Session:
        found = self.sessions.get(id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no session '{id}'")
        return found

    def model(self, id: str, owner: str) -> Model:
        found = self.models.get(id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no model '{id}'")
        return found

    def sampler(self, id: str, owner: str) -> SamplerRecord:
        found = self.samplers.get(id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no sampling session '{id}'")
        return found

    def checkpoint(self, path: str, owner: str) -> Checkpoint:
        """One that may be read: the owner's, or a public one. Raises RequestError on a path that is none."""
        split_path(path)
        found = self.checkpoints.get(path)
        expired = found is not None and found.expires is not None and found.expires <= time.time()
        if found is None or expired or not (found.owner == owner or found.public):
            raise NotFound(f"there is no checkpoint {path}")
        return found

    def own_checkpoint(self, path: str, owner: str) -> Checkpoint:
        """One that may be changed."""
        found = self.checkpoint(path, owner)
        if found.owner != owner:
            raise NotFound(f"there is no checkpoint {path}")
        return found

    def checkpoints_of(self, model: str) -> list[Checkpoint]:
        """Newest first."""
        found = [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.model == model]
        return sorted(found, key=lambda checkpoint: checkpoint.created, reverse=True)

    def latest(self, model: str, kind: CheckpointKind) -> Checkpoint | None:
        return next((found for found in self.checkpoints_of(model) if found.kind is kind), None)


def _load(journal: Journal, kind: type[Any]) -> dict[str, Any]:
    return {id: _ADAPTERS[kind].validate_python(value) for id, value in journal.records(_KINDS[kind]).items()}


def _id(record: Record) -> str:
    return record.path if isinstance(record, Checkpoint) else record.id
