"""Store what each training step used and gave, one transaction a step: rollouts, then numbers, then one commit record.

`metrics.jsonl` and `rollouts/*.jsonl` stay the users' files; the commit, appended last, says which of their contents
belong to the step. The newest batches can be read back; those that do not fit into memory are in `buffer/`.
"""

import logging
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunFolderError, boundary
from headrace.observe.buffer.commits import Commit, CommitLog, StoredRollouts
from headrace.observe.buffer.digests import file_digest, numbers_digest, rollouts_digest
from headrace.observe.rollouts.files import load_trajectories, save_trajectories
from headrace.types import CreditedEpisode, Group

logger = logging.getLogger(__name__)

KEPT_STEPS = 2  # whose batches can be read back
MEMORY_BYTES = 256 * 2**20  # of the batches in memory; larger ones are on the disk
MAX_TOLD = 3  # replayed steps that differ, told one by one
TOKEN_BYTES = 16  # of a sampled token: itself, two log-probs, its version

SaveRollouts = Callable[[int, Sequence[Group], Sequence[CreditedEpisode]], Path | None]
Batch = tuple[CreditedEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spilled:
    path: Path


class DataBuffer:
    """Stores the steps of a stage. Steps are counted as finished ones, from 1, as in metrics.jsonl.

    A step is `store_rollouts`, which begins a transaction, and `store_evaluation`, which commits it. An evaluation of
    held-out tasks, which has no rollouts to train on, is a transaction of its own.

    One thread stores; `prepare_batch` and `statistics` may be called on any.

    If the stage is `repeatable`, each commit is compared with the one that a resume has discarded in its place.
    """

    def __init__(
        self,
        commits: CommitLog,
        *,
        stage: str,
        records: Callable[[], int],  # of metrics.jsonl, by now
        spill_to: Path,  # a folder of the buffer's own; what it had is removed
        repeatable: bool = False,  # the stage repeats itself to the bit, so a replayed step must equal its first play
        memory_bytes: int = MEMORY_BYTES,
        kept_steps: int = KEPT_STEPS,
    ) -> None:
        assert kept_steps > 0
        self._commits, self._stage, self._records = commits, stage, records
        self._spill_to, self._repeatable = spill_to, repeatable
        self._memory_bytes, self._kept_steps = memory_bytes, kept_steps
        self._batches: OrderedDict[int, Batch | _Spilled] = OrderedDict()
        self._bytes: dict[int, int] = {}  # of the batches in memory
        self._lock = threading.Lock()  # of the batches
        self._open: tuple[int, StoredRollouts] | None = None  # the step whose transaction has begun
        self._spilled_steps = self._replayed = self._differing = 0
        self.cursor: Callable[[], Mapping[str, Any]] | None = None  # where the tasks stand
        self._remove_spilled()
        if commits.discarded:
            logger.info(
                "%d commits after the checkpoint are discarded: their steps are played again", len(commits.discarded)
            )

    # --- the verbs -------------------------------------------------------------------------------------------------

    def store_rollouts(
        self, step: int, groups: Sequence[Group], episodes: Sequence[CreditedEpisode], *, file: Path | None = None
    ) -> None:
        """Begin the transaction of a step with what it trains on. `file` is the rollout file that was saved of it."""
        saved: dict[str, Any] = {"file": None, "file_bytes": 0, "file_digest": None}
        if file is not None:
            with boundary(RunFolderError, f"cannot read {file}"):
                saved = {"file": file.name, "file_bytes": file.stat().st_size, "file_digest": file_digest(file)}
        stored = StoredRollouts(
            groups=tuple(group.id for group in groups),
            episodes=len(episodes),
            failed=sum(len(group.failed) for group in groups),
            tokens=sum(credited.scored.episode.num_sampled for credited in episodes),
            digest=rollouts_digest(groups, episodes),
            **saved,
        )
        self._open = step, stored
        self._keep(step, tuple(episodes))

    def prepare_batch(self, step: int) -> Batch:
        """Return the credited episodes of one of the newest steps, from memory or from the disk; from there without
        what a processor made of pictures.

        Raises RunFolderError for a step that is not kept any more.
        """
        with self._lock:  # its file may not be removed meanwhile
            batch = self._batches.get(step)
            if batch is None:
                kept = ", ".join(str(kept) for kept in self._batches) or "none"
                raise RunFolderError(f"the batch of step {step} is not in the buffer any more; kept steps: {kept}")
            if not isinstance(batch, _Spilled):
                return batch
            return tuple(episode for episode in load_trajectories(batch.path) if isinstance(episode, CreditedEpisode))

    def store_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Commit a step, or an evaluation without rollouts, whose `values` are the newest record of metrics.jsonl."""
        rollouts = None
        if self._open is not None and self._open[0] == step:
            rollouts, self._open = self._open[1], None
        commit = Commit(
            stage=self._stage,
            step=step,
            records=self._records(),
            metrics=numbers_digest(values),
            rollouts=rollouts,
            cursor=None if self.cursor is None else dict(self.cursor()),
        )
        self._commits.append(commit)
        before = self._commits.discarded.pop(commit.records, None)
        if before is not None and self._repeatable:
            self._compare(commit, before)

    def statistics(self) -> dict[str, int]:
        """Count commits, batches and bytes in memory, batches on the disk, and steps that a resume played again."""
        with self._lock:
            in_memory = [batch for batch in self._batches.values() if not isinstance(batch, _Spilled)]
            return {
                "commits": len(self._commits),
                "open": int(self._open is not None),
                "batches_in_memory": len(in_memory),
                "bytes_in_memory": sum(self._bytes.values()),
                "batches_on_disk": len(self._batches) - len(in_memory),
                "spilled": self._spilled_steps,
                "replayed": self._replayed,
                "replayed_differently": self._differing,
            }

    # --- hooks of the loops ----------------------------------------------------------------------------------------

    def recorder(self, save: SaveRollouts) -> Callable[[int, Sequence[Group], Sequence[CreditedEpisode]], None]:
        """Return what a loop calls with a step's index and rollouts; `save` writes the users' file of it."""

        def record(step: int, groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> None:
            self.store_rollouts(step + 1, groups, episodes, file=save(step, groups, episodes))

        return record

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Commit, as a metric sink that comes after the one of metrics.jsonl."""
        self.store_evaluation(step, values)

    def sync(self) -> None:
        """Return when every commit is on the disk."""
        self._commits.sync()

    def forget_cut(self) -> None:
        """Remove the commits that a resume discarded, because a newer checkpoint stands."""
        self._commits.forget_cut()

    def close(self) -> None:
        """Close the file of commits and remove what was spilled."""
        self._commits.close()
        with self._lock:
            self._batches.clear()
            self._bytes.clear()
            self._remove_spilled()

    # --- memory and disk -------------------------------------------------------------------------------------------

    def _keep(self, step: int, batch: Batch) -> None:
        """Keep a batch, forget the oldest, and move the oldest of those in memory to the disk until the rest fits."""
        num_bytes = sum(_num_bytes(credited) for credited in batch) + _picture_bytes(batch)
        with self._lock:
            self._forget(step)
            self._batches[step], self._bytes[step] = batch, num_bytes
            while len(self._batches) > self._kept_steps:
                self._forget(next(iter(self._batches)))
            while self._bytes and sum(self._bytes.values()) > self._memory_bytes:
                self._spill(next(iter(self._bytes)))

    def _spill(self, step: int) -> None:
        batch, path = self._batches[step], self._spill_to / f"step_{step:06d}" / "batch.jsonl"
        assert not isinstance(batch, _Spilled)
        save_trajectories(path, batch)
        self._batches[step] = _Spilled(path=path)
        del self._bytes[step]
        self._spilled_steps += 1

    def _forget(self, step: int) -> None:
        batch = self._batches.pop(step, None)
        self._bytes.pop(step, None)
        if isinstance(batch, _Spilled):
            with boundary(RunFolderError, f"cannot remove {batch.path.parent}"):
                shutil.rmtree(batch.path.parent)  # with the pictures of its messages

    def _remove_spilled(self) -> None:
        shutil.rmtree(self._spill_to, ignore_errors=True)

    # --- a resume --------------------------------------------------------------------------------------------------

    def _compare(self, commit: Commit, before: Commit) -> None:
        """Tell if a step that was played again is not what it was before the resume."""
        self._replayed += 1
        differences = commit.differences(before)
        if not differences:
            return
        self._differing += 1
        if self._differing <= MAX_TOLD:
            logger.error(
                "step %d of stage %s was played again after the resume and is not what it was before (%s): its tasks, "
                "environment, rewards, packages or processor do not repeat themselves; the run goes on with it",
                commit.step,
                self._stage,
                ", ".join(differences),
            )
        elif self._differing == MAX_TOLD + 1:
            logger.error("further steps differ from what they were before the resume")


def _num_bytes(credited: CreditedEpisode) -> int:
    """Estimate the memory of an episode: arrays of its tokens, and its texts."""
    episode = credited.scored.episode
    tokens = sum(step.prompt.nbytes + TOKEN_BYTES * len(step.completion.tokens) for step in episode.steps)
    return tokens + sum(len(message.content) for message in episode.messages)


def _picture_bytes(batch: Batch) -> int:
    """Count the memory of a batch's pictures, and of what a processor made of them; episodes share them."""
    episodes = [credited.scored.episode for credited in batch]
    pictures = {picture.digest: len(picture.data) for each in episodes for m in each.messages for picture in m.images}
    placed = [placed.image for each in episodes for step in each.steps for placed in step.images]
    return sum(pictures.values()) + sum({id(image.pixels): image.pixels.nbytes for image in placed}.values())
