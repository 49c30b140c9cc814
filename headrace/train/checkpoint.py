"""Checkpoints on disk: whole or absent, verified before use, and only as many as the settings keep.

Owns a folder with one subfolder per checkpoint and two pointer files:

    step_000020/          what the caller wrote (Hugging Face and optimiser files), and
      state.json            the caller's state, the step, the score, and the best checkpoint so far
      manifest.json         size and SHA-256 of every file above, and a digest of the manifest itself
    latest, best          the name of a checkpoint, for people and tools; load_latest goes by steps and manifests
    refused-step_000030/  a damaged checkpoint that the run has gone on without, until it saves that step again

A checkpoint is written under a temporary name, fsynced, and renamed, so a kill at any point leaves either the whole
new checkpoint or none of it, with those before it untouched. A CheckpointError of a reader means damage; what the
machine could not read or write is a StorageError. Nothing here knows what the files mean.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError, StorageError, boundary
from headrace.storage import atomic_files, whole_folder
from headrace.storage.whole_folder import MANIFEST, Manifest

logger = logging.getLogger(__name__)

STATE = "state.json"
LATEST, BEST = "latest", "best"
_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"
_REFUSED = "refused-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint whose files all match its manifest."""

    step: int
    folder: Path
    state: Mapping[str, Any]  # the mapping that was passed to `save`
    score: float | None


# --- decisions -------------------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def best_step(scores: Mapping[int, float | None]) -> int | None:
    """Return the step with the highest score, the earliest of equals, or None if no step was scored."""
    scored = [(-score, step) for step, score in scores.items() if score is not None]
    return min(scored)[1] if scored else None


def retained(scores: Mapping[int, float | None], *, keep_last: int, keep_every: int) -> frozenset[int]:
    """Return the steps to keep: the last `keep_last`, the best, and each multiple of `keep_every` unless that is 0."""
    assert keep_last >= 1
    assert keep_every >= 0
    best = best_step(scores)
    last = sorted(scores)[-keep_last:]
    return frozenset(
        step for step in scores if step in last or step == best or (keep_every > 0 and step % keep_every == 0)
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def verify(folder: Path, *, besides: Collection[str] = ()) -> Manifest:
    """Check every file of a checkpoint, and that the folder has the name of its step (see `whole_folder.verify`)."""
    manifest = whole_folder.verify(folder, besides=besides)
    _check_name(folder, manifest)
    return manifest


def read_checkpoint(folder: Path) -> LoadedCheckpoint:
    """Verify one checkpoint folder and read its state.

    Raises CheckpointError naming the file that is wrong, or StorageError naming the one that cannot be read.
    """
    manifest = verify(folder)
    if manifest.step is None:
        raise CheckpointError(f"{folder} is no checkpoint of a run: its {MANIFEST} has no step")
    with _storage(f"{folder / STATE} cannot be read"):
        text = (folder / STATE).read_bytes()
    try:
        state = json.loads(text)["state"]
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"checkpoint {folder}: {STATE} is not what it should be ({exc!r})") from exc
    return LoadedCheckpoint(step=manifest.step, folder=folder, state=state, score=manifest.score)


def latest_checkpoint(folder: Path) -> LoadedCheckpoint:
    """Read the newest checkpoint in `folder` that verifies. Writes nothing, so it is safe beside a run that writes.

    Each newer one is refused by name in a logged warning. Raises CheckpointError with every reason when none is left.
    """
    return _first_sound(folder, sorted(_steps(folder), reverse=True))


def best_checkpoint(folder: Path) -> LoadedCheckpoint:
    """Read the checkpoint with the highest score that verifies, or the newest if none was scored. Writes nothing."""
    scores = _sound_scores(folder)
    ranked = sorted(scores, key=lambda step: (-_rank(scores[step]), step if scores[step] is not None else -step))
    return _first_sound(folder, ranked)


def _rank(score: float | None) -> float:
    return -math.inf if score is None else score


def _first_sound(folder: Path, steps: list[int]) -> LoadedCheckpoint:
    refused = []
    for step in steps:
        try:
            return read_checkpoint(folder / checkpoint_name(step))
        except CheckpointError as exc:
            logger.warning("refused: %s", exc)
            refused.append(str(exc))
    if refused:
        raise CheckpointError(f"no checkpoint in {folder} can be used: " + "; ".join(refused))
    raise CheckpointError(f"{folder} holds no checkpoint: start without --resume, or name another folder")


def _read_manifest(folder: Path) -> Manifest:
    manifest = whole_folder.read_manifest(folder)
    _check_name(folder, manifest)
    return manifest


def _check_name(folder: Path, manifest: Manifest) -> None:
    if _step_of(folder.name) not in (None, manifest.step):
        raise CheckpointError(f"checkpoint {folder} is altered: {MANIFEST} is that of step {manifest.step}")


def _sound_scores(folder: Path, unreadable: set[int] | None = None) -> dict[int, float | None]:
    """Map step to score for checkpoints whose manifest and file sizes are right; cheap, so bytes are not hashed.

    Steps that the machine cannot read are added to `unreadable`; without it they are a StorageError.
    """
    scores: dict[int, float | None] = {}
    for step in _steps(folder):
        path = folder / checkpoint_name(step)
        try:
            manifest = _read_manifest(path)
            whole_folder.check_sizes(path, manifest)
        except CheckpointError:
            continue
        except StorageError as exc:
            if unreadable is None:
                raise
            logger.warning("%s", exc)
            unreadable.add(step)
            continue
        scores[step] = manifest.score
    return scores


def has_checkpoints(folder: Path) -> bool:
    """Tell whether a folder has any checkpoint, sound or not. Raises StorageError if it cannot be read."""
    return bool(_steps(folder))


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, sound or not; None if there is none. Raises StorageError."""
    return max(_steps(folder), default=None)


def _steps(folder: Path) -> set[int]:
    return {step for name in _listed(folder) if (step := _step_of(name)) is not None}


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise _storage_error(f"{folder} cannot be read", exc) from exc


@contextlib.contextmanager
def _storage(what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError: the machine's trouble, no sign of damage."""
    try:
        yield
    except OSError as exc:
        raise _storage_error(what, exc) from exc


def _storage_error(what: str, exc: OSError) -> StorageError:
    return StorageError(
        f"{what} ({exc.strerror or type(exc).__name__}); this is no sign of damage: see to the disk or its "
        "permissions, and try again"
    )


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_(\d{6,})", name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == name else None


# --- writing ---------------------------------------------------------------------------------------------------------


def _always_ours() -> None:
    """Raise nothing: the folder has no other writer."""


class CheckpointStore:
    """Writes a checkpoint folder; there is one writer per folder.

    `check_owner` raises if this process no longer is that writer. It is called before anything is written or removed.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int = 0, *, check_owner: Callable[[], None] = _always_ours
    ) -> None:
        assert keep_last >= 1
        assert keep_every >= 0
        self._folder, self._check_owner = folder, check_owner
        self._keep_last, self._keep_every = keep_last, keep_every
        self._refused: set[int] = set()  # steps that load_latest found altered; never counted as checkpoints again
        self._unreadable: set[int] = set()  # steps that the machine could not read; never removed
        self._known: dict[int, float | None] = {}  # scores that were read before: an error now does not change the best

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: Mapping[str, Any],
        score: float | None = None,
        *,
        estimate_bytes: int = 0,
    ) -> Path:
        """Write one checkpoint, make it the latest, and remove those that need not be kept.

        `write` puts its files into the folder it receives; `state` is JSON; a higher `score` is better. The free space
        must hold `estimate_bytes` and the size of the checkpoint before. Raises CheckpointError when it cannot be
        written; earlier checkpoints are then untouched.
        """
        assert step >= 0
        name = checkpoint_name(step)
        target = self._folder / name
        # a name of its own: a writer that lost the folder may still be writing into its old one
        writing = self._folder / f"{_WRITING}{name}-{secrets.token_hex(4)}"
        score = None if score is None else float(score)
        if score is not None and not math.isfinite(score):
            logger.warning("the score %s of %s is not finite, so it is not counted", score, name)
            score = None
        with boundary(CheckpointError, f"checkpoint {target} cannot be written; those before it are untouched"):
            self._check_owner()
            atomic_files.make_folder(self._folder)
            self._remove_leftovers()
            scores = self._scores()
            self._check_order(step, scores)
            self._check_room(name, scores, estimate_bytes)
            scores |= {other: self._known[other] for other in self._unreadable if other in self._known}
            scores[step] = score
            try:
                writing.mkdir()
                write(writing)
                self._write_state(writing, step, state, scores)
                whole_folder.write_manifest(writing, step=step, score=score)
                self._check_owner()
                atomic_files.replace_folder(writing, target, aside=self._folder / (_REPLACED + name))
            except BaseException:  # a full disk, a failed writer, Ctrl-C: remove the half-written folder in any case
                shutil.rmtree(writing, ignore_errors=True)
                raise
        self._known[step] = score
        self._refused.discard(step)
        self.retire_refused()
        self._point(LATEST, step)
        if self._unreadable <= scores.keys():  # else the best may be one that cannot be read now
            self._point(BEST, best_step(scores))
        self._remove_unneeded(scores, step)
        return target

    def load_latest(self) -> LoadedCheckpoint:
        """Remove what a killed writer left behind, then read the newest checkpoint (see `latest_checkpoint`).

        For the process that owns the folder; afterwards `latest` names the checkpoint returned, and `best` the best.
        Raises CheckpointError only if every checkpoint was read and is damaged, or there is none.
        """
        self._check_owner()
        with _storage(f"{self._folder} cannot be cleaned"):
            self._remove_leftovers()
        self._refused = _steps(self._folder)
        loaded = latest_checkpoint(self._folder)
        self._refused = {step for step in self._refused if step > loaded.step}
        if _read_pointer(self._folder / LATEST) != loaded.folder.name:
            logger.warning("%s did not name %s", self._folder / LATEST, loaded.folder.name)
        self._point(LATEST, loaded.step)
        scores = self._scores()
        if not self._unreadable:
            self._point(BEST, best_step(scores))
        return loaded

    def remove_unneeded(self) -> None:
        """Remove checkpoints that need not be kept, which a kill left behind. Call it after `load_latest`."""
        scores = self._scores()
        if scores:
            self._check_owner()
            self._remove_unneeded(scores, max(scores))

    def retire_refused(self) -> None:
        """Rename the checkpoints that `load_latest` refused, because the run has been saved without them.

        No later start may take one of them for the newest, whatever was wrong when it was read.
        """
        try:
            for step in sorted(self._refused & _steps(self._folder)):
                path = self._folder / checkpoint_name(step)
                shutil.rmtree(self._folder / (_REFUSED + path.name), ignore_errors=True)
                os.rename(path, self._folder / (_REFUSED + path.name))
                atomic_files.fsync(self._folder)
                self._refused.discard(step)
        except (OSError, StorageError) as exc:
            logger.warning("a refused checkpoint in %s cannot be renamed: %s", self._folder, exc)

    def _scores(self) -> dict[int, float | None]:
        self._unreadable.clear()
        scores = _sound_scores(self._folder, self._unreadable)
        self._known |= scores
        return {step: score for step, score in scores.items() if step not in self._refused}

    def _check_order(self, step: int, scores: Mapping[int, float | None]) -> None:
        newest = max(scores, default=step)
        if newest > step:
            raise CheckpointError(
                f"{self._folder} already holds step {newest}, newer than {step}: resume from it, or use a new folder"
            )

    def _check_room(self, name: str, scores: Mapping[int, float | None], estimate_bytes: int) -> None:
        before_bytes = _read_manifest(self._folder / checkpoint_name(max(scores))).size_bytes if scores else 0
        needed_bytes = max(estimate_bytes, before_bytes)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"checkpoint {name} needs about {needed_bytes:,} bytes and {self._folder} has {free_bytes:,} free: "
                "make room, or lower checkpoint.keep_last; nothing was written or removed"
            )

    def _write_state(
        self, writing: Path, step: int, state: Mapping[str, Any], scores: Mapping[int, float | None]
    ) -> None:
        best = best_step(scores)
        record = {
            "step": step,
            "score": scores[step],
            "best": None if best is None else {"step": best, "score": scores[best]},
            "state": dict(state),
        }
        assert not (writing / STATE).exists(), f"{STATE} is ours to write"
        (writing / STATE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _point(self, pointer: str, step: int | None) -> None:
        """Make a pointer file name a checkpoint, in one rename; with no step, remove it.

        Nothing rests on pointers, so one that cannot be written is a warning; it is written at the next save or start.
        """
        path = self._folder / pointer
        try:
            if step is None:
                path.unlink(missing_ok=True)
            elif _read_pointer(path) != checkpoint_name(step):
                atomic_files.write_text(
                    path, checkpoint_name(step) + "\n", temporary=self._folder / (_WRITING + pointer)
                )
        except OSError as exc:
            logger.warning("%s cannot be written: %s", path, exc)

    def _remove_unneeded(self, scores: Mapping[int, float | None], newest: int) -> None:
        keep = set(retained(scores, keep_last=self._keep_last, keep_every=self._keep_every)) | self._unreadable
        assert newest in keep
        named = {_read_pointer(self._folder / pointer) for pointer in (LATEST, BEST)}
        try:
            names = _listed(self._folder)
        except StorageError as exc:
            logger.warning("nothing is removed: %s", exc)
            return
        removed = []
        for name in names:
            step = _step_of(name.removeprefix(_REFUSED))
            if step is None or step > newest or name in named:
                continue  # refused checkpoints of later steps stay for inspection until their step is saved again
            if step in keep and not name.startswith(_REFUSED):
                continue
            try:  # renamed first, so that a kill in between leaves no half checkpoint
                os.rename(self._folder / name, self._folder / (_REMOVED + name))
                removed.append(self._folder / (_REMOVED + name))
            except OSError as exc:
                logger.warning("%s is no longer needed but cannot be removed: %s", self._folder / name, exc)
        if not removed:
            return
        try:
            atomic_files.fsync(self._folder)  # the renames must not come after the removals, if the power fails now
            for path in removed:
                shutil.rmtree(path)
        except OSError as exc:
            logger.warning("what is no longer needed in %s cannot be removed: %s", self._folder, exc)

    def _remove_leftovers(self) -> None:
        """Undo what a kill interrupted: half-written and half-removed folders go, a half-replaced one comes back."""
        for path in (self._folder / name for name in _listed(self._folder)):
            original = self._folder / path.name.removeprefix(_REPLACED)
            if path.name.startswith(_REPLACED) and not original.exists():
                os.rename(path, original)
            elif path.name.startswith((_WRITING, _REPLACED, _REMOVED)):
                logger.info("removed %s, left behind by a write that did not end", path)
                _remove(path)


def _read_pointer(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
