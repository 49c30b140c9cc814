"""Pairs and groups: DPO, IPO, Bradley-Terry, discriminative scoring."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.algo.loss_weights import reweight
from headrace.algo.losses.discriminative import discriminative, discriminative_term
from headrace.algo.losses.preference import bradley_terry, dpo, ipo
from headrace.algo.segment_ops import dense_index, segment_logsumexp, segment_mean, segment_sum
from headrace.algo.units import as_pairs, number_units
from headrace.errors import DataError
from headrace.metrics import metric_values
from headrace.types import Datum, float_array, int_array


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


# pair 7: chosen tokens 0, 1 with log-ratios 0.5, 0.5, rejected token 2 with -1;
# pair 3: chosen 3 with -1, rejected 4 with 1
UNITS_T = row(7, 7, 7, 3, 3)
SIDES_T = row(1, 1, -1, 1, -1)
POLICY_T, REFERENCE_T = row(-1.0, -1.0, -3.0, -2.0, -1.0), row(-1.5, -1.5, -2.0, -1.0, -2.0)
HALF_T = torch.full((5,), 0.5, dtype=torch.float64)


def test_dpo_by_hand() -> None:
    # margins: beta ((0.5 + 0.5) - (-1)) = 0.2 and beta (-1 - 1) = -0.2; each pair counts 0.5
    out = dpo(POLICY_T, REFERENCE_T, SIDES_T, UNITS_T, HALF_T, beta=0.1)
    assert out.loss.item() == pytest.approx(-0.5 * log_sigmoid(0.2) - 0.5 * log_sigmoid(-0.2))
    values = metric_values(out.metrics)
    assert values["loss/accuracy"] == 0.5
    assert values["loss/margin"] == pytest.approx(0.0, abs=1e-12)


def test_dpo_label_smoothing_mixes_both_labels() -> None:
    out = dpo(POLICY_T[:3], REFERENCE_T[:3], SIDES_T[:3], UNITS_T[:3], row(1, 1, 1), beta=1.0, label_smoothing=0.25)
    assert out.loss.item() == pytest.approx(-0.75 * log_sigmoid(2.0) - 0.25 * log_sigmoid(-2.0))


def test_ipo_by_hand() -> None:
    # D = 0.5 - (-1) = 1.5 and -1 - 1 = -2, target 1 / (2 * 0.5) = 1
    out = ipo(POLICY_T, REFERENCE_T, SIDES_T, UNITS_T, HALF_T, beta=0.5)
    assert out.loss.item() == pytest.approx(0.5 * 0.5**2 + 0.5 * 3.0**2)


def test_bradley_terry_scores_the_last_position() -> None:
    # only positions 1 (chosen, 2.0) and 2 (rejected, 0.5) are trained; margin 1; center 0.1 * 2.5^2
    weights_T = row(0, 1, 1)
    scores_T = row(9.0, 2.0, 0.5)
    out = bradley_terry(scores_T, SIDES_T[:3], UNITS_T[:3], weights_T, row(1, 1, 1), center_coef=0.1)
    assert out.loss.item() == pytest.approx(-log_sigmoid(0.5) + 0.625)
    assert bradley_terry(scores_T, SIDES_T[:3], UNITS_T[:3], weights_T).loss.item() == pytest.approx(-log_sigmoid(1.5))


def test_as_pairs_numbers_and_signs() -> None:
    def datum(length: int, weight: float = 1.0) -> Datum:
        tokens = int_array([0] * length)
        return Datum(inputs=tokens, targets=tokens, arrays={"weights": float_array([weight] * length)})

    data = as_pairs([datum(2), datum(1)], [datum(3), datum(1)])
    assert [item.unit for item in data] == [0, 0, 1, 1]
    assert [float(item.arrays["preferences"][0]) for item in data] == [1.0, -1.0, 1.0, -1.0]
    assert [item.arrays["units"].tolist() for item in data] == [[0.0] * 2, [0.0] * 3, [1.0], [1.0]]
    mean = reweight(data, weighting="unit_mean")
    assert {float(weight) for item in mean for weight in item.arrays["weights"]} == {0.5}  # two pairs
    with pytest.raises(DataError, match="2 chosen and 1 rejected"):
        as_pairs([datum(1), datum(1)], [datum(1)])
    with pytest.raises(DataError, match="rejected side of pair 0"):
        as_pairs([datum(1)], [datum(1, 0.0)])
    with pytest.raises(DataError, match=r"Datum\.unit"):
        number_units([datum(1)])


def test_discriminative_by_hand() -> None:
    # group 0: good sequence of scores mean(-1, -3) = -2; bad sequences -1 and -4. group 1: only good: contributes 0
    policy_T = row(-1.0, -3.0, -1.0, -4.0, -0.5).requires_grad_()
    segments_T = torch.tensor([0, 0, 1, 2, 3])
    out = discriminative(
        policy_T, row(1, 1, -1, -1, 1), row(0, 0, 0, 0, 1), torch.ones(5).double(), segments_T, tau=0.5
    )
    soft = 0.5 * math.log((math.exp(-2) + math.exp(-8)) / 2)
    assert out.loss.item() == pytest.approx(2.0 + soft)
    gradient = torch.autograd.grad(out.loss, policy_T)[0].tolist()
    hard = math.exp(-2) / (math.exp(-2) + math.exp(-8))  # the likelier wrong answer gets nearly all of the push
    assert gradient == pytest.approx([-0.5, -0.5, hard, 1 - hard, 0.0])
    assert metric_values(out.metrics)["loss/contrast_share"] == 0.5


def test_discriminative_with_one_bad_answer_is_the_difference_of_scores() -> None:
    arguments = (row(1, 1, -1), row(4, 4, 4), row(1, 1, 1), torch.tensor([0, 1, 2]))
    out = discriminative(row(-1.0, -3.0, -2.5), *arguments, tau=0.7)
    assert out.loss.item() == pytest.approx(2.0 - 2.5)
    assert metric_values(out.metrics)["loss/score_gap"] == pytest.approx(0.5)


def test_the_discriminative_term_counts_a_group_by_the_sum_of_its_weights() -> None:
    # the groups of test_discriminative_by_hand with weights 1/8 each: group 0 has 4/8 of them
    policy_T = row(-1.0, -3.0, -1.0, -4.0, -0.5)
    arguments = (
        row(1, 1, -1, -1, 1),
        row(0, 0, 0, 0, 1),
        torch.full((5,), 0.125).double(),
        torch.tensor([0, 0, 1, 2, 3]),
    )
    out = discriminative_term(policy_T, *arguments, tau=0.5, discriminative_coef=0.3)
    soft = 0.5 * math.log((math.exp(-2) + math.exp(-8)) / 2)
    assert out.loss.item() == pytest.approx(0.3 * 0.5 * (2.0 + soft))
    values = metric_values(out.metrics)
    assert values["loss/discriminative"] == pytest.approx(out.loss.item())
    assert values["loss/score_gap"] == pytest.approx(-2.0 - soft)


def test_segments_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    labels_T = torch.randint(-3, 3, (40,), generator=generator)
    values_T = torch.randn(40, generator=generator, dtype=torch.float64)
    counted_T = torch.rand(40, generator=generator) < 0.6
    index_T = dense_index(labels_T)
    sums, means = segment_sum(values_T, index_T), segment_mean(values_T, counted_T, index_T)
    logs = segment_logsumexp(values_T, counted_T, index_T)
    names = sorted(set(labels_T.tolist()))
    for number, name in enumerate(names):
        members = labels_T == name
        assert (index_T[members] == number).all()
        assert sums[number].item() == pytest.approx(values_T[members].sum().item())
        kept = values_T[members & counted_T]
        assert means[number].item() == pytest.approx(np.mean(kept.tolist()))
        assert logs[number].item() == pytest.approx(torch.logsumexp(kept, 0).item())
    assert (sums[len(names) :] == 0).all()
