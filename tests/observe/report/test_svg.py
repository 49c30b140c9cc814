import doctest
import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.observe.report import svg
from headrace.observe.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Point,
    Series,
    curve_chart,
    is_noisy,
    panels,
    points,
    round_ticks,
    smooth,
    stacked_chart,
    value_axis,
)


def series(values: list[float], stage: str = "rl", label: str = "v", style: str = "main") -> Series:
    return Series(label=label, style=style, stages={stage: points(enumerate(values, start=1))})


def test_points_average_neighbours_and_drop_what_is_not_finite() -> None:
    made = points([(1, 1.0), (2, 3.0), (3, math.nan), (4, 5.0), (5, 7.0), (6, 9.0)], limit=3)
    assert made == (
        Point(first=1, last=2, value=2.0),
        Point(first=4, last=5, value=6.0),
        Point(first=6, last=6, value=9.0),
    )


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e3), st.integers(2, 8))
def test_ticks_are_round_increasing_and_inside(low: float, share: float, about: int) -> None:
    width = share * max(abs(low), 1e-3)
    high = low + width
    ticks = round_ticks(low, high, about)
    steps = [right - left for left, right in pairwise(ticks)]
    assert len(ticks) >= 2
    assert all(step == pytest.approx(steps[0], rel=1e-3) for step in steps)
    leading = f"{steps[0]:.0e}"[0]
    assert leading in "125"
    assert ticks[0] >= low - 1e-6 * max(abs(low), width)


def test_axes_are_chosen_by_the_values() -> None:
    assert value_axis([0.2, 0.4], share=True).ticks == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert value_axis([0.1, 1.9]).ticks == (0.0, 0.5, 1.0, 1.5, 2.0)  # near zero: from zero
    assert value_axis([41.0, 44.0]).ticks == (41.0, 42.0, 43.0, 44.0)  # far from zero: around the values
    assert value_axis([0.0]).ticks[0] == 0.0
    wide = value_axis([2e-11, 3e-7])
    assert wide.logarithmic
    assert (wide.low, wide.high) == pytest.approx((1e-11, 1e-6))
    assert wide.place(1e-8) == pytest.approx(0.6)  # three of five decades


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30))
@example([100000.0, 100000.0000001])
@example([5e-324, 1e299])
@example([5e-324])
@example([-5e-324, 0.0])
def test_every_value_lies_on_its_axis(values: list[float]) -> None:
    axis = value_axis(values)
    assert len(set(axis.ticks)) == len(axis.ticks) >= 2
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)


@given(st.floats(-10, 10), st.floats(-5, 5), st.integers(3, 60))
def test_smoothing_keeps_a_straight_line(start: float, slope: float, size: int) -> None:
    line = [start + slope * index for index in range(size)]
    assert smooth(line) == pytest.approx(line, abs=1e-9)


def test_smoothing_averages_neighbours() -> None:
    # 5 values: a reach of 2, and less at the ends: 6, (6 + 0 + 3) / 3, (6 + 0 + 3 + 0 + 6) / 5, (3 + 0 + 6) / 3, 6
    assert smooth([6.0, 0.0, 3.0, 0.0, 6.0]) == pytest.approx([6.0, 3.0, 3.0, 3.0, 6.0])


def test_only_a_long_curve_that_goes_up_and_down_is_noisy() -> None:
    assert is_noisy([0.0, 1.0] * 20)
    assert not is_noisy([0.0, 1.0] * 5)
    assert not is_noisy([float(index) for index in range(40)])
    assert not is_noisy([1.0] * 40)


def test_stages_stand_side_by_side_in_the_order_of_the_run() -> None:
    one = Series(label="sampled", style="main", stages={"sft": (), "rl": points([(1, 1.0), (60, 2.0)])})
    two = Series(label="trained", style="second", stages={"sft": points([(1, 1.0), (300, 2.0)]), "rl": ()})
    left, right = panels([one, two])
    assert (left.stage, left.first, left.last) == ("sft", 1, 300)
    assert (right.stage, right.first, right.last) == ("rl", 1, 60)
    assert left.left == LEFT
    assert right.right == pytest.approx(WIDTH - RIGHT)
    assert left.right < right.left
    assert right.right - right.left == pytest.approx(left.right - left.left)


def test_a_curve_goes_from_corner_to_corner() -> None:
    root = ET.fromstring(curve_chart("Up", [series([0.0, 0.5, 1.0])], share=True))
    (line,) = root.findall("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert places == [
        (LEFT, HEIGHT - BOTTOM),
        pytest.approx(((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2), abs=0.1),
        (WIDTH - RIGHT, TOP),
    ]
    assert [title.text for title in root.iter("title")] == ["RL step 1: v 0%", "RL step 2: v 50%", "RL step 3: v 100%"]


def test_a_noisy_curve_is_drawn_faint_with_its_mean_on_top() -> None:
    root = ET.fromstring(curve_chart("Noise", [series([0.0, 1.0] * 20)]))
    assert [line.attrib["class"] for line in root.findall("polyline")] == ["curve raw main rl", "curve main rl"]


def test_bars_are_as_high_as_their_parts_together() -> None:
    parts = [series([1.0, 2.0], label="rollout"), series([3.0, 2.0], label="train", style="second")]
    root = ET.fromstring(stacked_chart("Time", parts))
    bars = [bar for bar in root.iter("rect") if bar.attrib["class"].startswith("bar")]
    heights = [float(bar.attrib["height"]) for bar in bars]
    whole = HEIGHT - TOP - BOTTOM  # the axis goes to 4
    assert heights == pytest.approx([whole / 4, 3 * whole / 4, whole / 2, whole / 2], abs=0.11)
    assert float(bars[1].attrib["y"]) == pytest.approx(TOP, abs=0.11)


def test_labels_are_escaped() -> None:
    drawn = curve_chart('<b> & "x"', [series([1.0, 2.0], label="<script>alert(1)</script>")])
    ET.fromstring(drawn)
    assert "<script" not in drawn
    assert "<b>" not in drawn


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(svg).failed == 0
