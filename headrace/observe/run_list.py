"""List run folders for `headrace runs`: where each run stands, how it ended, its last figures.

Reads what is there: folders of older versions lack files, and damaged ones get a note. Writes nothing, takes no lock.
"""

import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from headrace.errors import HeadraceError, RunFolderError, boundary
from headrace.observe.outcome import read_outcome
from headrace.observe.run_folder import RunFolder, is_finished, start_of
from headrace.observe.sinks.progress import EVAL, EVAL_REWARD, duration
from headrace.printable import single_line
from headrace.storage.folder_lock import find_holder

TAIL_BYTES = 4 << 20  # of metrics.jsonl
_TRAINING = ("reward/mean", "sft/loss", "loss/kl_teacher", "loss/accuracy", "loss/total")  # the first that there is
_HELD_OUT = (EVAL, EVAL_REWARD, "eval/accuracy", "eval/loss")
_SHARES = (EVAL, "eval/accuracy", "loss/accuracy")

RunStateName = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run folder in the list."""

    name: str
    folder: str
    state: RunStateName
    by: str | None  # the process that works in it
    reason: str  # why it stopped or failed
    stage: str | None  # the last one that logged anything
    step: int | None
    steps: int | None  # of how many
    figures: Mapping[str, float]  # the last values of what was trained on and of what was held out
    started: str | None
    seconds: float | None  # that it took
    problems: tuple[str, ...]  # what of the folder cannot be read


def find_run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among `folders` and directly in them, oldest first. Raises RunFolderError."""
    paths: dict[Path, None] = {}
    for folder in folders:
        with boundary(RunFolderError, f"{folder} cannot be read"):
            if not folder.is_dir():
                raise RunFolderError(f"there is no folder {folder}: give run folders, or folders that have some")
            inside = [folder] if _is_run(folder) else [path for path in folder.iterdir() if _is_run(path)]
        paths |= dict.fromkeys(inside)
    return sorted(paths, key=lambda path: (start_of(path) or datetime.min.replace(tzinfo=UTC), path.name))


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    return (path / "config.toml").is_file() or (start_of(path) is not None and (path / "checkpoints").is_dir())


def describe_run(path: Path) -> ListedRun:
    """Describe a run folder; what cannot be read is in `problems`."""
    run, problems = RunFolder(path=path), list[str]()
    config = _config(run, problems)
    last, figures = _last_metrics(run, problems)
    stage = None if last is None else last[0]
    section = config.get(stage or "")
    steps = section.get("steps") if isinstance(section, Mapping) else None
    outcome = None
    try:
        outcome = read_outcome(run.outcome)
    except HeadraceError as exc:
        problems.append(str(exc))
    holder = None
    try:
        holder = find_holder(path)
    except HeadraceError as exc:
        problems.append(str(exc))
    state: RunStateName
    if holder is not None and not holder.is_gone:
        state = "running"
    elif is_finished(run):
        state = "finished"
    elif outcome is not None and outcome.state in ("stopped", "failed"):
        state = outcome.state
    elif holder is not None or (outcome is not None and outcome.state == "started"):
        state = "killed"
    else:
        state = "stopped" if last is not None else "unknown"
    started = start_of(path)
    if outcome is None:  # of an older version
        seconds = _span_s(run, started)
    elif outcome.state == "started":
        since = _span_s(run, datetime.fromisoformat(outcome.time), until=time.time() if state == "running" else None)
        seconds = outcome.seconds + (since or 0.0)
    else:
        seconds = outcome.seconds
    name = config.get("run", {}).get("name") if isinstance(config.get("run"), Mapping) else None
    return ListedRun(
        name=str(name or path.name),
        folder=str(path),
        state=state,
        by=str(holder.holder or "another process") if holder is not None and state == "running" else None,
        reason=outcome.reason if outcome is not None and state in ("stopped", "failed") else "",
        stage=stage,
        step=None if last is None else last[1],
        steps=steps if isinstance(steps, int) else None,
        figures=figures,
        started=None if started is None else started.isoformat(timespec="seconds"),
        seconds=seconds,
        problems=tuple(problems),
    )


def _config(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    try:
        with boundary(RunFolderError, f"{run.config} cannot be read"):
            return tomllib.loads(run.config.read_text(encoding="utf-8"))
    except RunFolderError as exc:
        problems.append(str(exc))
        return {}


def _last_metrics(run: RunFolder, problems: list[str]) -> tuple[tuple[str, int] | None, dict[str, float]]:
    """Return stage and step of the last record, and the last values of the figures that are listed."""
    last: tuple[str, int] | None = None
    values: dict[str, float] = {}
    refused = 0
    try:
        for line in _tail(run.metrics):
            try:
                record = json.loads(line)
                stage, step = str(record.pop("stage")), int(record.pop("step"))
                numbers = {name: float(record[name]) for name in (*_TRAINING, *_HELD_OUT) if name in record}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                refused += 1
                continue
            if last is not None and stage != last[0]:  # figures of training are those of the last stage
                values = {name: value for name, value in values.items() if name in _HELD_OUT}
            last, values = (stage, step), {**values, **numbers}
    except RunFolderError as exc:
        problems.append(str(exc))
    if refused:
        problems.append(f"{refused} lines of {run.metrics} are no records")
    shown = [next((name for name in names if name in values), None) for names in (_TRAINING, _HELD_OUT)]
    return last, {name: values[name] for name in shown if name is not None}


def _tail(path: Path) -> Iterator[bytes]:
    """Yield the whole lines at the end of a file; none if it is not there."""
    with boundary(RunFolderError, f"{path} cannot be read"):
        if not path.exists():
            return
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read()
    lines = content.split(b"\n")[:-1]  # the last one is being written, or empty
    yield from lines[1:] if size > TAIL_BYTES else lines


def _span_s(run: RunFolder, began: datetime | None, *, until: float | None = None) -> float | None:
    """Return the seconds from `began` to a time, or to the last metric; None if they are not known."""
    try:
        until = run.metrics.stat().st_mtime if until is None else until
    except OSError:
        return None
    return None if began is None else max(0.0, until - began.timestamp())


def table(runs: Sequence[ListedRun]) -> str:
    """Format runs as a table, and below it what could not be read and why runs failed."""
    heads = ("RUN", "STAGE", "STEP", "STATE", "FIGURES", "STARTED", "TOOK")
    rows = [heads, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for run in runs:
        folder = single_line(Path(run.folder).name)
        if run.by is not None:
            lines.append(f"{folder} is held by {single_line(run.by)}")
        if run.reason:
            lines.append(f"{folder} {run.state}: {single_line(run.reason)}")
        lines += [f"{folder} is damaged: {single_line(problem)}" for problem in run.problems]
    return "\n".join(lines)


def _row(run: ListedRun) -> tuple[str, ...]:
    step = "-" if run.step is None else f"{run.step}/{run.steps}" if run.steps is not None else str(run.step)
    figures = ", ".join(f"{_label(name)} {_figure(name, value)}" for name, value in run.figures.items())
    started = "-" if run.started is None else run.started[:16].replace("T", " ")
    took = "-" if run.seconds is None else duration(run.seconds)
    return (
        single_line(Path(run.folder).name),
        single_line(run.stage or "-"),
        step,
        run.state,
        figures or "-",
        started,
        took,
    )


def _label(name: str) -> str:
    area, _, what = name.partition("/")
    what = {"mean": "reward", "pass@1": "success", "total": "loss", "kl_teacher": "kl to teacher"}.get(what, what)
    return f"held-out {what}" if area == "eval" else what


def _figure(name: str, value: float) -> str:
    return f"{100 * value:.1f}%" if name in _SHARES else f"{value:.4g}"


def as_json(runs: Sequence[ListedRun]) -> str:
    """Format runs as a JSON list; a figure that is not finite is a string."""
    listed = [asdict(run) for run in runs]
    for run in listed:
        figures = run["figures"].items()
        run["figures"] = {name: value if abs(value) < float("inf") else str(value) for name, value in figures}
    return json.dumps(listed, indent=1, ensure_ascii=False, allow_nan=False)
