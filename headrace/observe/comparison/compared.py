"""Compute the comparison of several arms: final figures, configurations' differences, evaluation and episodes."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.algo.estimates.intervals import Interval, t_interval
from headrace.observe.comparison.arms import Arm
from headrace.observe.comparison.held_out import (
    FinalAnswer,
    HeldOutComparison,
    compare_held_out,
    episodes_by_task,
    task_id,
)
from headrace.observe.report.charts import TIMES, stages_of
from headrace.observe.report.episodes import ComparisonRow, conversation
from headrace.observe.rollouts.records import EpisodeRecord
from headrace.observe.sinks.jsonl import MetricRecord
from headrace.observe.sinks.progress import EVAL

LAST_STEPS = 10  # training steps over which a noisy figure is averaged
NOISY = ("reward/mean", "rollout/success", "rollout/length_mean", "loss/total", "loss/entropy", "train/grad_norm")
MAX_ROWS = 12  # tasks whose episodes are shown
UNSET = "–"
OWN = ("run.name", "run.folder")  # keys that are in a run's label already


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """A final figure of every arm: the mean over its runs, with an interval if there are several."""

    name: str
    arms: tuple[Interval | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """A key that is not the same everywhere, with the values of each arm as TOML would have them."""

    key: str
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """All that is said of the arms, beside their curves."""

    arms: tuple[Arm, ...]
    figures: tuple[FigureRow, ...]
    differences: tuple[ConfigDifference, ...]
    held_out: HeldOutComparison
    rows: tuple[ComparisonRow, ...]  # the same tasks' episodes
    tally: tuple[tuple[str, int], ...]  # (which arms solved a task, number of tasks)
    notes: tuple[str, ...]


def compare_arms(arms: Sequence[Arm], final_answer: FinalAnswer, *, tasks: Sequence[str] = ()) -> ArmComparison:
    """Compare arms, each with the first; `tasks` are ids of tasks whose episodes are shown in any case."""
    assert arms
    rows, tally = side_by_side(arms, tasks)
    return ArmComparison(
        arms=tuple(arms),
        figures=_figure_rows(arms),
        differences=tuple(
            row for row in config_differences([[run.config for run in arm.runs] for arm in arms]) if row.key not in OWN
        ),
        held_out=compare_held_out(arms, final_answer),
        rows=rows,
        tally=tally,
        notes=tuple(f"{run.name}: {note}" for arm in arms for run in arm.runs for note in run.notes),
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def final_figures(records: Sequence[MetricRecord]) -> dict[str, float]:
    """Return what a run came to: its steps, its last evaluation, and the means of the last steps of noisy figures,
    or of all steps of a shorter run."""
    figures: dict[str, float] = {}
    for stage in stages_of(records):
        figures[f"{stage} steps"] = float(max(record.step for record in records if record.stage == stage))
    for name in sorted({name for record in records for name in record.values if name.startswith("eval/")}):
        figures[name] = next(record.values[name] for record in reversed(records) if name in record.values)
    evaluations = [record.values[EVAL] for record in records if EVAL in record.values]
    if len(evaluations) > 1:
        figures[f"{EVAL}, best"] = max(evaluations)
    for name in NOISY:
        having = [record for record in records if name in record.values]
        values = [record.values[name] for record in having if record.stage == having[-1].stage]
        last = [value for value in values[-LAST_STEPS:] if math.isfinite(value)]
        if last:
            figures[f"{name}, last {LAST_STEPS} steps"] = math.fsum(last) / len(last)
    seconds = math.fsum(record.values.get(name, 0.0) for record in records for name, _ in TIMES)
    return figures | ({"time": seconds} if seconds else {})


def _figure_rows(arms: Sequence[Arm]) -> tuple[FigureRow, ...]:
    figures = [[final_figures(run.records) for run in arm.runs] for arm in arms]
    names = dict.fromkeys(name for of_arm in figures for of_run in of_arm for name in of_run)
    rows = []
    for name in names:
        values = [[of_run[name] for of_run in of_arm if name in of_run] for of_arm in figures]
        rows.append(FigureRow(name=name, arms=tuple(_mean(name, one) if one else None for one in values)))
    return tuple(rows)


def is_share(name: str) -> bool:
    """Tell whether a figure is a share, which people read as a percentage."""
    return re.match(r"eval/(pass@|accuracy)|rollout/success", name) is not None


def _mean(name: str, values: Sequence[float]) -> Interval:
    """Return the mean over runs with its interval, which does not leave the range of a share."""
    interval = t_interval(values)
    if not is_share(name) or not math.isfinite(interval.low):
        return interval
    return replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high))


# --- configurations --------------------------------------------------------------------------------------------------


def config_differences(configs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[ConfigDifference, ...]:
    """List the keys that differ between runs, in the order of the first; an arm of several runs lists its values."""
    flat = [[dict(_leaves(config)) for config in of_arm] for of_arm in configs]
    keys = dict.fromkeys(key for of_arm in flat for of_run in of_arm for key in of_run)
    differences = []
    for key in keys:
        values = [list(dict.fromkeys(of_run.get(key, UNSET) for of_run in of_arm)) for of_arm in flat]
        if len({value for of_arm in values for value in of_arm}) > 1:
            differences.append(ConfigDifference(key=key, arms=tuple(", ".join(of_arm) for of_arm in values)))
    return tuple(differences)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("rl.rewards[0].fn", '"math"') for every value that is no table."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{key}[{place}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, default=str)


# --- episodes --------------------------------------------------------------------------------------------------------


def side_by_side(
    arms: Sequence[Arm], tasks: Sequence[str] = ()
) -> tuple[tuple[ComparisonRow, ...], tuple[tuple[str, int], ...]]:
    """Choose tasks that all arms have played: those asked for, then the first of each outcome, first those on which
    the arms differ. Returns the rows of their first episodes, and how often each outcome is."""
    played = [episodes_by_task(arm.runs[0].episodes) for arm in arms]
    common = [key for key in played[0] if all(key in of_arm for of_arm in played[1:])]
    outcomes: dict[tuple[bool, ...], list[str]] = {}
    for key in common:
        solved = tuple(_solved(of_arm[key]) * 2 > len(of_arm[key]) for of_arm in played)
        outcomes.setdefault(solved, []).append(key)
    ordered = sorted(outcomes, key=lambda solved: (len(set(solved)) == 1, solved))
    judged = any(line.verdict is not None for of_arm in played for lines in of_arm.values() for line in lines)
    tally = tuple((_outcome(arms, solved), len(outcomes[solved])) for solved in ordered) if judged else ()
    chosen = [key for key in common if task_id(key) in tasks]
    chosen += [outcomes[solved][0] for solved in ordered if outcomes[solved][0] not in chosen]
    differing = [key for solved in ordered if len(set(solved)) > 1 for key in outcomes[solved][1:]]
    chosen += [key for key in (*differing, *common) if key not in chosen]
    rows = [
        ComparisonRow(
            heading=f"Task {task_id(key)}",
            conversations=tuple(
                conversation(_heading(arm, of_arm[key]), of_arm[key][0])
                for arm, of_arm in zip(arms, played, strict=True)
            ),
        )
        for key in chosen[: max(MAX_ROWS, len(tasks))]
    ]
    return tuple(rows), tally


def _solved(lines: Sequence[EpisodeRecord]) -> int:
    return sum(bool(line.verdict) for line in lines)


def _heading(arm: Arm, lines: Sequence[EpisodeRecord]) -> str:
    label = arm.label if len(arm.runs) == 1 else f"{arm.label}, {arm.runs[0].name}"
    return label if len(lines) == 1 else f"{label}, the first of {len(lines)} ({_solved(lines)} solved)"


def _outcome(arms: Sequence[Arm], solved: Sequence[bool]) -> str:
    names = [arm.label for arm, ok in zip(arms, solved, strict=True) if ok]
    if len(names) == len(arms):
        return "solved by all" if len(arms) > 1 else "solved"
    return f"solved by {', '.join(names)} alone" if names else "not solved"
