"""What every loss reports, by name and reduction, in one table; and the figures themselves by hand."""

import math

import pytest
import torch

from headrace.algo.losses import LOSSES
from headrace.algo.losses.ratios import (
    advantage_metrics,
    effective_sample_share,
    masked_explained_variance,
    ratio_metrics,
)
from headrace.metrics import EffectiveSampleShare, ExplainedVariance, Max, Mean, Min, StdDev, Sum, metric_values
from support.loss_batches import batch, call, output_of

F64 = torch.float64
Table = dict[str, type]

POLICY: Table = {"policy": Sum, "advantage_mean": Mean, "advantage_std": StdDev}
RATIO: Table = {
    "ratio_mean": Mean,
    "ratio_std": StdDev,
    "ratio_min": Min,
    "ratio_max": Max,
    "ratio_effective": EffectiveSampleShare,
}
SAMPLER: Table = {"kl_sampler_k1": Mean, "kl_sampler_k3": Mean}
PROXIMAL: Table = {"kl_proximal_k1": Mean, "kl_proximal_k3": Mean}
REFERENCE: Table = {"reference_kl": Sum, "kl_reference_k1": Mean, "kl_reference_k3": Mean}
CLIP: Table = {"clip_frac_low": Mean, "clip_frac_high": Mean}
WEIGHT: Table = {"weight_mean": Mean, "weight_max": Max, "weight_effective": EffectiveSampleShare}
DROPPED: Table = {"dropped_low": Mean, "dropped_high": Mean}
VALUE: Table = {"value": Sum, "value_error": Mean, "value_mean": Mean, "explained_variance": ExplainedVariance}
LABELLED: Table = {"preference": Sum, "accuracy": Mean, "chosen_reward": Mean, "rejected_reward": Mean}
PAIR: Table = LABELLED | {"margin": Mean}

SURROGATE = POLICY | RATIO | SAMPLER
WEIGHTED = SURROGATE | WEIGHT
REPORTED: dict[str, Table] = {
    "cross_entropy": {"cross_entropy": Sum, "nll": Mean},
    "distillation": {"distillation": Sum, "kl_teacher_k1": Mean, "kl_teacher_k3": Mean} | RATIO | SAMPLER,
    "teacher_kl_reverse": {"distillation": Sum, "kl_teacher": Mean},
    "teacher_kl_forward": {"distillation": Sum, "kl_teacher": Mean},
    "importance_sampling": SURROGATE,
    "ppo": SURROGATE | CLIP,
    "conservative_ppo": SURROGATE | CLIP | {"sampler_kl": Sum},
    "decoupled_ppo": WEIGHTED | CLIP | PROXIMAL | {"dropped_behaviour": Mean},
    "loglinear_ppo": WEIGHTED | CLIP,
    "m2po": SURROGATE | {"dropped_m2": Mean},
    "gspo": SURROGATE | CLIP,
    "gspo_token": SURROGATE | CLIP,
    "sequence_ppo": SURROGATE | CLIP,
    "cispo": WEIGHTED | CLIP,
    "aipo": WEIGHTED | {"clip_frac_high": Mean},
    "tis": WEIGHTED | {"clip_frac_high": Mean},
    "mis": WEIGHTED | DROPPED,
    "icepop": WEIGHTED | DROPPED,
    "sequence_tis": WEIGHTED | {"clip_frac_high": Mean},
    "sequence_mis": WEIGHTED | DROPPED,
    "geometric_mis": WEIGHTED | DROPPED,
    "sapo": SURROGATE,
    "dro": SURROGATE,
    "discriminative": POLICY | {"score_gap": Mean, "contrast_share": Mean},
    "discriminative_term": {"discriminative": Sum, "score_gap": Mean, "contrast_share": Mean},
    "dpo": PAIR,
    "ipo": PAIR,
    "kto": LABELLED,
    "orpo": PAIR | {"chosen_nll": Sum},
    "simpo": PAIR,
    "bradley_terry": PAIR,
    "value": VALUE,
    "value_clipped": VALUE | {"value_clip_frac": Mean},
    "shared_value": VALUE | {"value_clip_frac": Mean},
    "reference_kl_k1_k2": REFERENCE,
    "reference_kl_k2": REFERENCE,
    "reference_kl_k3": REFERENCE,
    "reference_kl_k3_k2": REFERENCE,
    "reference_kl_weighted": REFERENCE,
    "sampler_kl": SAMPLER | {"sampler_kl": Sum},
    "entropy_bonus": {"entropy_bonus": Sum, "entropy": Mean},
}


def test_the_table_has_every_loss() -> None:
    assert set(REPORTED) == set(LOSSES)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_reports_what_applies_to_it_and_nothing_else(name: str) -> None:
    out = call(name, batch(7), output_of(name, batch(7)))
    expected = {f"loss/{metric}": reduction for metric, reduction in REPORTED[name].items()}
    assert {metric: type(value) for metric, value in out.metrics.items()} == expected
    assert all(math.isfinite(value) for value in metric_values(out.metrics).values())


def test_figures_by_hand() -> None:
    counted = torch.tensor([True, True, True, False])
    advantages = torch.tensor([1.0, -1.0, 3.0, 99.0], dtype=F64)
    # mean 1, deviations 0, -2, 2: variance 8 / 3
    found = metric_values(advantage_metrics(advantages, counted))
    assert found == {"loss/advantage_mean": pytest.approx(1.0), "loss/advantage_std": pytest.approx((8 / 3) ** 0.5)}
    # ratios 1, 2, 3: mean 2, variance 2/3, and (1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36 / 42
    ratios = metric_values(ratio_metrics(torch.tensor([1.0, 2.0, 3.0, 1e-9]).log(), counted))
    assert ratios == pytest.approx(
        {
            "loss/ratio_mean": 2.0,
            "loss/ratio_std": (2 / 3) ** 0.5,
            "loss/ratio_min": 1.0,
            "loss/ratio_max": 3.0,
            "loss/ratio_effective": 36 / 42,
        }
    )
    # in float32, 1 + 1e-5 and 1 - 1e-5: squares of the ratios themselves would give a deviation of 0
    close = ratio_metrics(torch.tensor([1e-5, -1e-5]), torch.tensor([True, True]))
    assert close["loss/ratio_std"].value() == pytest.approx(1e-5, rel=1e-3)
    # (1 + 1 + 4)^2 / (3 (1 + 1 + 16)) = 36 / 54
    assert effective_sample_share(torch.tensor([1.0, 1.0, 4.0, 99.0]), counted).value() == pytest.approx(36 / 54)
    # returns 0, 1, 2 (variance 2/3), errors 0, 0, 1 (variance 2/9): 1 - 1/3
    returns, values = torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.tensor([0.0, 1.0, 1.0, -9.0])
    assert masked_explained_variance(values, returns, counted).value() == pytest.approx(2 / 3)
    assert math.isnan(masked_explained_variance(values, torch.full((4,), 3.0), counted).value())


def test_a_constant_error_explains_all_variance_and_pieces_merge_to_the_whole() -> None:
    returns = torch.tensor([0.1, 0.7, -0.4, 2.0], dtype=F64)
    everywhere = torch.ones(4, dtype=torch.bool)
    assert masked_explained_variance(returns + 5.0, returns, everywhere).value() == pytest.approx(1.0)
    values = torch.tensor([0.5, 0.5, 0.0, 1.0], dtype=F64)
    whole = masked_explained_variance(values, returns, everywhere)
    parts = [
        masked_explained_variance(values[part], returns[part], everywhere[part]) for part in (slice(0, 1), slice(1, 4))
    ]
    assert parts[0].merge(parts[1]).value() == pytest.approx(whole.value())


def test_the_share_of_tokens_without_a_behaviour_weight_is_reported() -> None:
    arrays = batch(8)
    arrays["behaviour_weights"] = torch.zeros_like(arrays["behaviour_weights"])
    assert call("decoupled_ppo", arrays).metrics["loss/dropped_behaviour"].value() == 1.0
    arrays["behaviour_weights"] += 1.0
    assert call("decoupled_ppo", arrays).metrics["loss/dropped_behaviour"].value() == 0.0
