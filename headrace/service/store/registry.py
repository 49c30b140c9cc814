"""Keep sessions, models, samplers and checkpoints in memory, as the journal has them. Everything has one owner.

What another user owns is reported as not found; every user may read a public checkpoint.
"""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from headrace.errors import HeadraceError, RequestError
from headrace.service.store.entities import (
    CheckpointEntity,
    CheckpointKind,
    ModelEntity,
    SamplerRecord,
    Session,
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


class Registry:
    """Look things up by id and owner."""

    def __init__(self, journal: Journal) -> None:
        self.sessions: dict[str, Session] = _load(journal, Session)
        self.models: dict[str, ModelEntity] = _load(journal, ModelEntity)
        self.samplers: dict[str, SamplerRecord] = _load(journal, SamplerRecord)
        self.checkpoints: dict[str, CheckpointEntity] = _load(journal, CheckpointEntity)

    def keep(self, record: Record) -> Statement:
        """Keep a record in memory; the returned statement keeps it in the journal."""
        self._table(record)[_id(record)] = record
        kind = type(record)
        return put(_KINDS[kind], _id(record), _ADAPTERS[kind].dump_python(record, mode="json"))

    def forget(self, record: Record) -> Statement:
        """Remove a record from memory; the returned statement removes it from the journal."""
        self._table(record).pop(_id(record), None)
        return remove(_KINDS[type(record)], _id(record))

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
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.created, reverse=True)

    def latest(self, model: str, kind: CheckpointKind) -> CheckpointEntity | None:
        return next((checkpoint for checkpoint in self.checkpoints_of(model) if checkpoint.kind is kind), None)


def _load(journal: Journal, kind: type[Any]) -> dict[str, Any]:
    return {id: _ADAPTERS[kind].validate_python(value) for id, value in journal.records(_KINDS[kind]).items()}


def _id(record: Record) -> str:
    return record.path if isinstance(record, CheckpointEntity) else record.id
