"""Keep the metrics of a run in columns, and thin them to curves that a page can draw.

Titles, sentences and units are those of the report (`headrace.observe.report.charts`). Columns are bounded: a run with
more values than `MAX_VALUES` keeps every second record, then every fourth, and so on.
"""

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic_core

from headrace.observe.report.async_charts import EFFECTIVE, IDLE, LAG
from headrace.observe.report.charts import CURVES, REWARD, STYLES, SUMMARIES, TIMES, Curve
from headrace.observe.report.svg import LARGEST

MAX_VALUES = 8_000_000
MAX_NAMES = 2000  # different metrics of a stage
MAX_POINTS = 240  # of a curve
MAX_BARS = 60
WAITS = Curve(
    title="What the trainer waits for",
    names=(
        ("perf/wait_sampling", "sampling"),
        ("perf/wait_reward", "rewards"),
        ("perf/wait_environment", "the environment"),
        ("perf/wait_other", "anything else"),
    ),
    explanation="Share of each training step in which the trainer had no batch, by what was going on meanwhile; the "
    "largest part is where faster or more workers help.",
    share=True,
)


@dataclass(slots=True)
class Column:
    """The values of one metric in one stage."""

    steps: "array[int]"
    values: "array[float]"


class MetricColumns:
    """Holds the records of metrics.jsonl by stage and metric, in the order of the file."""

    def __init__(self, *, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self.stages: dict[str, dict[str, Column]] = {}
        self.num_records = self.num_refused = self.num_values = 0
        self.keeps_every = 1
        self.last: tuple[str, int] | None = None  # stage and step of the last record

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines of the file; a line that is no record is counted and left out."""
        for line in lines:
            try:
                record = pydantic_core.from_json(line)
                step, stage = int(record.pop("step")), str(record.pop("stage"))
            except (ValueError, TypeError, KeyError, AttributeError):
                self.num_refused += 1
                continue
            self.num_records += 1
            self.last = stage, step
            is_kept = self.num_records % self.keeps_every == 0
            columns = self.stages.setdefault(stage, {})
            for name, value in record.items():
                column = columns.get(name)
                if column is None:
                    if len(columns) >= MAX_NAMES:
                        continue
                    column = columns[name] = Column(array("q"), array("d"))
                elif not is_kept and not name.startswith("eval/"):
                    continue
                if type(value) is not float:  # "NaN", an integer, or what is no number at all
                    try:
                        value = float(value)
                    except (ValueError, TypeError):
                        continue
                column.steps.append(step)
                column.values.append(value)
            self.num_values += len(record) if is_kept else 0
            if self.num_values > self._max_values:
                self._thin()

    def _thin(self) -> None:
        """Drop every second value, but evaluations, which are few."""
        self.keeps_every *= 2
        self.num_values = 0
        for columns in self.stages.values():
            for name, column in columns.items():
                if not name.startswith("eval/"):
                    column.steps, column.values = column.steps[1::2], column.values[1::2]
                self.num_values += len(column.values)

    @property
    def names(self) -> list[str]:
        return sorted({name for columns in self.stages.values() for name in columns})

    def column(self, stage: str, name: str) -> Column | None:
        return self.stages.get(stage, {}).get(name)

    def tail(self, stage: str, count: int) -> dict[str, list[float]]:
        """Return the last values of every metric of a stage that its last `count` steps have."""
        last = self._last_step(stage)
        columns = self.stages.get(stage, {})
        recent = {}
        for name, column in columns.items():
            values = [
                value
                for step, value in zip(column.steps[-count:], column.values[-count:], strict=True)
                if step > last - count * self.keeps_every
            ]
            if values:
                recent[name] = values
        return recent

    def _last_step(self, stage: str) -> int:
        return max((column.steps[-1] for column in self.stages.get(stage, {}).values() if column.steps), default=0)


def thin(column: Column, limit: int = MAX_POINTS) -> dict[str, list[float | int]] | None:
    """Return at most `limit` points: the last step of each run of neighbours, their mean, lowest and highest value.

    Values that no axis can hold are left out; None if nothing is left.
    """
    steps = np.frombuffer(column.steps, dtype=np.int64) if column.steps else np.empty(0, dtype=np.int64)
    values = np.frombuffer(column.values, dtype=np.float64) if column.values else np.empty(0)
    keep = np.abs(values) < LARGEST
    if not keep.all():
        steps, values = steps[keep], values[keep]
    if len(values) == 0:
        return None
    size = math.ceil(len(values) / limit)
    starts = np.arange(0, len(values), size)
    counts = np.diff([*starts, len(values)])
    points: dict[str, list[float | int]] = {
        "steps": steps[starts + counts - 1].tolist(),
        "mean": _rounded(np.add.reduceat(values, starts) / counts),
    }
    if size > 1:
        points["low"] = _rounded(np.minimum.reduceat(values, starts))
        points["high"] = _rounded(np.maximum.reduceat(values, starts))
    return points


def _rounded(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float | int]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def all_curves(columns: MetricColumns) -> tuple[Curve, ...]:
    """Return the curves of the report that a run may have, with the terms of its reward after their sum."""
    terms = sorted(
        name for name in columns.names if name.startswith("reward/") and name.count("/") == 1 and name not in SUMMARIES
    )
    curves: list[Curve] = []
    for curve in CURVES:
        curves.append(curve)
        if curve.title == REWARD and len(terms) > 1:
            curves.append(
                Curve(
                    title="Rewards by term",
                    names=tuple((name, name.removeprefix("reward/")) for name in terms[: len(STYLES)]),
                    explanation="What each reward function gave, before its weight; one that climbs while another "
                    "falls shows what the model trades for what.",
                )
            )
    return (*curves, WAITS, IDLE, LAG, EFFECTIVE)


def drawn_charts(columns: MetricColumns) -> list[dict[str, Any]]:
    """Return every chart that a run has data for, thinned, with the words around it; then where the time went."""
    charts = [chart for curve in all_curves(columns) if (chart := chart_of(curve, columns)) is not None]
    times = _times(columns)
    return [*charts, times] if times is not None else charts


def chart_of(curve: Curve, columns: MetricColumns) -> dict[str, Any] | None:
    """Return one chart; None if no stage has any of its metrics."""
    series: list[dict[str, Any]] = []
    labels: dict[str, int] = {}
    for name, label in curve.names:
        if label in labels and any(one["label"] == label for one in series):
            continue  # another name of a metric that is drawn already
        for stage in [curve.stage] if curve.stage is not None else list(columns.stages):
            column = columns.column(stage, name)
            points = None if column is None else thin(column)
            if points is not None:
                place = labels.setdefault(label, len(labels))
                series.append({"label": label, "metric": name, "stage": stage, "style": place, **points})
    if not series:
        return None
    return {
        "title": curve.title,
        "explanation": curve.explanation,
        "share": curve.share,
        "marked": curve.marked,
        "stages": list(columns.stages),
        "series": series,
    }


def other_names(columns: MetricColumns) -> list[str]:
    """Return the metrics that no chart shows."""
    drawn = {name for curve in all_curves(columns) for name, _ in curve.names} | {name for name, _ in TIMES}
    return [name for name in columns.names if name not in drawn]


def _times(columns: MetricColumns) -> dict[str, Any] | None:
    """Return the seconds of each part of a training step, as bars."""
    series = []
    for place, (name, label) in enumerate(TIMES):
        for stage in columns.stages:
            column = columns.column(stage, name)
            points = None if column is None else thin(column, MAX_BARS)
            if points is not None:
                series.append({"label": label, "metric": name, "stage": stage, "style": place, **points})
    if not series:
        return None
    return {
        "title": "Where the time went",
        "explanation": "Seconds per training step: playing episodes, learning from them, handing the new weights to "
        "the sampler, and held-out evaluation.",
        "share": False,
        "marked": False,
        "unit": "s",
        "stages": list(columns.stages),
        "series": series,
    }


def seconds_per_step(recent: Mapping[str, Sequence[float]]) -> float | None:
    """Return the mean time of the last training steps; None if it is not known."""
    values = [value for value in recent.get("time/step_s", ()) if math.isfinite(value)]
    return sum(values) / len(values) if values else None


def finite_json(value: Any) -> str:
    """Write a value as JSON that every browser reads: no NaN, no infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
