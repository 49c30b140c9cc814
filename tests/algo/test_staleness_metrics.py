"""Figures about the age of tokens, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, tuples

from headrace.algo.staleness_metrics import MAX_NAMED_LAG, lag_metrics, staleness_metrics
from headrace.metrics import EffectiveSampleShare, StdDev, merge_metrics, metric_values
from headrace.types import Datum, float_array, int_array

LOG2 = math.log(2)


def datum(versions: list[float], *, weights: list[float] | None = None, sampler: list[float] | None = None) -> Datum:
    tokens = int_array([0] * len(versions))
    arrays = {
        "versions": versions,
        "weights": weights or [1.0] * len(versions),
        "sampler_logprobs": sampler or [0.0] * len(versions),
    }
    return Datum(inputs=tokens, targets=tokens, arrays={name: float_array(row) for name, row in arrays.items()})


def test_lags_of_heads_tails_and_the_histogram() -> None:
    # at version 5: lags 3, 1 (an untrained token between) and 0, 0
    values = metric_values(lag_metrics([datum([2, -1, 4], weights=[1, 0, 1]), datum([5, 5])], version=5))
    assert values == {
        "rollout/lag_head_mean": 1.5,
        "rollout/lag_tail_mean": 0.5,
        "rollout/lag_share_2_plus": 0.25,
        "histogram/lag_0": 0.5,
        "histogram/lag_1": 0.25,
        "histogram/lag_3": 0.25,
    }


def test_old_tokens_share_a_name_and_nothing_trained_is_no_error() -> None:
    old = metric_values(lag_metrics([datum([0, 20, 40])], version=40))
    assert old[f"histogram/lag_{MAX_NAMED_LAG}_plus"] == pytest.approx(2 / 3)
    assert old["histogram/lag_0"] == pytest.approx(1 / 3)
    nothing = metric_values(lag_metrics([datum([-1, -1], weights=[0, 0])], version=3))
    assert nothing == {"rollout/lag_head_mean": 0.0, "rollout/lag_tail_mean": 0.0, "rollout/lag_share_2_plus": 0.0}


def test_a_token_from_the_future_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="does not exist yet"):
        lag_metrics([datum([6])], version=5)


def test_staleness_by_hand() -> None:
    # w = 1 at lag 0; 2 and 4 at lag 2; the untrained token is NaN for the trainer and counts nowhere
    data = [datum([5, 3, -1], weights=[1, 1, 0]), datum([3], sampler=[-LOG2])]
    scored = [float_array([0, LOG2, math.nan]), float_array([LOG2])]
    values = metric_values(staleness_metrics(data, scored, version=5))
    assert values["staleness/weight_mean"] == pytest.approx(7 / 3)
    assert values["staleness/weight_std"] == pytest.approx(math.sqrt(21 / 3 - (7 / 3) ** 2))
    assert values["staleness/weight_max"] == pytest.approx(4)
    assert values["staleness/effective_share"] == pytest.approx(7**2 / 21 / 3)
    assert values["staleness/effective_share_lag_0"] == pytest.approx(1)
    assert values["staleness/effective_share_lag_2"] == pytest.approx(6**2 / 20 / 2)
    assert values["staleness/log_weight_std"] == pytest.approx(LOG2 * math.sqrt(5 / 3 - 1))
    assert values["staleness/log_weight_std_lag_2"] == pytest.approx(LOG2 / 2)


def test_log_probs_at_the_start_of_the_step_come_before_those_of_the_update() -> None:
    # proximal / sampler is 2 and 1, whatever an update in between has made of the policy
    plain = datum([4, 4])
    data = [replace(plain, arrays={**plain.arrays, "proximal_logprobs": float_array([LOG2, 0])})]
    values = metric_values(staleness_metrics(data, [float_array([3.0, -3.0])], version=5))
    assert values["staleness/weight_mean"] == pytest.approx(1.5)
    assert values["staleness/log_weight_std_lag_1"] == pytest.approx(LOG2 / 2)


@given(lists(tuples(floats(-3, 3), integers(0, 3)), min_size=2, max_size=20), integers(1, 19))
def test_splitting_the_data_changes_no_figure(rows: list[tuple[float, int]], cut: int) -> None:
    def made(part: list[tuple[float, int]]) -> dict[str, object]:
        data = [datum([float(9 - lag) for _, lag in part])]
        return dict(staleness_metrics(data, [float_array([value for value, _ in part])], version=9))

    whole, left, right = made(rows), made(rows[:cut]), made(rows[cut:])
    merged = metric_values(merge_metrics(left, right))  # type: ignore[arg-type]
    assert merged == pytest.approx(metric_values(whole), abs=1e-6)  # type: ignore[arg-type]


@given(lists(floats(0.01, 10), min_size=1, max_size=20))
def test_deviation_and_effective_share_agree_with_numpy(values: list[float]) -> None:
    row = np.array(values)
    sums = float(row.sum()), float((row**2).sum()), len(row)
    assert StdDev(*sums).value() == pytest.approx(row.std(), abs=1e-6)
    share = EffectiveSampleShare(*sums).value()
    assert 1 / len(row) - 1e-9 <= share <= 1 + 1e-9
    assert EffectiveSampleShare(*(3 * s for s in sums[:1]), 9 * sums[1], sums[2]).value() == pytest.approx(share)


def test_no_values_have_no_spread() -> None:
    assert StdDev(0, 0, 0).value() == 0.0
    assert EffectiveSampleShare(0, 0, 0).value() == 0.0
