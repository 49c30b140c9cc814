"""Write and read metrics.jsonl, the record of truth of a run.

Everything else can be rebuilt from it. Names under `time/` and `perf/` are the only ones that may differ between two
runs of the same configuration.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.json_lines import json_line
from headrace.storage import atomic_files

logger = logging.getLogger(__name__)

MAX_WARNINGS = 3  # about lines of one file
UNREPRODUCIBLE = ("time/", "perf/")  # measured by a clock


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """A line of metrics.jsonl."""

    step: int
    stage: str
    values: Mapping[str, float]


class JsonlSink:
    """Appends one JSON object per `log` call: {"stage": ..., "step": n, "area/name": value, ...}, keys sorted.

    A checkpoint stores `records` and is written after `sync`; a resume calls `truncate_after(records)`, which removes
    records that were written after the checkpoint, so that the resumed file equals that of a run that was never killed.
    (A position in bytes would depend on the number of digits of the clock's numbers.) A line torn by a kill is removed
    when the file is opened.

    What was cut stays in a file beside until `forget_cut`, because another checkpoint may still count on it (see
    `restore_cut`). `check_owner` raises if this process may not write the file any more.
    """

    def __init__(self, path: Path, *, stage: str, check_owner: Callable[[], None] = lambda: None) -> None:
        self._path, self._check_owner = path, check_owner
        self._stage = stage
        with boundary(RunFolderError, f"cannot open {path}"):
            atomic_files.make_folder(path.parent)
            is_new = not path.exists()
            self._file = path.open("ab+")
            if is_new:
                atomic_files.fsync(path.parent)
            content = path.read_bytes()
            self._file.truncate(_whole_lines(content))
            self._file.seek(0, os.SEEK_END)
        self._records = content.count(b"\n")

    @property
    def records(self) -> int:
        """The number of records in the file, those of earlier stages included."""
        return self._records

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self._file.closed, "a closed sink takes no more metrics"
        assert not {"step", "stage"} & values.keys()
        record = {"step": int(step), "stage": self._stage, **{name: float(value) for name, value in values.items()}}
        with boundary(RunFolderError, f"cannot write {self._path}"):
            self._check_owner()
            self._file.write(json_line(record, sort_keys=True).encode())
            self._file.flush()
        self._records += 1

    def sync(self) -> None:
        """Return when every record is on the disk."""
        with boundary(RunFolderError, f"cannot write {self._path}"):
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(self, records: int) -> None:
        """Remove all but the first `records` records. Raises RunFolderError if there are fewer."""
        assert records >= 0
        _check_records(self._path, self._records, records)
        if records == self._records:
            return
        with boundary(RunFolderError, f"cannot cut {self._path}"):
            self._check_owner()
            self._file.flush()
            _keep_longest(self._path)
            self._file.seek(0)
            end = sum(len(self._file.readline()) for _ in range(records))
            self._file.truncate(end)
            self._file.seek(0, os.SEEK_END)
            os.fsync(self._file.fileno())
        self._records = records

    def forget_cut(self) -> None:
        """Remove what `truncate_after` cut off: a newer checkpoint stands, and no other one counts on it."""
        with boundary(RunFolderError, f"cannot remove {_cut_file(self._path)}"):
            _cut_file(self._path).unlink(missing_ok=True)

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()


def restore_cut(path: Path, records: int) -> None:
    """Bring records back that an earlier resume cut off, if the metrics file has fewer than `records` now.

    That resume went on from an older checkpoint than this one, and ended before it saved a newer one.
    """
    with boundary(RunFolderError, f"cannot restore {path}"):
        cut = _cut_file(path)
        content = path.read_bytes() if path.exists() else b""
        if content.count(b"\n") < records and cut.exists() and cut.read_bytes().count(b"\n") >= records:
            atomic_files.write_bytes(path, cut.read_bytes())


def _cut_file(path: Path) -> Path:
    return path.with_name(path.name + ".before-cut")


def _keep_longest(path: Path) -> None:
    """Copy a metrics file that is about to be cut, unless a copy with more records is there already."""
    content, cut = path.read_bytes(), _cut_file(path)
    if not cut.exists() or cut.read_bytes().count(b"\n") <= content.count(b"\n"):
        atomic_files.write_bytes(cut, content)


def repair_metrics(path: Path) -> None:
    """Prepare the file for a resume: cut a last line that was torn by a kill, and warn of lines that are no records.

    Such lines stay, because checkpoints count lines; readers leave them out. Raises RunFolderError if the file cannot
    be read or cut.
    """
    with boundary(RunFolderError, f"cannot read {path}"):
        if not path.exists():
            return
        content = path.read_bytes()
    whole = _whole_lines(content)
    if whole < len(content):
        logger.warning("%s ends in the middle of line %d, which is cut off", path, content.count(b"\n") + 1)
        with boundary(RunFolderError, f"cannot cut {path}"):
            os.truncate(path, whole)
    _, refused = readable_metrics(path)
    for sentence in refused[:MAX_WARNINGS]:
        logger.warning("%s; the run goes on without this record", sentence)
    if len(refused) > MAX_WARNINGS:
        logger.warning("%d more lines of %s are no records", len(refused) - MAX_WARNINGS, path)


def check_records(path: Path, records: int) -> None:
    """Raise RunFolderError if the metrics file has fewer than `records` whole records, or is missing."""
    with boundary(RunFolderError, f"cannot read {path}"):
        content = path.read_bytes() if path.exists() else b""
    _check_records(path, content.count(b"\n"), records)


def _check_records(path: Path, actual: int, records: int) -> None:
    if actual < records:
        raise RunFolderError(
            f"{path} is shorter than its checkpoint says: it has {actual} records, not {records}; restore the file, or "
            "start a new run"
        )


def read_metrics(path: Path) -> tuple[MetricRecord, ...]:
    """Read all whole records; a last line without its newline was torn by a kill and is left out.

    Raises RunFolderError on a missing file and on any other line that is not a record.
    """
    records, refused = readable_metrics(path)
    if refused:
        raise RunFolderError(refused[0])
    return records


def readable_metrics(path: Path) -> tuple[tuple[MetricRecord, ...], tuple[str, ...]]:
    """Read all whole records, and a sentence for each line that is none. Raises RunFolderError on a missing file."""
    with boundary(RunFolderError, f"cannot read {path}"):
        content = path.read_bytes()
    records, refused = list[MetricRecord](), list[str]()
    for number, line in enumerate(content[: _whole_lines(content)].split(b"\n")[:-1], start=1):
        try:
            with boundary(RunFolderError, f"{path}, line {number} is not a metrics record"):
                records.append(_record(line))
        except RunFolderError as exc:
            refused.append(str(exc))
    return tuple(records), tuple(refused)


def _record(line: bytes) -> MetricRecord:
    values = json.loads(line)
    step, stage = values.pop("step"), values.pop("stage")
    numbers = {str(name): float(value) for name, value in values.items()}
    return MetricRecord(step=int(step), stage=str(stage), values=numbers)


def reproducible_bytes(path: Path) -> bytes:
    """Return the file without clock measurements: equal for a run and its killed and resumed twin."""
    return b"".join(
        json_line(
            {
                "step": record.step,
                "stage": record.stage,
                **{name: value for name, value in record.values.items() if not name.startswith(UNREPRODUCIBLE)},
            },
            sort_keys=True,
        ).encode()
        for record in read_metrics(path)
    )


def _whole_lines(content: bytes) -> int:
    """Count the bytes up to and including the last newline."""
    return content.rfind(b"\n") + 1
