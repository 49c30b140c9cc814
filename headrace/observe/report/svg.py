"""Draw curves or stacked bars with axes as inline SVG, by pure functions; the page's CSS colours them.

The x axis is training steps. A run has stages that count their steps from one each, and one may be ten times longer
than the other, so stages stand side by side, each with its own scale.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from headrace.printable import visible

WIDTH, HEIGHT = 480.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 24.0, 40.0
STAGE_GAP = 14.0
MAX_POINTS = 200  # per series and stage; beyond it, neighbours are averaged
MAX_BARS = 48
LARGEST = 1e300  # larger values, infinities and NaN are not drawn
SMOOTH_FROM = 24  # a curve of fewer points is drawn as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The mean of a value over the training steps `first` to `last` (usually one step)."""

    first: int
    last: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve, or a part of stacked bars."""

    label: str
    style: str  # CSS class
    stages: Mapping[str, tuple[Point, ...]]  # points by stage, in the order of the run; a stage may have none
    marked: bool = False  # draw every point
    # bounds of each point by stage, (lows, highs) beside `stages`; a stage without them has no area around its curve
    bounds: Mapping[str, tuple[tuple[Point, ...], tuple[Point, ...]]] = field(default_factory=dict)

    @property
    def values(self) -> list[float]:
        return [point.value for points in self.stages.values() for point in points]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Ticks and the position of a value along them, from 0 (`low`) to 1 (`high`)."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The part of the x axis that belongs to one stage."""

    stage: str
    first: int
    last: int
    left: float
    right: float

    def place(self, step: float) -> float:
        if self.last == self.first:
            return (self.left + self.right) / 2
        return self.left + (step - self.first) / (self.last - self.first) * (self.right - self.left)


def points(steps: Iterable[tuple[int, float]], *, limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """Return at most `limit` points: values that no axis can hold are left out, equal runs of neighbours averaged."""
    finite = [(step, value) for step, value in steps if abs(value) < LARGEST]
    size = max(1, math.ceil(len(finite) / limit))
    runs = [finite[start : start + size] for start in range(0, len(finite), size)]
    return tuple(
        Point(first=run[0][0], last=run[-1][0], value=math.fsum(value for _, value in run) / len(run)) for run in runs
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Average each value with as many neighbours on either side, over about a sixth of the curve and fewer at its ends.

    Windows are symmetric, so a straight line stays as it is.
    """
    reach, last = max(2, len(values) // 12), len(values) - 1
    reaches = [min(reach, index, last - index) for index in range(len(values))]
    return [fmean(values[index - near : index + near + 1]) for index, near in enumerate(reaches)]


def is_noisy(values: Sequence[float]) -> bool:
    """Return whether a curve is long enough to be smoothed and moves up and down over three times its range."""
    travelled = math.fsum(abs(right - left) for left, right in pairwise(values))
    return len(values) >= SMOOTH_FROM and travelled > 3.0 * (max(values) - min(values))


def value_axis(values: Sequence[float], *, share: bool = False) -> Axis:
    """Choose an axis: 0 to 1 for a share, logarithmic when positive values span more than three decades, else round
    ticks around the values, down to zero when they come near it."""
    assert values
    low, high = min(values), max(values)
    if share and low >= 0.0 and high <= 1.0:
        return Axis(low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    if max(abs(low), abs(high)) < 1.0 / LARGEST:  # too small to be divided
        low = high = 0.0
    if low > 1.0 / LARGEST and high > 1000.0 * low:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = math.ceil(len(decades) / 6)
        ticks = tuple(10.0**decade for decade in decades[::every])
        return Axis(low=10.0 ** decades[0], high=10.0 ** decades[-1], ticks=ticks, logarithmic=True)
    if 0.0 <= low <= 0.5 * high:
        low = 0.0
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # constant, but for rounding
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    ticks = round_ticks(low, high, 4)
    step = ticks[1] - ticks[0]
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low=low, high=high, ticks=round_ticks(low, high, 4))


def round_ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Return multiples of 1, 2 or 5 times a power of ten around [low, high]: at least two, about `about` intervals."""
    assert high - low > 1e-6 * max(abs(low), abs(high)), "ticks would differ by less than they can show"
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = max(math.floor(high / step + 1e-9), first + 1)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def panels(series: Sequence[Series]) -> tuple[Panel, ...]:
    """Lay out stages with data side by side, in the order of the run and of equal width."""
    spans: dict[str, tuple[int, int]] = {}
    for stage in dict.fromkeys(stage for curve in series for stage in curve.stages):
        all_points = [point for curve in series for point in curve.stages.get(stage, ())]
        if all_points:
            spans[stage] = (min(point.first for point in all_points), max(point.last for point in all_points))
    pitch = (WIDTH - LEFT - RIGHT + STAGE_GAP) / max(1, len(spans))
    lefts = [LEFT + index * pitch for index in range(len(spans))]
    return tuple(
        Panel(stage=stage, first=first, last=last, left=left, right=left + pitch - STAGE_GAP)
        for left, (stage, (first, last)) in zip(lefts, spans.items(), strict=True)
    )


def number(value: float) -> str:
    """Format a short readable number.

    >>> [number(value) for value in (0.0, 0.25, 1236.7, 0.00012, 3e-9, 12.0, 2.5e7)]
    ['0', '0.25', '1237', '0.00012', '3e-9', '12', '2.5e7']
    """
    if value == 0.0 or not math.isfinite(value):
        return "0" if value == 0.0 else str(value)
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def percent(value: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.5), percent(0.9375)
    ('50%', '93.8%')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


def curve_chart(title: str, series: Sequence[Series], *, share: bool = False) -> str:
    """Draw curves over training steps, on the areas of their bounds; a long noisy one is drawn faint, with its moving
    mean on top."""
    bounds = [point.value for curve in series for sides in curve.bounds.values() for side in sides for point in side]
    axis = value_axis([*(value for curve in series for value in curve.values), *bounds], share=share)
    form = percent if share else number
    frame = panels(series)
    body = [_frame(frame, axis, form)]
    body += [_area(curve, panel, axis) for curve in series for panel in frame if panel.stage in curve.bounds]
    for curve in series:
        for panel in frame:
            stage_points = curve.stages.get(panel.stage, ())
            if stage_points:
                body.append(_curve(curve, stage_points, panel, axis))
    for curve in series:  # above all curves, so that each point can be hovered over
        for panel in frame:
            body += [_dot(curve, point, panel, axis, form) for point in curve.stages.get(panel.stage, ())]
    return _svg(title, series, form, body)


def stacked_chart(
    title: str, series: Sequence[Series], *, unit: str = " s", form: Callable[[float], str] = number
) -> str:
    """Draw bars of parts on top of each other; all series have the same points (see `points` with MAX_BARS)."""
    frame = panels(series)
    heights = [
        math.fsum(part.stages[panel.stage][index].value for part in series if panel.stage in part.stages)
        for panel in frame
        for index in range(len(_columns(series, panel.stage)))
    ]
    axis = value_axis([0.0, *heights])
    body = [_frame(frame, axis, form)]
    for panel in frame:
        columns = _columns(series, panel.stage)
        pitch = (panel.right - panel.left) / len(columns)
        for index, column in enumerate(columns):
            parts = [(part, part.stages[panel.stage][index].value) for part in series if panel.stage in part.stages]
            tip = f"{_steps(column)}: " + ", ".join(f"{part.label} {form(value)}{unit}" for part, value in parts)
            bars, floor = [], 0.0
            for part, value in parts:
                bottom, top = _y(axis, floor), _y(axis, floor + value)
                floor += value
                bars.append(
                    f'<rect class="bar {part.style}" x="{panel.left + index * pitch + 0.1 * pitch:.1f}" y="{top:.1f}" '
                    f'width="{0.8 * pitch:.1f}" height="{bottom - top:.1f}"/>'
                )
            middle = panel.left + (index + 0.5) * pitch
            body.append(
                f'<g class="pt" data-x="{middle:.1f}" data-y="{_y(axis, floor):.1f}" data-tip="{escape(tip)}">'
                f"<title>{escape(tip)}</title>{''.join(bars)}</g>"
            )
    return _svg(title, series, form, body)


def _columns(series: Sequence[Series], stage: str) -> tuple[Point, ...]:
    return next(part.stages[stage] for part in series if stage in part.stages)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _steps(point: Point) -> str:
    return f"step {point.last}" if point.first == point.last else f"steps {point.first} to {point.last}"


def _frame(frame: Sequence[Panel], axis: Axis, form: Callable[[float], str]) -> str:
    """Draw grid lines with their values, and one band per stage with its steps."""
    parts = []
    for panel in frame:
        style = f"band {escape(panel.stage)}"
        size = f'width="{panel.right - panel.left + 8:.1f}" height="{HEIGHT - TOP - BOTTOM + 6:.1f}"'
        parts.append(f'<rect class="{style}" x="{panel.left - 4:.1f}" y="{TOP - 3:.1f}" {size} rx="3"/>')
        if len(frame) > 1:
            label = escape(panel.stage.upper())
            parts.append(
                f'<text class="stage {escape(panel.stage)}" x="{panel.left:.1f}" y="{TOP - 9:.1f}">{label}</text>'
            )
    for tick in axis.ticks:
        y = _y(axis, tick)
        parts.append(f'<line class="grid" x1="{LEFT - 4:.1f}" x2="{WIDTH - RIGHT + 4:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 10:.1f}" y="{y + 4:.1f}" text-anchor="end">{form(tick)}</text>')
    for panel in frame:
        for step in _step_ticks(panel):
            x = panel.place(step)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20:.1f}" text-anchor="middle">{step}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    note = "training step" + (" (logarithmic scale)" if axis.logarithmic else "")
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 4:.1f}" text-anchor="middle">{note}</text>')
    return "".join(parts)


def _step_ticks(panel: Panel) -> list[int]:
    if panel.first == panel.last:
        return [panel.first]
    about = max(2, int((panel.right - panel.left) / 45))
    ticks = round_ticks(panel.first, panel.last, about)
    return sorted({int(tick) for tick in ticks if tick == int(tick) and panel.first <= tick <= panel.last})


def _curve(series: Series, stage_points: Sequence[Point], panel: Panel, axis: Axis) -> str:
    raw = [(panel.place(point.last), _y(axis, point.value)) for point in stage_points]
    style = f"{escape(series.style)} {escape(panel.stage)}"
    if series.marked or not is_noisy([point.value for point in stage_points]):
        return _polyline(raw, f"curve {style}")
    means = smooth([point.value for point in stage_points])
    mean = [(x, _y(axis, value)) for (x, _), value in zip(raw, means, strict=True)]
    return _polyline(raw, f"curve raw {style}") + _polyline(mean, f"curve {style}")


def _area(series: Series, panel: Panel, axis: Axis) -> str:
    lows, highs = series.bounds[panel.stage]
    places = [(panel.place(point.last), _y(axis, point.value)) for point in (*highs, *reversed(lows))]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polygon class="area {escape(series.style)}" points="{corners}"/>'


def _polyline(places: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _dot(series: Series, point: Point, panel: Panel, axis: Axis, form: Callable[[float], str]) -> str:
    x, y = panel.place(point.last), _y(axis, point.value)
    tip = f"{panel.stage.upper()} {_steps(point)}: {series.label} {form(point.value)}"
    alone = len(series.stages[panel.stage]) == 1
    style = "dot" if series.marked or alone else "dot hidden"
    return (
        f'<g class="pt" data-x="{x:.1f}" data-y="{y:.1f}" data-tip="{escape(tip)}"><title>{escape(tip)}</title>'
        f'<circle class="{style} {escape(series.style)} {escape(panel.stage)}" cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>'
    )


def _svg(title: str, series: Sequence[Series], form: Callable[[float], str], body: Sequence[str]) -> str:
    ends = "; ".join(f"{curve.label} from {form(curve.values[0])} to {form(curve.values[-1])}" for curve in series)
    label = escape(f"{title}: {ends}")
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(body)}</svg>'
    )


def escape(text: str) -> str:
    """Escape markup, and characters that act instead of being displayed: names of metrics are of unknown authors."""
    return html.escape(visible(text))
