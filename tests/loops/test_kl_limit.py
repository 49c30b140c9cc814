"""The limit on what a training step may move, by hand."""

import math
from collections.abc import Sequence

import pytest

from headrace.algo.kl_control import mean_kl
from headrace.loops.kl_limit import KlLimit
from headrace.loops.step_batch import backend_scorer
from headrace.metrics import metric_values
from headrace.testing import FakeBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, FloatArray, LossSpec, float_array, int_array

PPO = LossSpec(fn="conservative_ppo", params={"clip_low": 0.1})


def datum(*proximal: float, weights: Sequence[float] = ()) -> Datum:
    weights = weights or [1.0] * len(proximal)
    return Datum(
        inputs=int_array(range(len(proximal))),
        targets=int_array(range(len(proximal))),
        arrays={"weights": float_array(weights), "proximal_logprobs": float_array(proximal)},
    )


def region(*policy: float, limit: float = 0.1, coef: float | None = None) -> KlLimit:
    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return [float_array(policy[: datum.num_tokens]) for datum in data]

    return KlLimit(limit=limit, policy=score, coef=coef)


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
    kl_limit = region(-2.0, limit=0.1, coef=3.0)
    used = []
    for data in (far, far, near, near, near):
        used.append(kl_limit.loss(PPO).params["sampler_kl_coef"])
        await kl_limit.after_update(0, data, left=0)
        kl_limit.end_step()
    assert used == [3.0, 6.0, 12.0, 6.0, 3.0]
    assert kl_limit.doublings == -1.0
    assert kl_limit.loss(PPO).params["clip_low"] == 0.1


async def test_the_coefficient_is_bounded_and_absent_where_the_loss_has_no_such_term() -> None:
    kl_limit = region(-2.0, coef=1.0)
    for _ in range(30):
        await kl_limit.after_update(0, [datum(-1.0)], left=0)
        kl_limit.end_step()
    assert kl_limit.loss(PPO).params["sampler_kl_coef"] == 1024.0
    without = region(-2.0)
    assert without.loss(PPO) is PPO
    assert without.end_step() == {}


def moved_backend(data: Sequence[Datum], step: float, *, start: float = -2.0) -> FakeBackend:
    """A backend whose log-prob of everything went from `start` up by `step` in one reversible update."""
    backend = FakeBackend(logprob=start)
    backend.forward_backward(data, CROSS_ENTROPY)
    backend.optim_step(Adam(learning_rate=step, reversible=True))
    assert backend.logprob == start + step
    return backend


async def scaled(data: Sequence[Datum], backend: FakeBackend, *, limit: float) -> dict[str, float]:
    kl_limit = KlLimit(limit=limit, policy=backend_scorer(backend), backend=backend, coef=1.0)
    moved = await kl_limit.after_update(0, data, left=2)
    assert not moved.stop  # the other minibatches go on
    return metric_values(moved.metrics) | metric_values(kl_limit.end_step()) | {"doublings": kl_limit.doublings}


async def test_an_update_beyond_the_limit_is_scaled_back_to_meet_it(caplog: pytest.LogCaptureFixture) -> None:
    data = [datum(-2.0, -2.0)]
    backend = moved_backend(data, 0.4)
    found = await scaled(data, backend, limit=0.02)
    # d = -0.4: KL = e^0.4 - 1 - 0.4 = 0.0918; share = sqrt(0.95 * 0.02 / 0.0918) = 0.4549, of 0.4: 0.18196,
    # whose KL is e^0.18196 - 1.18196 = 0.01761, within the limit
    assert found["train/step_kl"] == pytest.approx(0.091825, rel=1e-4)
    assert found["train/kept_share"] == pytest.approx(0.45488, rel=1e-4)
    assert backend.logprob == pytest.approx(-2.0 + 0.181952, rel=1e-4)
    assert found["train/kept_kl"] == pytest.approx(0.017606, rel=1e-3)
    assert found["doublings"] == 1.0  # the coefficient follows what the update would have moved
    assert "beyond rl.kl_limit = 0.02; 0.455 of the update is kept, a KL of 0.0176" in caplog.text


async def test_an_update_within_the_limit_is_kept_whole(caplog: pytest.LogCaptureFixture) -> None:
    data = [datum(-2.0)]
    backend = moved_backend(data, 0.1)
    found = await scaled(data, backend, limit=0.02)
    assert (found["train/kept_share"], backend.logprob, caplog.text) == (1.0, -1.9, "")
    assert found["train/kept_kl"] == found["train/step_kl"]


async def test_what_no_share_brings_within_the_limit_is_taken_back_whole() -> None:
    data = [datum(-1.0)]  # the step's earlier updates alone, from -1 to -2, are beyond the limit on these data
    backend = moved_backend(data, 0.1, start=-2.0)
    found = await scaled(data, backend, limit=0.02)
    assert (found["train/kept_share"], backend.logprob) == (0.0, -2.0)
    assert found["train/kept_kl"] == pytest.approx(math.exp(-1.0))


async def test_an_update_to_nowhere_is_taken_back_whole() -> None:
    data = [datum(-2.0)]
    backend = moved_backend(data, 0.1)
    backend.logprob = math.nan
    found = await scaled(data, backend, limit=0.02)
    assert (found["train/kept_share"], found["train/kept_kl"]) == (0.0, 0.0)
