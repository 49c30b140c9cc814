"""What every metric sink promises (see `headrace.protocols.MetricSink`), on every implementation."""

import math
from pathlib import Path

import numpy as np
import pytest

from contracts.implementations import SINKS, SinkCase


@pytest.fixture(params=SINKS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> SinkCase:
    chosen: SinkCase = request.param
    return chosen


def test_records_come_back_in_order(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    sink.log(0, {"loss/total": 1.5, "rollout/reward": 0.25})
    sink.log(0, {"eval/pass_1": 0.5})
    sink.log(1, {"loss/total": 0.1 + 0.2})
    sink.close()
    assert case.read(sink, tmp_path) == [
        (0, {"loss/total": 1.5, "rollout/reward": 0.25}),
        (0, {"eval/pass_1": 0.5}),
        (1, {"loss/total": 0.30000000000000004}),
    ]


def test_the_callers_mapping_is_not_kept(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    values = {"loss/total": 1.0}
    sink.log(3, values)
    values["loss/total"] = 2.0
    values["loss/other"] = 3.0
    sink.close()
    assert case.read(sink, tmp_path) == [(3, {"loss/total": 1.0})]


def test_numbers_that_are_not_finite_are_kept(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    sink.log(0, {"loss/total": math.nan, "loss/grad_norm": math.inf, "loss/low": -math.inf})
    sink.close()
    [(step, values)] = case.read(sink, tmp_path)
    assert step == 0
    assert math.isnan(values["loss/total"])
    assert (values["loss/grad_norm"], values["loss/low"]) == (math.inf, -math.inf)


def test_other_kinds_of_numbers_become_floats(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    sink.log(2, {"rollout/tokens": 7, "loss/total": np.float32(0.5), "rollout/truncated": True})
    sink.close()
    assert case.read(sink, tmp_path) == [(2, {"rollout/tokens": 7.0, "loss/total": 0.5, "rollout/truncated": 1.0})]


def test_nothing_logged_is_nothing_read_and_closing_twice_is_harmless(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    sink.close()
    sink.close()
    assert case.read(sink, tmp_path) == []
