"""Charts of how rollouts flowed: they say what the metrics say, and are absent where there is nothing to say."""

import re
import xml.etree.ElementTree as ET

import pytest

from headrace.observe.report.async_charts import flow_charts, flow_names
from headrace.observe.report.charts import Chart
from headrace.observe.report.run_report import render
from headrace.observe.report.svg import BOTTOM, HEIGHT, TOP
from headrace.observe.sinks.jsonl import MetricRecord

SYNCHRONOUS = {
    "rollout/lag_mean": 0.0,
    "rollout/lag_max": 0.0,
    "histogram/lag_0": 1.0,
    "rollout/running": 0.0,
    "rollout/ready": 0.0,
    "rollout/dropped_stale": 0.0,
    "rollout/drop_share_stale": 0.0,
    "perf/trainer_idle": 0.7,
    "perf/sampler_idle": 0.3,
    "staleness/effective_share": 1.0,
}
ASYNCHRONOUS = SYNCHRONOUS | {
    "rollout/lag_mean": 1.0,
    "rollout/lag_max": 4.0,
    "histogram/lag_0": 0.5,
    "histogram/lag_2": 0.25,
    "histogram/lag_4": 0.125,
    "histogram/lag_16_plus": 0.125,
    "rollout/running": 3.0,
    "rollout/ready": 1.0,
    "rollout/dropped_stale": 2.0,
    "rollout/dropped_failed": 1.0,
    "rollout/filtered_reward_spread": 1.0,
    "rollout/dropped_timeout": 0.0,
    "rollout/dropped_surplus": 1.0,
}


def record(step: int, values: dict[str, float], stage: str = "rl") -> MetricRecord:
    return MetricRecord(step=step, stage=stage, values=values)


def heights(chart: Chart) -> dict[str, list[float]]:
    """Of the bars of each style, as shares of the plot."""
    found: dict[str, list[float]] = {}
    for bar in ET.fromstring(str(chart.svg)).iter("rect"):
        if bar.attrib["class"].startswith("bar "):
            height = float(bar.attrib["height"]) / (HEIGHT - TOP - BOTTOM)
            found.setdefault(bar.attrib["class"].removeprefix("bar "), []).append(height)
    return found


def test_a_synchronous_run_without_drops_has_none_of_these_charts() -> None:
    assert flow_charts([record(1, SYNCHRONOUS), record(2, SYNCHRONOUS)]) == ()
    assert flow_charts([]) == ()


def test_drops_alone_are_shown_in_a_synchronous_run() -> None:
    charts = flow_charts([record(1, SYNCHRONOUS | {"rollout/dropped_failed": 2.0})])
    assert [(chart.title, chart.change) for chart in charts] == [("Groups given up", "2 in all")]


def test_an_asynchronous_run_has_all_of_them() -> None:
    charts = {chart.title: chart for chart in flow_charts([record(1, SYNCHRONOUS), record(2, ASYNCHRONOUS)])}
    assert list(charts) == [
        "Age of the tokens",
        "Age of the tokens, in shares",
        "Groups in flight",
        "Groups given up",
        "Who waits for whom",
        "What stale tokens are worth",
    ]
    assert charts["Age of the tokens"].change == "0 → 1"
    assert all(chart.explanation.endswith(".") for chart in charts.values())


def test_the_histogram_adds_up_to_one_and_puts_the_old_together() -> None:
    histogram = flow_charts([record(2, ASYNCHRONOUS)])[1]
    assert [label for _, label in histogram.legend] == ["0 versions", "2", "3 or more"]  # nothing had lag 1
    # the axis goes to 1: a half, a quarter and an eighth twice
    assert heights(histogram) == {
        "main": pytest.approx([0.5], abs=0.002),
        "second": pytest.approx([0.25], abs=0.002),
        "third": pytest.approx([0.25], abs=0.002),
    }
    assert "0 versions 50%, 2 25%, 3 or more 25%" in str(histogram.svg)


def test_drops_are_sorted_by_number_and_the_rest_is_one_part() -> None:
    drops = flow_charts([record(1, ASYNCHRONOUS), record(2, ASYNCHRONOUS)])[3]
    assert [label for _, label in drops.legend] == ["stale", "failed", "surplus", "filter: reward spread"]
    assert drops.change == "10 in all"
    more = ASYNCHRONOUS | {"rollout/dropped_cancelled": 1.0}
    last = flow_charts([record(1, more)])[3].legend[-1][1]
    assert last == "surplus, filter: reward spread"


def test_groups_in_flight_stand_on_top_of_each_other() -> None:
    flight = flow_charts([record(1, ASYNCHRONOUS)])[2]
    assert heights(flight) == {"main": pytest.approx([0.25], abs=0.002), "second": pytest.approx([0.75], abs=0.002)}


def test_the_page_has_them_and_does_not_repeat_their_metrics() -> None:
    records = [record(1, ASYNCHRONOUS | {"reward/mean": 0.5, "reward/own": 0.25})]
    page = render(name="run", records=records, comparison=None, config="", facts=(), summary={})
    titles = re.findall(r"<h3>([^<]+)</h3>", page)
    assert titles[0] == "Reward"
    assert "Who waits for whom" in titles
    assert titles[-1] == "reward/own"
    assert not [title for title in titles if title.startswith(("rollout/", "histogram/", "perf/", "staleness/"))]
    assert flow_names(records) == set(ASYNCHRONOUS)
