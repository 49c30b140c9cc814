"""Remove what a killed server left in its folder: half-written folders, states and checkpoints that were replaced or
deleted, snapshots of sessions that had ended.

Only folders that the journal's own records name are removed, and those with names that only writing gives: a folder
that some other journal knows of stays, and so does a state of a request that this journal lacks. A model whose state is
missing keeps all others. No other server writes here meanwhile (`headrace/storage/folder_lock.py`).
"""

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from headrace.service.store.entities import ModelEntity, folder_name
from headrace.service.store.journal import Journal, Statement, put, remove
from headrace.service.store.registry import Change, Registry

STATES, SNAPSHOTS, CHECKPOINTS = "states", "snapshots", "checkpoints"
HALF_WRITTEN = (".writing-*", ".copying-*")
REPLACED = ".replaced-*"
GOING = "going"  # the kind of journal records that mark folders for deletion


def mark_for_deletion(folder: str) -> Statement:
    """Mark a folder for deletion; if this server does not come to it, the next one removes it."""
    return put(GOING, folder, None)


def unmark(folder: str) -> Statement:
    """Forget the mark of a folder that is removed."""
    return remove(GOING, folder)


def later_states(folder: Path, model: ModelEntity) -> list[Path]:
    """Find the states of a model behind the one that its record names: of a newer journal, or of a killed server."""
    numbered = [state for state in _folders(folder / STATES / folder_name(model.id)) if state.name.isdigit()]
    return [state for state in numbered if int(state.name) > model.saved_seq]


def newer_states(folder: Path, registry: Registry, journal: Journal) -> list[Path]:
    """Find states of models that are newer than the journal: it lacks their request, or names a state that is gone.

    A kill leaves none of these: a state is saved when its request is in the journal, and the one before it is removed
    when the journal names the new one.
    """
    newer: list[Path] = []
    for model in registry.models.values():
        for state in later_states(folder, model):
            known = "SELECT 1 FROM requests WHERE target = ? AND seq = ?"
            if lost_state(folder, model) or not journal.query(known, (model.id, int(state.name))):
                newer.append(state)
    return newer


def lost_state(folder: Path, model: ModelEntity) -> bool:
    """Say whether the state that the journal names is missing."""
    return model.folder is not None and not (folder / model.folder).is_dir()


def clear_leftovers(
    folder: Path, registry: Registry, going: Iterable[str] = (), *, keep: Collection[Path] = ()
) -> list[Change]:
    """Remove leftovers, but not the states in `keep`; the returned changes forget them."""
    for parent in (folder / CHECKPOINTS, folder / SNAPSHOTS, *_folders(folder / STATES)):
        _clear_half_written(parent)
    for model in registry.models.values():
        if lost_state(folder, model):
            continue  # another of its states may be all that is left
        for state in _folders(folder / STATES / folder_name(model.id)):
            if state not in keep and (model.folder is None or state != folder / model.folder):
                shutil.rmtree(state, ignore_errors=True)
    needed = {checkpoint.folder for checkpoint in registry.checkpoints.values()}
    forgotten: list[Change] = []
    for marked in going:
        if marked not in needed:
            shutil.rmtree(folder / marked, ignore_errors=True)
        forgotten.append(Change(unmark(marked)))
    for sampler in [sampler for sampler in registry.samplers.values() if sampler.folder is not None]:
        session = registry.sessions.get(sampler.session)
        ended = session is not None and session.finished is not None
        if ended or sampler.gone is not None:
            shutil.rmtree(folder / str(sampler.folder), ignore_errors=True)
        if ended:
            forgotten.append(registry.forget(sampler))
    return forgotten


def _clear_half_written(parent: Path) -> None:
    for pattern in HALF_WRITTEN:
        for half_written in parent.glob(pattern):
            shutil.rmtree(half_written, ignore_errors=True)
    for aside in parent.glob(REPLACED):  # .replaced-NUMBER-NAME, which stepped aside for a new one
        name = aside.with_name(aside.name.split("-", 2)[2])
        if name.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(name)


def _folders(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
