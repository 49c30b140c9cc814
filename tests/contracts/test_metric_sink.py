"""What every metric sink promises (see `headrace.protocols.MetricSink`), on every implementation."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from support.implementations import SINKS, Record, SinkCase


@pytest.fixture(params=SINKS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> SinkCase:
    chosen: SinkCase = request.param
    return chosen


def logged(case: SinkCase, folder: Path, *calls: tuple[int, Mapping[str, float]]) -> list[Record]:
    """What comes back after these calls of `log`, without its order where the sink keeps none."""
    sink = case.open(folder)
    for step, values in calls:
        sink.log(step, values)
    sink.close()
    records = case.read(sink, folder)
    return records if case.ordered else sorted(records)


def expect(case: SinkCase, *records: Record) -> list[Record]:
    rounded = [(step, name, float(case.precision(value))) for step, name, value in records]
    return rounded if case.ordered else sorted(rounded)


def test_records_come_back_in_order(case: SinkCase, tmp_path: Path) -> None:
    records = logged(
        case,
        tmp_path,
        (0, {"loss/total": 1.5, "rollout/reward": 0.25}),
        (0, {"eval/pass_1": 0.5}),
        (1, {"loss/total": 0.1 + 0.2}),
    )
    assert records == expect(
        case,
        (0, "loss/total", 1.5),
        (0, "rollout/reward", 0.25),
        (0, "eval/pass_1", 0.5),
        (1, "loss/total", 0.30000000000000004),
    )


def test_the_callers_mapping_is_not_kept(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    values = {"loss/total": 1.0}
    sink.log(3, values)
    values["loss/total"] = 2.0
    values["loss/other"] = 3.0
    sink.close()
    assert case.read(sink, tmp_path) == [(3, "loss/total", 1.0)]


def test_numbers_that_are_not_finite_are_kept(case: SinkCase, tmp_path: Path) -> None:
    records = logged(case, tmp_path, (4, {"a/nan": math.nan, "b/inf": math.inf, "c/low": -math.inf}))
    (_, first, nan), *others = records
    assert first == "a/nan"
    assert math.isnan(nan)
    assert others == [(4, "b/inf", math.inf), (4, "c/low", -math.inf)]


def test_other_kinds_of_numbers_become_floats(case: SinkCase, tmp_path: Path) -> None:
    records = logged(case, tmp_path, (2, {"a/tokens": 7, "b/total": np.float32(0.5), "c/truncated": True}))
    assert records == [(2, "a/tokens", 7.0), (2, "b/total", 0.5), (2, "c/truncated", 1.0)]


def test_nothing_logged_is_nothing_read_and_closing_twice_is_harmless(case: SinkCase, tmp_path: Path) -> None:
    sink = case.open(tmp_path)
    sink.close()
    sink.close()
    assert case.read(sink, tmp_path) == []
