"""Checkpoints on disk: whole or absent, verified before use, and only as many as the settings keep.

Owns a folder with one subfolder per checkpoint and two pointer files:

    step_000020/          what the caller wrote (Hugging Face and optimiser files), and
      state.json            the caller's state, the step, the score, and the best checkpoint so far
      manifest.json         size and SHA-256 of every file above, and a digest of the manifest itself
    latest, best          the name of a checkpoint, for people and tools; load_latest goes by steps and manifests

A checkpoint is written under a temporary name, fsynced, and renamed, so a kill at any point leaves either the whole
new checkpoint or none of it, with those before it untouched. Nothing here knows what the files mean.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import atomic_files, whole_folder
from headrace.errors import CheckpointError, boundary
from headrace.whole_folder import MANIFEST, Manifest

logger = logging.getLogger(__name__)

STATE = "state.json"
LATEST, BEST = "latest", "best"
_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"


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
    """Verify one checkpoint folder and read its state. Raises CheckpointError naming the file that is wrong."""
    manifest = verify(folder)
    if manifest.step is None:
        raise CheckpointError(f"{folder} is no checkpoint of a run: its {MANIFEST} has no step")
    with boundary(CheckpointError, f"checkpoint {folder}: {STATE} cannot be read"):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))["state"]
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


def _sound_scores(folder: Path) -> dict[int, float | None]:
    """Map step to score for checkpoints whose manifest and file sizes are right; cheap, so bytes are not hashed."""
    scores: dict[int, float | None] = {}
    for step in _steps(folder):
        path = folder / checkpoint_name(step)
        try:
            manifest = _read_manifest(path)
            whole_folder.check_sizes(path, manifest)
        except CheckpointError:
            continue
        scores[step] = manifest.score
    return scores


def _steps(folder: Path) -> set[int]:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return {step for name in names if (step := _step_of(name)) is not None}


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_(\d{6,})", name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == name else None


# --- writing ---------------------------------------------------------------------------------------------------------


class CheckpointStore:
    """Writes a checkpoint folder; there is one writer per folder."""

    def __init__(self, folder: Path, keep_last: int, keep_every: int = 0) -> None:
        assert keep_last >= 1
        assert keep_every >= 0
        self._folder = folder
        self._keep_last, self._keep_every = keep_last, keep_every
        self._refused: set[int] = set()  # steps that load_latest found altered; never counted as checkpoints again

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
        target, writing = self._folder / name, self._folder / (_WRITING + name)
        score = None if score is None else float(score)
        if score is not None and not math.isfinite(score):
            logger.warning("the score %s of %s is not finite, so it is not counted", score, name)
            score = None
        with boundary(CheckpointError, f"checkpoint {target} cannot be written; those before it are untouched"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            scores = self._scores()
            self._check_order(step, scores)
            self._check_room(name, scores, estimate_bytes)
            scores[step] = score
            try:
                writing.mkdir()
                write(writing)
                self._write_state(writing, step, state, scores)
                whole_folder.write_manifest(writing, step=step, score=score)
                atomic_files.replace_folder(writing, target, aside=self._folder / (_REPLACED + name))
            except BaseException:  # a full disk, a failed writer, Ctrl-C: remove the half-written folder in any case
                shutil.rmtree(writing, ignore_errors=True)
                raise
            self._refused.discard(step)
            self._point(LATEST, step)
            self._point(BEST, best_step(scores))
        self._remove_unneeded(scores, step)
        return target

    def load_latest(self) -> LoadedCheckpoint:
        """Remove what a killed writer left behind, then read the newest checkpoint (see `latest_checkpoint`).

        For the process that owns the folder; afterwards `latest` names the checkpoint returned.
        """
        with boundary(CheckpointError, f"{self._folder} cannot be cleaned"):
            self._remove_leftovers()
        self._refused = _steps(self._folder)
        loaded = latest_checkpoint(self._folder)
        self._refused = {step for step in self._refused if step > loaded.step}
        if _read_pointer(self._folder / LATEST) != loaded.folder.name:
            logger.warning("%s did not name %s and was written again", self._folder / LATEST, loaded.folder.name)
            with boundary(CheckpointError, f"{self._folder / LATEST} cannot be written"):
                self._point(LATEST, loaded.step)
        return loaded

    def _scores(self) -> dict[int, float | None]:
        return {step: score for step, score in _sound_scores(self._folder).items() if step not in self._refused}

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
        """Make a pointer file name a checkpoint, in one rename; with no step, remove it."""
        path = self._folder / pointer
        if step is None:
            path.unlink(missing_ok=True)
            return
        if _read_pointer(path) == checkpoint_name(step):
            return
        writing = self._folder / (_WRITING + pointer)
        atomic_files.write_text(path, checkpoint_name(step) + "\n", temporary=writing)
        atomic_files.fsync(self._folder)

    def _remove_unneeded(self, scores: Mapping[int, float | None], newest: int) -> None:
        keep = retained(scores, keep_last=self._keep_last, keep_every=self._keep_every)
        assert newest in keep
        for step in sorted(_steps(self._folder) - keep):
            if step > newest:
                continue  # refused checkpoints of later steps stay for inspection until their step is saved again
            path = self._folder / checkpoint_name(step)
            removed = self._folder / (_REMOVED + path.name)
            try:
                os.rename(path, removed)  # first, so that a kill in between leaves no half checkpoint
                shutil.rmtree(removed)
            except OSError as exc:
                logger.warning("%s is no longer needed but cannot be removed: %s", path, exc)

    def _remove_leftovers(self) -> None:
        """Undo what a kill interrupted: half-written and half-removed folders go, a half-replaced one comes back."""
        for path in sorted(self._folder.glob(".*-*")) if self._folder.is_dir() else ():
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
