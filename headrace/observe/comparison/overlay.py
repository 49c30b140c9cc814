"""Draw the curves of several arms over each other, with the report's charts.

An arm of several runs is drawn as the mean of its runs, on the area from the lowest to the highest of them.
"""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from headrace.observe.comparison.arms import Arm
from headrace.observe.report.charts import CURVES, Chart, Curve, other_names, stages_of
from headrace.observe.report.svg import LARGEST, Point, Series, curve_chart, number, percent, points
from headrace.observe.sinks.jsonl import MetricRecord

NUM_STYLES = 8  # colours of arms in the style sheet; beyond them they repeat
MAX_OTHERS = 24


def arm_style(index: int) -> str:
    """Return the CSS class of an arm's colour."""
    return f"arm{index % NUM_STYLES}"


def overlaid_charts(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """Draw every chart of the report that an arm has data for, one curve for each arm."""
    charts = [
        _draw(curve, [name for name, of in curve.names if of == label], arms)
        for curve in CURVES
        for label in dict.fromkeys(label for _, label in curve.names)
    ]
    return tuple(chart for chart in charts if chart is not None)


def other_overlays(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """Draw a plain chart for each of the other metrics."""
    names = other_names([record for arm in arms for run in arm.runs for record in run.records])
    charts = [_draw(Curve(title=name, names=((name, name),), explanation=""), [name], arms) for name in names]
    return tuple(chart for chart in charts if chart is not None)[:MAX_OTHERS]


def _draw(curve: Curve, names: Sequence[str], arms: Sequence[Arm]) -> Chart | None:
    """Draw the first of these metrics that an arm has, for all arms; returns None if there is none."""
    series = [_series(curve, names, arm, index) for index, arm in enumerate(arms)]
    present = [one for one in series if one is not None]
    if not present:
        return None
    form = percent if curve.share else number
    label = next(label for name, label in curve.names if name in names)
    several = len({label for _, label in curve.names}) > 1
    return Chart(
        title=f"{curve.title}: {label}" if several else curve.title,
        explanation=curve.explanation,
        svg=Markup(curve_chart(curve.title, present, share=curve.share)),
        change=" · ".join(form(one.values[-1]) for one in present) if len(present) <= 4 else "",
        legend=tuple((one.style, one.label) for one in present),
    )


def _series(curve: Curve, names: Sequence[str], arm: Arm, index: int) -> Series | None:
    stages: dict[str, tuple[Point, ...]] = {}
    bounds: dict[str, tuple[tuple[Point, ...], tuple[Point, ...]]] = {}
    records = [record for run in arm.runs for record in run.records]
    for stage in [curve.stage] if curve.stage is not None else stages_of(records):
        by_step = values_by_step([run.records for run in arm.runs], names, stage)
        stages[stage] = points((step, math.fsum(values) / len(values)) for step, values in by_step.items())
        if len(arm.runs) > 1 and stages[stage]:
            sides = [points((step, side(values)) for step, values in by_step.items()) for side in (min, max)]
            bounds[stage] = (sides[0], sides[1])
    if not any(stages.values()):
        return None
    return Series(label=arm.label, style=arm_style(index), stages=stages, marked=curve.marked, bounds=bounds)


def values_by_step(
    runs: Sequence[Sequence[MetricRecord]], names: Sequence[str], stage: str
) -> Mapping[int, list[float]]:
    """Collect the values of all runs at each step, of the first of these metrics that a record has."""
    by_step: dict[int, list[float]] = {}
    for records in runs:
        for record in records:
            value = next((record.values[name] for name in names if name in record.values), None)
            if record.stage == stage and value is not None and abs(value) < LARGEST:
                by_step.setdefault(record.step, []).append(value)
    return dict(sorted(by_step.items()))
