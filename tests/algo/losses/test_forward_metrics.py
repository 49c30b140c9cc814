"""Figures of a forward pass besides those of its loss, by hand."""

import math

import numpy as np
import pytest

from headrace.algo.losses.forward_metrics import forward_metrics
from headrace.metrics import metric_values
from headrace.types import Datum, LossSpec, float_array, int_array


def datum(arrays: dict[str, list[float]], unit: int | None = None) -> Datum:
    length = len(next(iter(arrays.values())))
    tokens = int_array(np.arange(length + 1) + 3)
    made = {name: float_array(values) for name, values in arrays.items()}
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays=made, unit=unit)


def test_policy_figures_by_hand() -> None:
    one = datum({"weights": [1, 1, 0], "sampler_logprobs": [-1, -2, 9], "advantages": [2, -1, 50]})
    measured = metric_values(forward_metrics(LossSpec(fn="ppo"), [one], [float_array([-1, -2, -7])]))
    assert measured == pytest.approx(
        {
            "train/trained_tokens": 2.0,
            "loss/nll": 1.5,
            "loss/advantage_min": -1.0,
            "loss/advantage_max": 2.0,
        },
        rel=1e-6,
    )


def test_pair_figures_by_hand() -> None:
    # scores at the last token: 2 and 0 in pair 0 (margin 2), 1 and 1 in pair 1 (margin 0); sigma(2) = 0.8808
    def side(sign: float, unit: int) -> Datum:
        return datum({"weights": [0, 1], "preferences": [sign, sign]}, unit)

    data = [side(1, 0), side(-1, 0), side(1, 1), side(-1, 1)]
    scores = [float_array([99, score]) for score in (2, 0, 1, 1)]
    measured = metric_values(forward_metrics(LossSpec(fn="bradley_terry"), data, scores))
    assert measured == pytest.approx(
        {
            "train/trained_tokens": 4.0,
            "loss/score_mean": 1.0,
            "loss/score_std": math.sqrt(0.5),
            "loss/score_min": 0.0,
            "loss/score_max": 2.0,
            "loss/pairs": 2.0,
            "loss/margin_std": 1.0,
            "loss/margin_min": 0.0,
            "loss/win_probability": (1 / (1 + math.exp(-2)) + 0.5) / 2,
        },
        rel=1e-6,
    )


def test_nothing_is_measured_where_nothing_is_trained() -> None:
    empty = datum({"weights": [0], "sampler_logprobs": [-1], "advantages": [1]})
    assert metric_values(forward_metrics(LossSpec(fn="ppo"), [empty], [float_array([-1])])) == {
        "train/trained_tokens": 0.0,
        "loss/nll": 0.0,
    }
    rejected = datum({"weights": [1], "preferences": [-1]}, 0)
    lone = forward_metrics(LossSpec(fn="bradley_terry"), [rejected], [float_array([3])])
    assert lone["loss/pairs"].value() == 0.0
    assert "loss/margin_std" not in lone


def test_figures_of_other_losses_are_left_out() -> None:
    one = datum({"weights": [1, 1], "advantages": [2, -1], "returns": [0, 1]})
    imitated = forward_metrics(LossSpec(fn="cross_entropy"), [one], [float_array([-1, -2])])
    assert sorted(imitated) == ["loss/nll", "train/trained_tokens"]
    assert sorted(forward_metrics(LossSpec(fn="value"), [one], [float_array([5, 6])])) == ["train/trained_tokens"]
