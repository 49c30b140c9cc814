"""The changes that resumes made to a run's configuration: config_changes.jsonl in its run folder.

config.toml is the configuration that the run goes on with; with these records, the one of every step before is known.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace.errors import RunFolderError, boundary
from headrace.observe.json_lines import json_line, write_whole

MAX_SHOWN = 200  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A key of the configuration with another value than before; None: not set."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self._shown(self.before)} -> {self._shown(self.now)}"

    def _shown(self, value: Any) -> str:
        if value is None:
            return "not set"
        if self.key.rpartition(".")[2] == "webhook":
            return "(not shown)"  # its URL is a secret
        text = json.dumps(value, ensure_ascii=False, default=str)
        return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChanges:
    """The changes of one resume. `stage` went on behind its step `step` with them."""

    time: str
    stage: str
    step: int
    changes: tuple[ConfigChange, ...]

    @property
    def place(self) -> str:
        """The place in the run, for people."""
        return f"step {self.step} of {self.stage}"


_RECORD = TypeAdapter(RecordedChanges)


def read_changes(file: Path) -> list[RecordedChanges]:
    """Read all records, oldest first; none if no resume changed anything. Raises RunFolderError."""
    with boundary(RunFolderError, f"{file} cannot be read"):
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").splitlines()
    try:
        return [_RECORD.validate_json(line) for line in lines if line.strip()]
    except ValidationError as exc:
        raise RunFolderError(f"{file} has a line that is no record of changed keys") from exc


def add_changes(file: Path, changes: Sequence[ConfigChange], *, stage: str, step: int, now: datetime) -> None:
    """Add the changes of a resume behind those of earlier ones."""
    assert now.tzinfo is not None
    record = RecordedChanges(time=now.isoformat(timespec="seconds"), stage=stage, step=step, changes=tuple(changes))
    with boundary(RunFolderError, f"{file} cannot be read"):
        before = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    ended = before if not before or before.endswith("\n") else before + "\n"
    write_whole(file, ended + json_line(_RECORD.dump_python(record, mode="json")))
