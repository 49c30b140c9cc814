"""Follow one run through its folder: metrics, activities, episodes, warnings; and describe it for the page.

Nothing is written into the folder, and no process of the run is asked: the run may be on another machine.
"""

import contextlib
import hashlib
import math
import os
import re
import threading
import time
import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.observe.activity import KEPT_LINES
from headrace.observe.comparison.compared import LAST_STEPS, NOISY, final_figures, is_share
from headrace.observe.dashboard.advice import RECENT, advise
from headrace.observe.dashboard.alert_history import alert_rules, past_alerts
from headrace.observe.dashboard.curves import MetricColumns, drawn_charts, seconds_per_step
from headrace.observe.dashboard.episode_index import EpisodeIndex
from headrace.observe.dashboard.lanes import ActivityLine, parse_lines
from headrace.observe.dashboard.tail import TailedFile
from headrace.observe.report.run_report import (
    STAGE_NAMES,
    Bar,
    headline,
    held_out_losses,
    held_out_rewards,
    reward_findings,
)
from headrace.observe.report.subject import subjects
from headrace.observe.report.svg import number
from headrace.observe.run_folder import RunFolder
from headrace.observe.run_list import ListedRun, describe_run
from headrace.observe.run_warnings import read_warnings
from headrace.observe.sinks.jsonl import MetricRecord
from headrace.observe.sinks.progress import EVAL, EVAL_REWARD

DESCRIBE_EVERY_S = 2.0
MAX_LOG, MAX_LOG_LINES = 128 << 10, 40  # of log.txt that are read, and warnings that are shown
MAX_CONFIG = 1 << 20
SLICE_S = 0.4  # of reading metrics before an answer is given with what there is
HEADLINE = (EVAL, EVAL_REWARD, "eval/loss", "reward/min", "reward/max", "credit/dead_groups")


class FollowedRun:
    """A run folder, and how far it was read. Thread-safe."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self.folder = path, RunFolder(path=path)
        self._lock = threading.Lock()
        self._metrics, self.columns = TailedFile(self.folder.metrics), MetricColumns()
        self._activity = TailedFile(self.folder.activity)
        self._lines: deque[ActivityLine] = deque(maxlen=2 * KEPT_LINES)
        self._described: tuple[float, ListedRun] | None = None
        self._moved_s: float | None = None  # when the folder was last seen to change, by our own clock
        self._was_read = False  # to its end, once
        self._charts: tuple[int, list[dict[str, Any]]] | None = None
        digest = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:24]
        self.index = EpisodeIndex(self.folder.rollouts, cache / f"{digest}.sqlite")
        self.restarts = 0  # times that metrics.jsonl was cut or replaced
        self.asked_s = time.monotonic()

    def close(self) -> None:
        self.index.close()

    @property
    def version(self) -> str:
        """Changes whenever curves do."""
        return f"{self.restarts}-{self.columns.num_records}"

    def refresh(self, *, slice_s: float = SLICE_S) -> None:
        """Read what has come since, for as long as a slice lasts."""
        deadline_s = time.monotonic() + slice_s
        with self._lock:
            self.asked_s = time.monotonic()
            grew = False
            while True:
                new = self._metrics.read()
                if new.restarted:
                    self.columns, self._charts = MetricColumns(), None
                    self.restarts += 1
                self.columns.add(new.lines)
                grew = grew or bool(new.lines)
                if not new.has_more or time.monotonic() > deadline_s:
                    break
            activity = self._activity.read()
            if activity.restarted:
                self._lines.clear()
            self._lines.extend(parse_lines(activity.lines))
            if (grew or activity.lines) and self._was_read:
                self._moved_s = time.monotonic()
            self._was_read = self._was_read or self._metrics.progress >= 1.0

    @property
    def reading(self) -> float:
        """The share of metrics.jsonl that was read."""
        return self._metrics.progress

    def activity(self) -> list[ActivityLine]:
        with self._lock:
            return list(self._lines)

    def charts(self) -> list[dict[str, Any]]:
        """Return the thinned curves; made again only when there are new records."""
        with self._lock:
            if self._charts is None or self._charts[0] != self.columns.num_records:
                self._charts = (self.columns.num_records, drawn_charts(self.columns))
            return self._charts[1]

    def described(self) -> ListedRun:
        """Return the run as `headrace runs` lists it, at most a few seconds old."""
        with self._lock:
            if self._described is None or time.monotonic() - self._described[0] > DESCRIBE_EVERY_S:
                self._described = (time.monotonic(), describe_run(self.path))
            return self._described[1]

    def config(self) -> dict[str, Any]:
        """Return config.toml; empty if it cannot be read now."""
        try:
            return tomllib.loads(self.config_text())
        except (tomllib.TOMLDecodeError, RecursionError):
            return {}

    def config_text(self) -> str:
        try:
            with open(self.folder.config, "rb", opener=_open_no_link) as file:
                return file.read(MAX_CONFIG).decode("utf-8", "replace")
        except OSError:
            return ""

    def shown_config(self) -> str:
        """Return config.toml for readers: addresses of webhooks, which are secrets, are left out."""
        return re.sub(
            r"""(webhook\s*=\s*)(?:"(?!env:)[^"\n]*"|'(?!env:)[^'\n]*')""", r'\1"(hidden)"', self.config_text()
        )

    def silent_s(self) -> float | None:
        """Return for how long the folder has not moved: by our own clock once it moved, before that by its files'."""
        if self._moved_s is not None:
            return time.monotonic() - self._moved_s
        times = []
        for path in (self.folder.activity, self.folder.metrics):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(0.0, time.time() - max(times)) if times else None

    def overview(self) -> dict[str, Any]:
        """Describe the run: where it stands, its result so far, what to do about it, and what it warned of."""
        listed, config = self.described(), self.config()
        with self._lock:
            columns = self.columns
            stage = columns.last[0] if columns.last is not None else ""
            recent = columns.tail(stage, RECENT)
            records = _headline_records(columns)
            alerts = past_alerts(columns, alert_rules(config))
        step_s = seconds_per_step(recent)
        left_s = None
        if step_s is not None and listed.state == "running" and listed.steps and listed.step is not None:
            left_s = step_s * max(0, listed.steps - listed.step)
        warnings = []
        with contextlib.suppress(HeadraceError, OSError):
            if self.folder.warnings.exists():
                warnings = [asdict(warning) for warning in read_warnings(self.folder.warnings)]
        bars = headline(records, {})
        planned = listed.steps if listed.stage == stage and listed.state != "finished" else None
        if planned is not None and columns.last is not None and columns.last[1] < planned:
            bars = tuple(_so_far(bar) if bar.style == stage else bar for bar in bars)
        return {
            **asdict(listed),
            "stages": [[name, STAGE_NAMES.get(name, name)] for name in columns.stages],
            "bars": [asdict(bar) for bar in bars],
            "held_out": _held_out(records),
            "figures_now": _figures_now(recent),
            "step_s": step_s,
            "left_s": left_s,
            "silent_s": self.silent_s() if listed.state == "running" else None,
            "advice": [asdict(advice) for advice in advise(recent, config)] if stage == "rl" else [],
            "findings": reward_findings(records),
            "warnings": warnings,
            "alerts": [asdict(alert) for alert in alerts],
            "model": str(_table(config, "model").get("path", "")),
            "about": subjects(config),
            "records": columns.num_records,
            "refused": columns.num_refused,
            "reading": self.reading,
            "version": self.version,
            "index": asdict(self.index.progress),
            "has_activity": bool(self._lines),
        }

    def log_warnings(self) -> list[str]:
        """Return the last warnings and errors of log.txt."""
        try:
            with open(self.folder.log, "rb", opener=_open_no_link) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_LOG))
                content = file.read(MAX_LOG)
        except OSError:
            return []
        lines = content.decode("utf-8", "replace").split("\n")
        return [line for line in lines if " WARNING " in line[:80] or " ERROR " in line[:80]][-MAX_LOG_LINES:]

    def last_figures(self) -> dict[str, tuple[float, bool]]:
        """Return the figures that `headrace compare` compares, each with whether it is a share."""
        with self._lock:
            records = [
                MetricRecord(step=step, stage=stage, values={name: value})
                for stage, named in self.columns.stages.items()
                for name, column in named.items()
                if name in NOISY or name.startswith("eval/")
                for step, value in list(zip(column.steps, column.values, strict=True))[
                    0 if name.startswith("eval/") else -LAST_STEPS :
                ]
            ]
        return {name: (value, is_share(name)) for name, value in final_figures(records).items()}


def _open_no_link(path: str, flags: int) -> int:
    """Open a file whose text is shown; a link in a stranger's folder could lead to any file of this machine."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _headline_records(columns: MetricColumns) -> list[MetricRecord]:
    """Return records of the few metrics that the headline and the findings of the report read."""
    by_place: dict[tuple[str, int], dict[str, float]] = {}
    for stage in columns.stages:
        for name in HEADLINE:
            column = columns.column(stage, name)
            for step, value in zip(column.steps, column.values, strict=True) if column is not None else ():
                by_place.setdefault((stage, step), {})[name] = value
    order = {stage: place for place, stage in enumerate(columns.stages)}
    places = sorted(by_place, key=lambda place: (order[place[0]], place[1]))
    return [MetricRecord(step=step, stage=stage, values=by_place[stage, step]) for stage, step in places]


def _so_far(bar: Bar) -> Bar:
    """Label a result of a stage that is not over: "SFT so far" instead of "After SFT"."""
    name = bar.label.removeprefix("After ")
    return replace(bar, label=f"{name[:1].upper()}{name[1:]} so far")


def _held_out(records: list[MetricRecord]) -> list[str]:
    """Return the sentences of the report about held-out losses, and about rewards where nothing says success."""

    def sentence(what: str, first: str, last: str) -> str:
        return f"{what}: {last}{'' if first == last else f', from {first} when it was first measured'}."

    rewards = [sentence(f"Mean reward on held-out tasks, {stage}", *of) for stage, *of in held_out_rewards(records)]
    return rewards + [sentence(f"Held-out loss of {stage}", *of) for stage, *of in held_out_losses(records)]


_NOW = (
    ("reward/mean", "reward", False),
    ("rollout/success", "success in training", True),
    ("sft/loss", "loss", False),
    ("loss/accuracy", "accuracy", True),
    ("loss/total", "loss", False),
    ("rollout/length_mean", "tokens per episode", False),
    ("perf/sampled_tokens_per_s", "tokens/s sampled", False),
    ("perf/trained_tokens_per_s", "tokens/s trained", False),
)


def _figures_now(recent: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return the newest values of what people watch, with the last ones before them."""
    shown, labels = [], set[str]()
    for name, label, is_percentage in _NOW:
        values = [value for value in recent.get(name, ()) if math.isfinite(value)]
        if not values or label in labels:
            continue
        labels.add(label)
        value = values[-1]
        text = f"{100 * value:.1f}".removesuffix(".0") + " %" if is_percentage else number(float(f"{value:.3g}"))
        shown.append({"label": label, "text": text, "recent": values})
    return shown[:6]


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}
