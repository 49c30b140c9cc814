"""Columns of metrics and their thinned curves, against the whole records."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.observe.dashboard.curves import MetricColumns, chart_of, drawn_charts, finite_json, other_names, thin
from headrace.observe.report.charts import CURVES, charts
from headrace.observe.sinks.jsonl import read_metrics
from support.made_up_run import make_run


def lines(count: int, **extra: float) -> list[bytes]:
    return [
        json.dumps({"stage": "rl", "step": step, "reward/mean": math.sin(step / 9), **extra}).encode()
        for step in range(1, count + 1)
    ]


def test_a_thinned_curve_has_the_means_and_bounds_of_its_neighbours() -> None:
    columns = MetricColumns()
    columns.add(lines(1000))
    column = columns.column("rl", "reward/mean")
    assert column is not None
    points = thin(column, 100)
    assert points is not None
    values = np.sin(np.arange(1, 1001) / 9).reshape(100, 10)
    assert points["steps"] == list(range(10, 1001, 10))
    assert points["mean"] == pytest.approx(values.mean(axis=1), rel=1e-5)
    assert points["low"] == pytest.approx(values.min(axis=1), rel=1e-5)
    assert points["high"] == pytest.approx(values.max(axis=1), rel=1e-5)


def test_values_that_no_axis_holds_are_left_out_and_every_answer_is_strict_json() -> None:
    columns = MetricColumns()
    columns.add([b'{"stage":"rl","step":1,"reward/mean":"NaN"}', b'{"stage":"rl","step":2,"reward/mean":"Infinity"}'])
    assert drawn_charts(columns) == []
    columns.add([b'{"stage":"rl","step":3,"reward/mean":0.5}', b"[1]", b"{", b'{"stage":"rl"}'])
    assert columns.num_refused == 3
    (chart,) = drawn_charts(columns)
    assert chart["series"][0]["mean"] == [0.5]
    assert json.loads(finite_json(drawn_charts(columns)))


def test_more_values_than_fit_are_thinned_and_evaluations_stay() -> None:
    columns = MetricColumns(max_values=500)
    columns.add(lines(1000, other=1.0))
    columns.add([b'{"stage":"rl","step":1000,"eval/pass@1":0.25}', b'{"stage":"rl","step":1001,"eval/pass@1":0.75}'])
    assert columns.num_values <= 500
    assert columns.keeps_every >= 4
    column = columns.column("rl", "eval/pass@1")
    assert column is not None
    assert list(column.values) == [0.25, 0.75]


def test_the_page_has_the_charts_of_the_report_with_its_words(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    columns = MetricColumns()
    columns.add((run / "metrics.jsonl").read_bytes().splitlines())
    drawn = {chart["title"]: chart for chart in drawn_charts(columns)}
    expected = charts(read_metrics(run / "metrics.jsonl"))
    assert [chart.title for chart in expected if chart.title not in drawn] == []
    for chart in expected:
        assert drawn[chart.title]["explanation"] == chart.explanation
    assert other_names(columns) == ["reward/format"]


def test_a_chart_has_the_stages_in_the_order_of_the_run_whichever_metric_comes_first() -> None:
    columns = MetricColumns()
    columns.add([b'{"stage":"sft","step":1,"perf/trained_tokens_per_s":9.0,"time/train_s":1.0}'])
    columns.add([b'{"stage":"rl","step":1,"perf/sampled_tokens_per_s":2.0,"time/rollout_s":3.0,"time/train_s":1.0}'])
    for title in ("Throughput", "Where the time went"):
        chart = next(chart for chart in drawn_charts(columns) if chart["title"] == title)
        assert chart["series"][0]["stage"] == "rl"
        assert chart["stages"] == ["sft", "rl"]


def test_a_chart_takes_the_first_of_two_names_for_one_thing() -> None:
    supervised = next(curve for curve in CURVES if curve.title == "Loss, supervised")
    columns = MetricColumns()
    columns.add([b'{"stage":"sft","step":1,"sft/loss":2.0,"loss/total":3.0}'])
    chart = chart_of(supervised, columns)
    assert chart is not None
    assert [(one["metric"], one["mean"]) for one in chart["series"]] == [("sft/loss", [2.0])]
