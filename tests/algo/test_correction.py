"""Behaviour weights of a whole step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from, tuples

from headrace.algo.correction import (
    BehaviourCorrection,
    BoundRule,
    MissingRule,
    WeightLevel,
    behaviour_weights,
    fold_into_weights,
    m2_mask,
    normalize_weights,
    with_lags,
)
from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses.decoupled import decoupled_ppo
from headrace.errors import ConfigError, DataError
from headrace.metrics import metric_values
from headrace.types import Datum, float_array, int_array


def datum(**arrays: list[float]) -> Datum:
    length = len(next(iter(arrays.values())))
    arrays = {"weights": [1.0] * length, "sampler_logprobs": [0.0] * length, **arrays}
    tokens = int_array([0] * length)
    return Datum(inputs=tokens, targets=tokens, arrays={name: float_array(row) for name, row in arrays.items()})


def weights(data: tuple[Datum, ...]) -> list[float]:
    return [float(value) for item in data for value in item.arrays["behaviour_weights"]]


LOG2, LOG3 = math.log(2), math.log(3)

# sampler log-prob 0 everywhere; trainer at version 5; the last token is not trained
STEP = datum(
    weights=[1, 1, 1, 1, 0],
    versions=[5, 4, 3, 2, -1],  # lags 0, 1, 2, 3
    proximal_logprobs=[LOG2, LOG2, LOG2, LOG2, 50],
    next_logprobs=[math.nan, math.nan, LOG3, math.nan, math.nan],
)


@pytest.mark.parametrize(
    ("behaviour", "missing", "expected"),
    [
        (BehaviourCorrection.NONE, MissingRule.MASK, [1, 1, 1, 1, 0]),
        (BehaviourCorrection.FULL, MissingRule.MASK, [2, 2, 2, 2, 0]),
        (BehaviourCorrection.LOGLINEAR, MissingRule.MASK, [2, 2, 2**0.5, 2 ** (1 / 3), 0]),
        (BehaviourCorrection.ONE_STEP, MissingRule.MASK, [2, 2, 3, 0, 0]),
        (BehaviourCorrection.ONE_STEP, MissingRule.FULL, [2, 2, 3, 2, 0]),
        (BehaviourCorrection.ONE_STEP, MissingRule.LOGLINEAR, [2, 2, 3, 2 ** (1 / 3), 0]),
    ],
)
def test_goldens(behaviour: BehaviourCorrection, missing: MissingRule, expected: list[float]) -> None:
    corrected = behaviour_weights([STEP], version=5, behaviour=behaviour, missing=missing)
    assert weights(corrected.data) == pytest.approx(expected)
    assert corrected.data[0].arrays["weights"].tolist() == [1, 1, 1, 1, 0]  # denominators are those before rejection
    share = (
        0.25 if behaviour is BehaviourCorrection.ONE_STEP else 0.0
    )  # whatever stands in for it, what is missing is counted
    assert metric_values(corrected.health)["correction/missing_next"] == share


@pytest.mark.parametrize(
    ("level", "bound", "expected"),
    [
        (WeightLevel.TOKEN, BoundRule.MASK, [0.0, 2.0, 0.0]),  # TIS, MIS, IcePop by token
        (WeightLevel.TOKEN, BoundRule.CLAMP, [3.0, 2.0, 0.5]),
        (WeightLevel.SEQUENCE, BoundRule.MASK, [2.5, 2.5, 2.5]),  # 5 * 2 * 0.25
        (WeightLevel.GEOMETRIC, BoundRule.MASK, [5.0, 2.0, 0.25]),  # 2.5^(1/3) = 1.36
    ],
)
def test_bounds(level: WeightLevel, bound: BoundRule, expected: list[float]) -> None:
    step = datum(proximal_logprobs=[math.log(5), LOG2, math.log(0.25)])
    corrected = behaviour_weights([step], version=0, level=level, bound=bound, floor=0.5, cap=3.0)
    assert weights(corrected.data) == pytest.approx(expected)


def test_weights_on_a_bound_are_kept() -> None:
    step = datum(proximal_logprobs=[0.0, 0.0])
    corrected = behaviour_weights([step], version=0, floor=1.0, cap=1.0)
    assert weights(corrected.data) == [1.0, 1.0]
    assert metric_values(corrected.health)["correction/bounded_low"] == 0.0


def test_geometric_mask_rejects_whole_sequences() -> None:
    step = [datum(proximal_logprobs=[0.02, 0.02]), datum(proximal_logprobs=[0.5, -0.5])]
    corrected = behaviour_weights(step, version=0, level=WeightLevel.GEOMETRIC, floor=0.99, cap=1.01)
    assert weights(corrected.data) == pytest.approx([0, 0, math.exp(0.5), math.exp(-0.5)])
    assert metric_values(corrected.health)["correction/bounded_high"] == 0.5


def test_health_by_hand() -> None:
    # weights 1, 3, 0 (above the cap): mean 4/3, max 3, effective size 16 / 10 of 3
    corrected = behaviour_weights([datum(proximal_logprobs=[0.0, LOG3, 9.0])], version=0)
    values = metric_values(corrected.health)
    assert values["correction/weight_mean"] == pytest.approx(4 / 3)
    assert values["correction/weight_max"] == pytest.approx(3)
    assert values["correction/effective_share"] == pytest.approx(1.6 / 3)
    assert values["correction/bounded_high"] == pytest.approx(1 / 3)


def test_spread_and_effective_size_by_lag() -> None:
    # lags 0, 1 and 3: weights 1; 2; 2, 0 (next version unknown: left out) at version 5
    step = datum(
        versions=[5, 4, 2, 2],
        proximal_logprobs=[0, LOG2, LOG3, LOG3],
        next_logprobs=[math.nan, math.nan, LOG2, math.nan],
    )
    health = behaviour_weights([step], version=5, behaviour=BehaviourCorrection.ONE_STEP).health
    values = metric_values(health)
    assert values["correction/effective_share"] == pytest.approx(5**2 / 9 / 4)
    assert [values[f"correction/effective_share_lag_{lag}"] for lag in (0, 1, 3)] == pytest.approx([1, 1, 0.5])
    # log w: 0, log 2, log 2 and nothing known of the last
    assert values["correction/log_weight_std"] == pytest.approx(LOG2 * math.sqrt(2 / 3 - 4 / 9))
    assert values["correction/log_weight_std_lag_3"] == 0.0
    assert "correction/effective_share_lag_2" not in values


ROWS = lists(tuples(floats(-1, 1), floats(-1, 1), integers(0, 1)), min_size=1, max_size=8)


@given(ROWS, sampled_from(list(MissingRule)))
def test_one_step_is_full_when_no_lag_exceeds_one(rows: list[tuple[float, float, int]], missing: MissingRule) -> None:
    step = datum(
        proximal_logprobs=[prox for prox, _, _ in rows],
        sampler_logprobs=[sampler for _, sampler, _ in rows],
        versions=[float(5 - lag) for _, _, lag in rows],
        next_logprobs=[math.nan] * len(rows),
    )
    one = behaviour_weights([step], version=5, behaviour=BehaviourCorrection.ONE_STEP, missing=missing)
    full = behaviour_weights([step], version=5, behaviour=BehaviourCorrection.FULL)
    assert weights(one.data) == weights(full.data)


def test_the_ratio_never_depends_on_next_version_logprobs() -> None:
    # other next log-probs change the behaviour weights, and nothing else that decoupled PPO sees
    def metrics(next_logprob: float) -> dict[str, float]:
        step = datum(
            proximal_logprobs=[-0.1, 0.2], versions=[0.0, 0.0], next_logprobs=[next_logprob] * 2, advantages=[1.0, -1.0]
        )
        made = behaviour_weights([step], version=3, behaviour=BehaviourCorrection.ONE_STEP).data[0]
        names = loss_inputs(decoupled_ppo).required
        rows = {f"{name}_T": torch.tensor(made.arrays[name]) for name in names}
        return metric_values(decoupled_ppo(torch.tensor([0.0, 0.1]), **rows).metrics)

    low, high = metrics(-0.5), metrics(0.5)
    assert low["loss/weight_mean"] == pytest.approx(math.exp(-0.5))
    assert high["loss/weight_mean"] == pytest.approx(math.exp(0.5))
    same = ("loss/ratio_mean", "loss/ratio_max", "loss/clip_frac_low", "loss/clip_frac_high", "loss/kl_proximal_k3")
    assert [low[name] for name in same] == [high[name] for name in same]


def test_normalised_and_folded() -> None:
    corrected = behaviour_weights([datum(proximal_logprobs=[0.0, LOG3, 9.0])], version=0)
    assert weights(normalize_weights(corrected.data)) == pytest.approx([0.5, 1.5, 0.0])
    assert fold_into_weights(corrected.data)[0].arrays["weights"].tolist() == pytest.approx([1.0, 3.0, 0.0])


def test_lags_of_trained_tokens() -> None:
    assert with_lags([STEP], version=5)[0].arrays["lags"].tolist() == [0, 1, 2, 3, 0]


# --- M2PO ------------------------------------------------------------------------------------------------------------


def test_m2_drops_as_little_as_it_must() -> None:
    # M2 = 0.01, 0.04, 0.09, 1: means of the smallest 1..4: 0.01, 0.025, 0.0467, 0.285
    step = [datum(proximal_logprobs=[1.0, 0.1]), datum(proximal_logprobs=[-0.3, 0.2, 7.0], weights=[1, 1, 0])]
    masks = [item.arrays["m2_mask"].tolist() for item in m2_mask(step, threshold=0.04).data]
    assert masks == [[0, 1], [0, 1, 0]]
    masks = [item.arrays["m2_mask"].tolist() for item in m2_mask(step, threshold=0.05).data]
    assert masks == [[0, 1], [1, 1, 0]]


@given(lists(floats(-2, 2), min_size=1, max_size=12), floats(0.001, 1.0))
def test_m2_keeps_something_and_bounds_the_mean(differences: list[float], threshold: float) -> None:
    step = datum(proximal_logprobs=differences)
    corrected = m2_mask([step], threshold=threshold)
    kept = corrected.data[0].arrays["m2_mask"] != 0
    moments = step.arrays["proximal_logprobs"].astype(np.float64) ** 2
    assert kept.any()
    assert moments[kept].mean() < threshold or (moments[kept] == moments.min()).all()
    assert moments[kept].max() <= moments[~kept].min(initial=np.inf)


def test_errors_name_what_is_missing() -> None:
    bare = datum(sampler_logprobs=[0.0])
    with pytest.raises(DataError, match="proximal_logprobs"):
        behaviour_weights([bare], version=0)
    with pytest.raises(DataError, match="next_logprobs"):
        behaviour_weights(
            [datum(proximal_logprobs=[0.0], versions=[0.0])], version=0, behaviour=BehaviourCorrection.ONE_STEP
        )
    with pytest.raises(ConfigError, match="floor"):
        behaviour_weights([bare], version=0, floor=2.0, cap=1.0)
