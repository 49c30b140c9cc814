"""The limit on what a training step may move, by hand."""

import math
from collections.abc import Sequence

import pytest

from headrace.loops.trust import TrustRegion, mean_kl
from headrace.types import Datum, FloatArray, LossSpec, float_array, int_array, metric_values

PPO = LossSpec(fn="conservative_ppo", params={"clip_low": 0.1})


def datum(*proximal: float, weights: Sequence[float] = ()) -> Datum:
    weights = weights or [1.0] * len(proximal)
    return Datum(
        inputs=int_array(range(len(proximal))),
        targets=int_array(range(len(proximal))),
        arrays={"weights": float_array(weights), "proximal_logprobs": float_array(proximal)},
    )


def region(*policy: float, limit: float = 0.1, coef: float | None = None) -> TrustRegion:
    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return [float_array(policy[: datum.num_tokens]) for datum in data]

    return TrustRegion(limit=limit, policy=score, coef=coef)


def test_the_kl_is_a_mean_over_trained_tokens() -> None:
    # d = proximal - policy = 0.5 and -0.5: e^-d - 1 + d = 0.10653 and 0.14872; the third token has no weight
    data = [datum(-1.0, -2.0, -9.0, weights=[0.5, -1.0, 0.0])]
    expected = (math.exp(-0.5) - 0.5 + math.exp(0.5) - 1.5) / 2
    assert mean_kl(data, [float_array([-1.5, -1.5, math.nan])]) == pytest.approx(expected)
    assert mean_kl([datum(-1.0, weights=[0.0])], [float_array([-5.0])]) == 0.0


async def test_an_update_within_the_limit_goes_on_and_one_beyond_it_stops_the_step() -> None:
    kept = await region(-1.0, -1.0).after_update(0, [datum(-1.1, -1.1)], left=2)
    assert not kept.stop
    assert metric_values(kept.metrics)["train/discarded_minibatches"] == 0.0
    stopped = await region(-2.0, -2.0).after_update(0, [datum(-1.0, -1.0)], left=2)
    assert stopped.stop
    assert metric_values(stopped.metrics) == {
        "train/step_kl": pytest.approx(math.exp(-1.0)),  # d = 1: e^-1 - 1 + 1
        "train/kl_limit_exceeded": 1.0,
        "train/discarded_minibatches": 2.0,
    }


async def test_a_kl_that_is_not_a_number_is_beyond_any_limit() -> None:
    assert (await region(math.nan, limit=1e9).after_update(0, [datum(-1.0)], left=0)).stop


async def test_the_coefficient_follows_what_steps_moved() -> None:
    far, near = [datum(-1.0)], [datum(-2.0)]
    trust = region(-2.0, limit=0.1, coef=3.0)
    used = []
    for data in (far, far, near, near, near):
        used.append(trust.loss(PPO).params["sampler_kl_coef"])
        await trust.after_update(0, data, left=0)
        trust.end_step()
    assert used == [3.0, 6.0, 12.0, 6.0, 3.0]
    assert trust.doublings == -1.0
    assert trust.loss(PPO).params["clip_low"] == 0.1


async def test_the_coefficient_is_bounded_and_absent_where_the_loss_has_no_such_term() -> None:
    trust = region(-2.0, coef=1.0)
    for _ in range(30):
        await trust.after_update(0, [datum(-1.0)], left=0)
        trust.end_step()
    assert trust.loss(PPO).params["sampler_kl_coef"] == 1024.0
    without = region(-2.0)
    assert without.loss(PPO) is PPO
    assert without.end_step() == {}
