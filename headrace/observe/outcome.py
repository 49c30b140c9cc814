"""The outcome of a run's last process: outcome.json in its run folder, written when training begins and when it ends.

A file that still says "started" while no process holds the folder is that of a process that was killed.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from headrace.errors import HeadraceError, RunFolderError, boundary
from headrace.observe.json_lines import write_whole

logger = logging.getLogger(__name__)
MAX_REASON = 2000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The end of the last process of a run, or its start."""

    state: Literal["started", "finished", "stopped", "failed"]
    time: str  # of the start or the end
    seconds: float  # that this process and those before it have worked, as far as they could write it
    reason: str = ""  # of a stop or a failure


_RECORD = TypeAdapter(RunOutcome)


def read_outcome(file: Path) -> RunOutcome | None:
    """Read outcome.json; None if there is none, as in run folders from before it. Raises RunFolderError."""
    with boundary(RunFolderError, f"{file} cannot be read"):
        if not file.exists():
            return None
        content = file.read_bytes()
    try:
        outcome = _RECORD.validate_json(content)
        datetime.fromisoformat(outcome.time)
        return outcome
    except ValueError as exc:  # also pydantic's ValidationError
        raise RunFolderError(f"{file} does not describe the end of a run") from exc


def write_outcome(
    file: Path, state: Literal["started", "finished", "stopped", "failed"], *, seconds: float, reason: str = ""
) -> None:
    """Write the outcome. A disk that fails is told in the log: no run ends because of this file."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = RunOutcome(state=state, time=time, seconds=round(seconds, 1), reason=reason[:MAX_REASON])
    try:
        write_whole(file, _RECORD.dump_json(outcome, indent=1).decode() + "\n")
    except HeadraceError as exc:
        logger.warning("%s; `headrace runs` will not know how the run ended", exc)


def seconds_before(file: Path) -> float:
    """Return the seconds that earlier processes of the run have worked; 0 if that is not known."""
    try:
        outcome = read_outcome(file)
    except RunFolderError:
        return 0.0
    return 0.0 if outcome is None else outcome.seconds
