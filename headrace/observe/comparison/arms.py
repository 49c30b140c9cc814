"""Read the runs that are compared from their folders. What cannot be read is left out and noted."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import RunFolderError, boundary
from headrace.observe.report.run_report import EVAL_ORDER
from headrace.observe.rollouts.records import EpisodeRecord, readable_lines
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import MetricRecord, readable_metrics

_EVALUATION = re.compile(r"eval_(.+)\.jsonl")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, or a checkpoint that was evaluated (which has neither records nor, maybe, a configuration)."""

    name: str
    records: tuple[MetricRecord, ...]
    config: Mapping[str, Any]
    evaluation: str  # which evaluation the episodes are of, such as "rl"; "" without any
    episodes: tuple[EpisodeRecord, ...]  # held-out ones, without those that failed
    notes: tuple[str, ...] = ()  # on what was left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison: a run, or the runs of one setting with several seeds."""

    label: str
    runs: tuple[ComparedRun, ...]

    def __post_init__(self) -> None:
        assert self.runs


def read_runs(paths: Sequence[Path]) -> tuple[ComparedRun, ...]:
    """Read run folders. Raises RunFolderError if one of them is none."""
    folders = [RunFolder.open(path) for path in paths]
    return tuple(_read(folder, name) for folder, name in zip(folders, run_names(paths), strict=True))


def run_names(paths: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with as many folders above it as tell it from the others.

    >>> run_names([Path("a/x"), Path("b/x"), Path("b/y")])
    ['a/x', 'b/x', 'y']
    """
    parts = [path.absolute().parts for path in paths]
    names = [list(path[-1:]) for path in parts]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        counts = Counter(map(tuple, names))
        names = [
            list(path[-depth:]) if counts[tuple(name)] > 1 else name for path, name in zip(parts, names, strict=True)
        ]
    return ["/".join(name) for name in names]


def _read(folder: RunFolder, name: str) -> ComparedRun:
    notes: list[str] = []
    records, refused = _readable(folder.metrics, lambda: readable_metrics(folder.metrics), notes) or ((), ())
    notes += [f"{len(refused)} lines of {folder.metrics}; {refused[0]}"] if refused else []
    config = _readable(folder.config, folder.read_config, notes) or {}
    label, episodes = last_evaluation(folder, notes)
    return ComparedRun(
        name=name, records=records, config=config, evaluation=label, episodes=episodes, notes=tuple(notes)
    )


def last_evaluation(folder: RunFolder, notes: list[str]) -> tuple[str, tuple[EpisodeRecord, ...]]:
    """Return the stage and the episodes of the run's last evaluation; its last stage, if it has trained any."""
    file = last_evaluation_file(folder, notes)
    match = None if file is None else _EVALUATION.fullmatch(file.name)
    if file is None or match is None:
        return "", ()
    return match[1], read_episodes_of(file, notes)


def last_evaluation_file(folder: RunFolder, notes: list[str] | None = None) -> Path | None:
    """Return the file with the episodes of the run's last evaluation; None before the first."""
    notes = [] if notes is None else notes
    files = {
        match[1]: file
        for file in _readable(folder.rollouts, lambda: sorted(folder.rollouts.iterdir()), notes) or ()
        if (match := _EVALUATION.fullmatch(file.name))
    }
    order = {label: (EVAL_ORDER.index(label) if label in EVAL_ORDER else len(EVAL_ORDER), label) for label in files}
    return files[max(files, key=order.__getitem__)] if files else None


def read_episodes_of(path: Path, notes: list[str]) -> tuple[EpisodeRecord, ...]:
    """Read the episodes of a file; a note on what cannot be read is added to `notes`."""
    episodes, refused = _readable(path, lambda: readable_lines(path), notes) or ((), ())
    notes += [f"{len(refused)} lines of {path}; {refused[0]}"] if refused else []
    return episodes


def _readable(path: Path, read: Callable[[], Value], notes: list[str]) -> Value | None:
    """Read a file if it is there; returns None, with a note unless it is missing, if it cannot be read."""
    try:
        with boundary(RunFolderError, f"{path} cannot be read"):
            return read() if path.exists() else None
    except RunFolderError as exc:
        notes.append(str(exc))
        return None
