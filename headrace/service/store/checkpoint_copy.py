"""Copy checkpoints, the user's or public ones, into a training run of their own that cannot be trained.

Files are linked, not copied, where the file system can: saved files never change, so both stay whole.
"""

import os
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

from headrace.errors import CheckpointError, RequestError, boundary
from headrace.process.watchdog import beat, to_watched_thread
from headrace.service.core import Service
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.store.entities import (
    CheckpointEntity,
    ModelEntity,
    Session,
    check_ttl,
    checkpoint_path,
    folder_name,
    model_id,
)
from headrace.storage import atomic_files


async def copy_weights(service: Service, user: ApiUser, body: schemas.CopyWeights, idempotency: str | None) -> str:
    """Copy a checkpoint and return the path of the copy; the same request again gives the same one."""
    registry = service.registry
    source = registry.checkpoint(body.source_path, user.name)
    check_ttl(body.ttl_seconds)
    if body.session_id is not None and body.model_seq_id is not None:
        session = registry.session(body.session_id, user.name)
        service.sessions.check_open(session)
        id = model_id(session.id, body.model_seq_id)
    else:
        id = model_id(folder_name("copy", user.name, idempotency or secrets.token_hex(16)), 0)
        now, number = time.time(), registry.next_number()
        session = Session(id=id.split(":")[0], owner=user.name, created=now, finished="copied", number=number)
    path = checkpoint_path(id, source.kind, source.name)
    async with registry.changing(id, path):
        if path not in registry.checkpoints:
            await _copy(service, user, source, session, id, path, body.ttl_seconds)
    return path


async def _copy(
    service: Service, user: ApiUser, source: CheckpointEntity, session: Session, id: str, path: str, ttl_s: int | None
) -> None:
    registry = service.registry
    if id in registry.models:
        raise RequestError(f"there is a model '{id}' already: choose another model_seq_id")
    if service.checkpoints.stored_bytes(user.name) > user.quota.checkpoint_bytes:
        raise RateLimited("this key's checkpoints take all the room it has: delete some", retry_s=30.0)
    now = time.time()
    copy: CheckpointEntity = replace(
        source,
        path=path,
        model=id,
        owner=user.name,
        folder=str(Path("checkpoints") / folder_name(path, "copy")),
        created=now,
        public=False,
        expires=None if ttl_s is None else now + ttl_s,
        number=registry.next_number(),
    )
    await service.checkpoints.check(source)
    folder, target = service.checkpoints.path_of(source), service.checkpoints.path_of(copy)
    await to_watched_thread(f"copying {source.path}", _link_all, folder, target)
    run = ModelEntity(
        id=id,
        session=session.id,
        owner=user.name,
        base_model=source.base_model,
        spec=source.spec,
        created=now,
        last_request=now,
        frozen=True,
        number=registry.next_number(),
    )
    records = (run, copy) if session.id in registry.sessions else (session, run, copy)
    await registry.commit(*(registry.keep(record) for record in records))


def _link_all(source: Path, target: Path) -> None:
    """Link all files of a folder into a new one, whole or not at all; one that exists is the same request's copy."""
    writing = target.with_name(f".copying-{secrets.token_hex(8)}")
    with boundary(CheckpointError, "the checkpoint cannot be copied"):
        try:
            atomic_files.make_folder(target.parent)
            shutil.copytree(source, writing, copy_function=_link)
            atomic_files.fsync_tree(writing)
            if not target.exists():
                _rename_unless_there(writing, target)
            atomic_files.fsync(target.parent)
        finally:
            shutil.rmtree(writing, ignore_errors=True)


def _rename_unless_there(writing: Path, target: Path) -> None:
    try:
        os.rename(writing, target)
    except OSError:
        if not target.exists():  # else the same request has just made it
            raise


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copy2(source, target)
    beat()
    return target
