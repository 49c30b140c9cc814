"""Show a comparison on a terminal as tables, and as JSON for programs. Pure but for rich."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.algo.estimates.intervals import Interval
from headrace.algo.estimates.paired_test import PairedDifference
from headrace.algo.estimates.task_scores import REWARD
from headrace.observe.comparison.compared import UNSET, ArmComparison, is_share
from headrace.observe.report.svg import number, percent
from headrace.observe.sinks.progress import duration
from headrace.observe.viewer.safe_text import one_line

MAX_VALUE = 60  # characters of a value of the configuration


def tables(comparison: ArmComparison) -> list[Table]:
    """Return the tables that have rows: final figures, differences of the configurations, evaluation, paired test."""
    labels = [arm.label for arm in comparison.arms]
    held_out = comparison.held_out
    drawn = [
        _table("Final figures", labels, [(row.name, figure_cells(row.name, row.arms)) for row in comparison.figures]),
        _table("Configuration", labels, [(row.key, row.arms) for row in comparison.differences]),
        _table(
            f"Held-out tasks ({', '.join(map(str, dict.fromkeys(held_out.tasks)))})",
            labels,
            [(row.name, [score_text(row.name, one) for one in row.arms]) for row in held_out.rows],
        ),
        _paired_table(comparison),
    ]
    return [table for table in drawn if table.row_count]


def evaluation_tables(comparison: ArmComparison) -> list[Table]:
    """Return the tables of an evaluation alone."""
    return [table for table in tables(comparison) if str(table.title).startswith(("Held-out", "Paired"))]


def sentences(comparison: ArmComparison) -> list[str]:
    """Say what the tables leave open: no votes, no common tasks, other seeds, and what could not be read."""
    held_out, several = comparison.held_out, len(comparison.arms) > 1
    found = []
    evaluations = {arm.label: "/".join(sorted({run.evaluation for run in arm.runs})) for arm in comparison.arms}
    if len(set(filter(None, evaluations.values()))) > 1:
        stages = ", ".join(f"{label}: {stage}" for label, stage in evaluations.items() if stage)
        found.append(f"The last evaluations are of different stages (base: before training): {stages}.")
    if max(held_out.samples) > 1 and not held_out.votes:
        found.append("The tasks have no final answer to vote on (a column answer or ground_truth): there is no maj@k.")
    if several and not held_out.common and any(held_out.tasks):
        found.append("The arms have no held-out task in common, so nothing is paired.")
    if held_out.same_id_only:
        found.append(f"{held_out.same_id_only} tasks have the same id but other contents, and are not paired.")
    if several and held_out.common and not held_out.same_seeds:
        found.append("The tasks are the same and the seeds of their episodes differ (eval.seed or eval.samples).")
    return [*found, *(f"Left out: {note}" for note in comparison.notes)]


def figure_cells(name: str, arms: Sequence[Interval | None]) -> list[str]:
    """Format a final figure of every arm."""
    form = duration if name == "time" else percent if is_share(name) else number
    return [UNSET if one is None else _with_bounds(one, form) for one in arms]


def score_text(name: str, interval: Interval | None) -> str:
    """Format a score with its interval: "62.5% [49, 74.1]", "0.25 [0.1, 0.4]"."""
    return UNSET if interval is None else _with_bounds(interval, number if name == REWARD else percent)


def _with_bounds(interval: Interval, form: Any) -> str:
    value = str(form(interval.value))
    if not math.isfinite(interval.low) or interval.low == interval.high:
        return value
    return f"{value} [{str(form(interval.low)).removesuffix('%')}, {str(form(interval.high)).removesuffix('%')}]"


def difference_cells(name: str, paired: PairedDifference) -> list[str]:
    """Format a paired difference: value, interval, p, tasks that became better, worse or stayed."""
    scale, unit = (1.0, "") if name == REWARD else (100.0, " points")
    difference = paired.difference
    bounds = UNSET
    if math.isfinite(difference.low):
        bounds = f"[{_signed(scale * difference.low)}, {_signed(scale * difference.high)}]"
    same = difference.count - paired.better - paired.worse
    return [
        f"{_signed(scale * difference.value)}{unit}",
        bounds,
        f"{paired.p_value:.3f}" if paired.p_value >= 0.001 else f"{paired.p_value:.1g}",
        f"{paired.better} / {paired.worse} / {same}",
    ]


PAIRED_COLUMNS = ("", "score", "difference", "95 %", "p", "tasks better / worse / same")


def paired_rows(comparison: ArmComparison) -> list[tuple[str, ...]]:
    """List the paired differences of every arm but the first, as texts under PAIRED_COLUMNS."""
    return [
        (arm.label, row.name, *difference_cells(row.name, paired))
        for index, arm in enumerate(comparison.arms)
        for row in comparison.held_out.rows
        if (paired := row.paired[index]) is not None
    ]


def _signed(value: float) -> str:
    return f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.3g}"


def _paired_table(comparison: ArmComparison) -> Table:
    title = f"Paired with {one_line(comparison.arms[0].label, MAX_VALUE)}, on the same tasks"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in PAIRED_COLUMNS:
        table.add_column(name, justify="left" if name in ("", "score") else "right", overflow="fold")
    for row in paired_rows(comparison):
        table.add_row(*(_cell(text) for text in row))
    return table


def _table(title: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for label in labels:
        table.add_column(_cell(label), justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(_cell(name), *(_cell(cell) for cell in cells))
    return table


def _cell(text: str) -> Text:
    return Text(one_line(text, MAX_VALUE))


# --- for programs ----------------------------------------------------------------------------------------------------


def as_json(comparison: ArmComparison) -> dict[str, Any]:
    """Return the comparison as an object: `arms` in order, each with its scores and their paired differences."""
    held_out = comparison.held_out
    return {
        "common_tasks": held_out.common,
        "same_seeds": held_out.same_seeds,
        "differences": {row.key: list(row.arms) for row in comparison.differences},
        "arms": [
            {
                "label": arm.label,
                "runs": [run.name for run in arm.runs],
                "evaluations": [run.evaluation for run in arm.runs],
                "tasks": held_out.tasks[index],
                "samples": held_out.samples[index],
                "figures": {
                    row.name: _bounds(figure) for row in comparison.figures if (figure := row.arms[index]) is not None
                },
                "scores": {row.name: _bounds(score) for row in held_out.rows if (score := row.arms[index]) is not None},
                "paired": {
                    row.name: {
                        **_bounds(paired.difference),
                        "p_value": paired.p_value,
                        "better": paired.better,
                        "worse": paired.worse,
                    }
                    for row in held_out.rows
                    if (paired := row.paired[index]) is not None
                },
            }
            for index, arm in enumerate(comparison.arms)
        ],
    }


def _bounds(interval: Interval) -> dict[str, Any]:
    numbers = {"value": interval.value, "low": interval.low, "high": interval.high}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {**finite, "count": interval.count}
