"""Write and read commits.jsonl: one record for each transaction of a run, appended after everything that it counts.

A step whose record is missing was not committed: the process ended while it wrote. The file can be read while the run
lasts; its last line may be torn, and readers leave that out.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunFolderError, boundary
from headrace.observe.json_lines import json_line
from headrace.storage import atomic_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollouts:
    """Counts and digests of the rollouts of a step. The field names are those of the file."""

    groups: tuple[int, ...]  # their ids
    episodes: int
    failed: int
    tokens: int  # sampled
    digest: str  # of all that was trained on, whatever was saved of it
    file: str | None  # under rollouts/; None: `rl.save` saves nothing of this step
    file_bytes: int
    file_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A transaction. The field names are those of the file."""

    stage: str
    step: int  # finished training steps
    records: int  # of metrics.jsonl, this one included
    metrics: str  # digest of the record, without what a clock measured
    rollouts: StoredRollouts | None  # None: a record of numbers alone, such as an evaluation
    cursor: Mapping[str, Any] | None  # where the tasks stand

    def line(self) -> str:
        """Format the record as a line of the file."""
        return json_line(asdict(self), sort_keys=True)

    def differences(self, other: "Commit") -> tuple[str, ...]:
        """Name the fields in which two records of the same transaction differ."""
        mine, theirs = json.loads(self.line()), json.loads(other.line())
        return tuple(name for name in mine if mine[name] != theirs[name])


class CommitLog:
    """Appends the commits of a stage, and holds those that a resume discards.

    Opening cuts the file back to the first `records` records of metrics.jsonl: what a checkpoint counts. The commits
    after them are in `discarded`, by their number of records, and in a file beside until `forget_cut`, because another
    checkpoint may still count on them (`restore_commits`). A run folder that was written before this file existed has
    none.
    """

    def __init__(self, path: Path, *, records: int, check_owner: Callable[[], None] = lambda: None) -> None:
        self._path, self._check_owner = path, check_owner
        restore_commits(path, records)
        before = read_commits(path) if path.exists() else ()
        kept = [commit for commit in before if commit.records <= records]
        self.discarded: dict[int, Commit] = {commit.records: commit for commit in before if commit.records > records}
        self._count = len(kept)
        with boundary(RunFolderError, f"cannot open {path}"):
            check_owner()
            atomic_files.make_folder(path.parent)
            if self.discarded and not _cut_file(path).exists():
                atomic_files.write_text(_cut_file(path), "".join(commit.line() for commit in before))
            whole = "".join(commit.line() for commit in kept)
            if not path.exists() or path.read_text(encoding="utf-8") != whole:
                atomic_files.write_text(path, whole)
            self._file = path.open("ab")

    def __len__(self) -> int:
        return self._count

    def append(self, commit: Commit) -> None:
        """Append a record: the transaction is committed when this returns."""
        with boundary(RunFolderError, f"cannot write {self._path}"):
            self._check_owner()
            self._file.write(commit.line().encode())
            self._file.flush()
        self._count += 1

    def sync(self) -> None:
        """Return when every record is on the disk."""
        with boundary(RunFolderError, f"cannot write {self._path}"):
            self._file.flush()
            os.fsync(self._file.fileno())

    def forget_cut(self) -> None:
        """Remove what a resume discarded: a newer checkpoint stands, and no other one counts on it."""
        with boundary(RunFolderError, f"cannot remove {_cut_file(self._path)}"):
            _cut_file(self._path).unlink(missing_ok=True)

    def close(self) -> None:
        """Write out and close the file."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def restore_commits(path: Path, records: int) -> None:
    """Bring commits back that an earlier resume discarded, if a checkpoint of `records` records counts on them."""
    cut = _cut_file(path)
    if not cut.exists():
        return
    present = {commit.records: commit for commit in (read_commits(path) if path.exists() else ())}
    last = max(present, default=0)
    back = {commit.records: commit for commit in read_commits(cut) if last < commit.records <= records}
    if back:
        with boundary(RunFolderError, f"cannot restore {path}"):
            atomic_files.write_text(path, "".join(commit.line() for commit in (present | back).values()))


def _cut_file(path: Path) -> Path:
    return path.with_name(path.name + ".before-cut")


def read_commits(path: Path) -> tuple[Commit, ...]:
    """Read all whole records, also while the run writes; lines that are none are told and left out.

    Raises RunFolderError if the file cannot be read.
    """
    with boundary(RunFolderError, f"cannot read {path}"):
        content = path.read_bytes()
    return tuple(_records(path, content[: content.rfind(b"\n") + 1]))


def _records(path: Path, content: bytes) -> Iterator[Commit]:
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            with boundary(RunFolderError, f"{path}, line {number} is not a commit"):
                yield _commit(json.loads(line))
        except RunFolderError as exc:
            logger.warning("%s; the run goes on without this record", exc)


def _commit(fields: Mapping[str, Any]) -> Commit:
    rollouts = fields["rollouts"]
    return Commit(
        stage=str(fields["stage"]),
        step=int(fields["step"]),
        records=int(fields["records"]),
        metrics=str(fields["metrics"]),
        rollouts=None if rollouts is None else StoredRollouts(**{**rollouts, "groups": tuple(rollouts["groups"])}),
        cursor=fields["cursor"],
    )
