"""The losses of every first run: cross-entropy, importance sampling and PPO. Numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from

from headrace.algo.loss_signature import LossFn
from headrace.algo.losses import LOSSES
from headrace.algo.losses.supervised import cross_entropy
from headrace.algo.losses.surrogate import importance_sampling, ppo
from headrace.metrics import merge_metrics, metric_values

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64, requires_grad=True)


def test_cross_entropy_takes_any_real_weight() -> None:
    # L = -(2 * -1 + -0.5 * -3 + 0 * -inf) = 2 - 1.5
    policy_T = leaf(-1.0, -3.0, -math.inf)
    out = cross_entropy(policy_T, tensor(2.0, -0.5, 0.0))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5)
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == [-2.0, 0.5, 0.0]
    assert metric_values(out.metrics) == pytest.approx({"loss/cross_entropy": 0.5, "loss/nll": 2.0})


def test_cross_entropy_sums_over_alternatives() -> None:
    # two positions, two alternatives: -(0.75 * -1 + 0.25 * -2 + 1 * -3)
    policy_TK = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=F64)
    weights_TK = torch.tensor([[0.75, 0.25], [1.0, 0.0]], dtype=F64)
    assert cross_entropy(policy_TK, weights_TK).loss.item() == pytest.approx(4.25)


def test_importance_sampling_by_hand() -> None:
    # r = e^0.5, e^-1; L = -(0.5 * e^0.5 * 2 + 1 * e^-1 * -1); dL/dlogp_t = its own term
    policy_T = leaf(-1.0, -2.0)
    out = importance_sampling(policy_T, tensor(-1.5, -1.0), tensor(2.0, -1.0), tensor(0.5, 1.0))
    out.loss.backward()
    expected = [-math.exp(0.5), math.exp(-1.0)]
    assert out.loss.item() == pytest.approx(sum(expected))
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == pytest.approx(expected)
    values = metric_values(out.metrics)
    assert values["loss/ratio_mean"] == pytest.approx((math.exp(0.5) + math.exp(-1)) / 2)
    assert values["loss/ratio_max"] == pytest.approx(math.exp(0.5))
    assert values["loss/kl_sampler_k1"] == pytest.approx((-0.5 + 1.0) / 2)
    assert values["loss/kl_sampler_k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 2)


def test_clipped_token_gets_no_gradient() -> None:
    # r = e^0.5 = 1.65 -> 1.2; r = 1 kept; r = e^-0.5 = 0.61 with A = -1: min(-0.61, -0.8) = -0.8
    policy_T = leaf(0.0, -1.0, -1.0)
    out = ppo(policy_T, tensor(-0.5, -1.0, -0.5), tensor(1.0, 1.0, -1.0), tensor(0.5, 0.5, 1.0))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.5 * 1.2 - 0.5 + 0.8)
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == [0.0, -0.5, 0.0]
    values = metric_values(out.metrics)
    assert values["loss/clip_frac_low"] == values["loss/clip_frac_high"] == pytest.approx(1 / 3)


def test_ppo_is_pessimistic_on_the_other_side() -> None:
    # r = e^0.5 with A = -1 and r = e^-0.5 with A = 1 are not clipped: moving back must stay possible
    policy_T = leaf(0.0, -1.0)
    out = ppo(policy_T, tensor(-0.5, -0.5), tensor(-1.0, 1.0), tensor(1.0, 1.0))
    out.loss.backward()
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == pytest.approx([math.exp(0.5), -math.exp(-0.5)])


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    # r = e^2 = 7.39, A = -1: plain PPO loses 7.39; with c = 3 it loses 3 and gets no gradient; A > 0 is untouched
    arguments = (tensor(-2.0, -2.0), tensor(-1.0, 1.0), tensor(1.0, 1.0))
    assert ppo(leaf(0.0, -2.0), *arguments).loss.item() == pytest.approx(math.exp(2) - 1.0)
    policy_T = leaf(0.0, -2.0)
    out = ppo(policy_T, *arguments, dual_clip=3.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3.0 - 1.0)
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == [0.0, -1.0]
    # the bound is c A, so it scales with the advantage: A = -2 loses 6
    assert ppo(leaf(0.0), tensor(-2.0), tensor(-2.0), tensor(1.0), dual_clip=3.0).loss.item() == pytest.approx(6.0)


@pytest.mark.parametrize("fn", [importance_sampling, ppo])
@pytest.mark.parametrize("dead", ["weight", "advantage"])
def test_dead_position_is_exactly_zero_whatever_stands_there(fn: LossFn, dead: str) -> None:
    # the wire sends log-prob 0 and advantage 0 on prompt positions; the ratio there would be e^1000
    policy_T = torch.tensor([1000.0, -1.0], requires_grad=True)
    advantages_T = torch.tensor([0.0 if dead == "advantage" else 5.0, 1.0])
    weights_T = torch.tensor([0.0 if dead == "weight" else 1.0, 1.0])
    out = fn(policy_T, torch.tensor([-1000.0, -1.0]), advantages_T, weights_T)
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == [0.0, -1.0]
    assert all(math.isfinite(value) for value in metric_values(out.metrics).values())


@pytest.mark.parametrize("fn", [importance_sampling, ppo])
def test_nothing_at_an_untrained_position_can_leak(fn: LossFn) -> None:
    nan = math.nan
    policy_T = torch.tensor([-1.0, -1.0], requires_grad=True)
    out = fn(policy_T, torch.tensor([nan, -1.0]), torch.tensor([nan, 2.0]), torch.tensor([0.0, 1.0]))
    out.loss.backward()
    assert out.loss.item() == -2.0
    assert policy_T.grad is not None
    assert policy_T.grad.tolist() == [0.0, -2.0]


LOGPROBS = floats(-3, 0)


@given(
    lists(LOGPROBS, min_size=1, max_size=12),
    integers(0, 2**31),
    integers(0, 12),
    sampled_from(["importance_sampling", "ppo"]),
)
def test_any_split_of_the_tokens_gives_the_same_loss_and_metrics(
    policy: list[float], seed: int, cut: int, name: str
) -> None:
    fn = LOSSES[name]
    generator = torch.Generator().manual_seed(seed)
    n = len(policy)
    rows = [torch.rand(n, generator=generator, dtype=F64) * 2 - 1 for _ in range(3)]
    whole_T, split_T = leaf(*policy), leaf(*policy)
    whole = fn(whole_T, *rows)
    parts = [fn(split_T[s], *(row[s] for row in rows)) for s in (slice(0, cut), slice(cut, n))]
    whole.loss.backward()
    sum(part.loss for part in parts).backward()  # type: ignore[union-attr]
    assert whole_T.grad is not None
    assert split_T.grad is not None
    torch.testing.assert_close(split_T.grad, whole_T.grad, rtol=1e-12, atol=0)
    merged = metric_values(merge_metrics(parts[0].metrics, parts[1].metrics))
    assert merged == pytest.approx(metric_values(whole.metrics), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    fn = LOSSES[name]
    rows = [torch.randn(7, dtype=F64) for _ in range(3)]
    policy_T = (rows[0] + 0.5 * torch.randn(7, dtype=F64)).requires_grad_()
    arguments = rows[:1] if name == "cross_entropy" else rows
    assert torch.autograd.gradcheck(lambda p: fn(p, *arguments).loss, (policy_T,))
