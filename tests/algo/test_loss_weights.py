"""Normalisation is a property of the whole step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from headrace.algo.loss_weights import WEIGHTINGS, reweight
from headrace.errors import ConfigError, DataError
from headrace.types import Datum, float_array, int_array


def datum(weights: list[float] | np.ndarray, unit: int | None = None) -> Datum:
    tokens = int_array([0] * len(weights))
    return Datum(inputs=tokens, targets=tokens, arrays={"weights": float_array(weights)}, unit=unit)


# three sequences with 2, 1 and 0 trained tokens, then one with 3: 6 tokens, 3 sequences that count
STEP = (datum([0, 1, 1], 1), datum([1], 1), datum([0, 0], 2), datum([1, 0.5, -2], 3))


@pytest.mark.parametrize(
    ("weighting", "scales"),
    [
        ("token_sum", [1, 1, 1]),
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 6, 1 / 3, 1 / 9]),
        ("seq_mean_token_mean", [1 / 6, 1 / 3, 1 / 9]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
        ("seq_mean_token_sum_norm", [1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 6, 1 / 6, 1 / 6]),  # group 1: 3 tokens, group 2: none, group 3: 3 tokens; two groups
    ],
)
def test_goldens(weighting: str, scales: list[float]) -> None:
    first, second, empty, last = reweight(STEP, weighting=weighting, constant=10.0)
    assert first.arrays["weights"].tolist() == pytest.approx([0, scales[0], scales[0]])
    assert second.arrays["weights"].tolist() == pytest.approx([scales[1]])
    assert empty.arrays["weights"].tolist() == [0, 0]
    assert last.arrays["weights"].tolist() == pytest.approx([scales[2], 0.5 * scales[2], -2 * scales[2]])


def test_prompt_mean_takes_groups_from_the_caller() -> None:
    data = (datum([1, 1, 1]), datum([1]), datum([1]))
    out = reweight(data, weighting="prompt_mean", groups=[4, 4, 9])
    assert [float(item.arrays["weights"][0]) for item in out] == [0.125, 0.125, 0.5]
    with pytest.raises(ConfigError, match="group of every datum"):
        reweight(data, weighting="prompt_mean")


def test_a_row_of_alternatives_is_one_token() -> None:
    tokens = int_array([0, 0])
    soft = Datum(
        inputs=tokens,
        targets=int_array(np.zeros((2, 2))),
        arrays={"weights": float_array(np.array([[0.75, 0.25], [1.0, 0.0]]))},
    )
    (out,) = reweight([soft], weighting="token_mean")
    assert out.arrays["weights"].tolist() == [[0.375, 0.125], [0.5, 0.0]]


@given(lists(lists(integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6), sampled_from(sorted(WEIGHTINGS)))
def test_means_add_up_to_one_and_order_does_not_matter(masks: list[list[int]], weighting: str) -> None:
    data = [datum(list(map(float, mask)), unit=index % 2) for index, mask in enumerate(masks)]
    out = reweight(data, weighting=weighting, constant=2.0)
    back = reweight(data[::-1], weighting=weighting, constant=2.0)
    for one, other in zip(out, back[::-1], strict=True):
        assert one.arrays["weights"].tolist() == other.arrays["weights"].tolist()
    if weighting in ("token_mean", "sequence_mean", "prompt_mean") and any(map(any, masks)):
        assert sum(float(item.arrays["weights"].sum()) for item in out) == pytest.approx(1.0, rel=1e-5)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        reweight(STEP, weighting="tokenmean")
    with pytest.raises(ConfigError, match="positive constant"):
        reweight(STEP, weighting="constant")
    bare = Datum(inputs=int_array([0]), targets=int_array([0]), arrays={})
    with pytest.raises(DataError, match="'weights'"):
        reweight([bare], weighting="token_mean")
