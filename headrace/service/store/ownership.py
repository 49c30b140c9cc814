"""Keep a server's folder and its journal together: neither is used with another, and not by two servers at once.

Both have the id of the pair (`server.json` in the folder, a record in the journal). The folder also notes how far the
journal had come, so that a journal put back from an older copy is told from one that is behind by a kill. Whoever does
not fit is refused with a sentence; `adopt` makes a pair of what is there.
"""

import json
import logging
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import ConfigError, JournalError, boundary
from headrace.service.store.cleanup import CHECKPOINTS, SNAPSHOTS, STATES, later_states, lost_state, newer_states
from headrace.service.store.entities import ModelEntity
from headrace.service.store.journal import Journal, put
from headrace.service.store.registry import Registry
from headrace.storage import atomic_files

logger = logging.getLogger(__name__)

MARKER = "server.json"
KIND, PAIR = "server", "pair"
SET_ASIDE = "set-aside"
ADOPT = "headrace serve --adopt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMarker:
    """The content of `server.json`."""

    id: str  # the journal has the same
    finished: int  # the journal has had outcomes up to this number


def claim(folder: Path, journal: Journal, *, adopt: bool = False) -> None:
    """Hold the journal for the server of this folder, which is locked already.

    Raises ConfigError when another server holds it, or when folder and journal do not belong together; with `adopt`
    they do from now on, and states behind those that the journal names are moved to the folder `set-aside`.
    """
    journal.hold(folder)
    registry = Registry(journal)
    marker, pair = read_marker(folder, lenient=adopt), journal.records(KIND).get(PAIR)
    problem = _problem(folder, journal, registry, marker, pair)
    if problem is not None and not adopt:
        raise ConfigError(f"{problem}; to go on with both as they are: {ADOPT}")
    if problem is not None:
        for model in registry.models.values():
            _set_aside(folder, model, later_states(folder, model))
        marker = None
    id = secrets.token_hex(16) if marker is None else marker.id
    with boundary(JournalError, f"the folder {folder} cannot be written"):
        # the folder first: a kill in between leaves a folder that any journal may claim
        _write_marker(folder, PairMarker(id=id, finished=journal.last_finished()))
    journal.write_now([put(KIND, PAIR, {"id": id, "folder": str(folder)})])


def note_progress(folder: Path, finished: int) -> None:
    """Note how far the journal has come, if the folder has a journal of its own. May raise OSError."""
    marker = read_marker(folder)
    if marker is not None and marker.finished < finished:
        _write_marker(folder, PairMarker(id=marker.id, finished=finished))


def read_marker(folder: Path, *, lenient: bool = False) -> PairMarker | None:
    """Read `server.json`; None when there is none, or when it cannot be read and that is no matter."""
    try:
        return PairMarker(**json.loads((folder / MARKER).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as exc:
        if lenient:
            return None
        raise ConfigError(
            f"{folder / MARKER}, which says to which journal the folder belongs, cannot be read "
            f"({type(exc).__name__}): put it back from a copy, or start once with  {ADOPT}"
        ) from exc


def _problem(
    folder: Path, journal: Journal, registry: Registry, marker: PairMarker | None, pair: dict[str, str] | None
) -> str | None:
    """Say why the folder and the journal do not belong together."""
    if pair is not None and (marker is None or marker.id != pair["id"]):
        return (
            f"the journal {journal.name} belongs to the folder {pair['folder']}, not to {folder}: give 'serve.journal' "
            f"another, or 'serve.folder' that one (a folder that was moved keeps its {MARKER})"
        )
    empty = not (registry.sessions or registry.models or registry.samplers or registry.checkpoints)
    if empty and _holds_models(folder):
        return (
            f"the folder {folder} holds states and checkpoints, and the journal {journal.name} knows of none: put the "
            f"journal back, or move {STATES}, {CHECKPOINTS} and {SNAPSHOTS} elsewhere to begin with nothing"
        )
    newer = newer_states(folder, registry, journal)
    if newer or (marker is not None and marker.finished > journal.last_finished()):
        found = f" ({newer[0].relative_to(folder)} is a later state than it knows of)" if newer else ""
        return (
            f"the journal {journal.name} is older than the folder {folder}{found}: put back the newer journal, or a "
            "copy of the folder from the journal's time"
        )
    return None


def _holds_models(folder: Path) -> bool:
    patterns = (f"{STATES}/*/[!.]*", f"{CHECKPOINTS}/[!.]*", f"{SNAPSHOTS}/[!.]*")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _set_aside(folder: Path, model: ModelEntity, states: list[Path]) -> None:
    with boundary(JournalError, f"states cannot be moved to {folder / SET_ASIDE}"):
        for state in states:
            target = folder / SET_ASIDE / f"{state.parent.name}-{state.name}-{secrets.token_hex(4)}"
            atomic_files.make_folder(target.parent)
            state.rename(target)
            atomic_files.fsync(target.parent)
            logger.warning("the state of model %s behind its request %d is now %s", model.id, int(state.name), target)
    if lost_state(folder, model):
        logger.warning(
            "the journal names the state %s of model %s, which is not there: put it back from a copy of the folder, or "
            "the model cannot be trained",
            model.folder,
            model.id,
        )


def _write_marker(folder: Path, marker: PairMarker) -> None:
    atomic_files.write_text(folder / MARKER, json.dumps(asdict(marker)) + "\n")
    atomic_files.fsync(folder)
