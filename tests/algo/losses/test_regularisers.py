"""Penalties and bonuses: which divergence a term reads as, and which one its gradient follows."""

import math

import pytest
import torch
from torch import Tensor

from headrace.algo.kl_control import adapt_kl_coef, kl_scale
from headrace.algo.loss_signature import loss_inputs, unit_of
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.losses.compose import sum_losses
from headrace.algo.losses.regularisers import (
    entropy_bonus,
    reference_kl_k1_k2,
    reference_kl_k2,
    reference_kl_k3,
    reference_kl_k3_k2,
    reference_kl_weighted,
    sampler_kl,
)
from headrace.algo.losses.value import value, value_clipped
from headrace.errors import ConfigError
from headrace.metrics import metric_values


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGITS = row(0.3, -0.2, 0.9).requires_grad_()
REFERENCE_V = torch.log_softmax(row(1.0, 0.0, -1.0), 0)
SAMPLER_V = torch.log_softmax(row(-0.5, 0.5, 0.2), 0)


def policy_V() -> Tensor:
    return torch.log_softmax(LOGITS, 0)


def kl(p_V: Tensor, q_V: Tensor) -> Tensor:
    return (p_V.exp() * (p_V - q_V)).sum()


def gradient(loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, LOGITS, retain_graph=True)[0]


def expected(fn: object, sampling_V: Tensor, *others: Tensor) -> tuple[float, Tensor]:
    """Exact expectation over the alphabet of value and gradient: the weight of a letter is its sampling probability."""
    out = fn(policy_V(), *others, sampling_V.detach().exp(), kl_coef=1.0)  # type: ignore[operator]
    return out.loss.item(), gradient(out.loss)


def test_what_each_estimator_reads_and_follows() -> None:
    on_policy = policy_V().detach()
    forward = kl(policy_V(), REFERENCE_V)
    k2_value, k2_gradient = expected(reference_kl_k2, on_policy, REFERENCE_V)
    k3_value, k3_gradient = expected(reference_kl_k3, on_policy, REFERENCE_V)
    both_value, both_gradient = expected(reference_kl_k3_k2, on_policy, REFERENCE_V)
    k1_value, k1_gradient = expected(reference_kl_k1_k2, on_policy, REFERENCE_V)
    assert k1_value == pytest.approx(forward.item())
    torch.testing.assert_close(k1_gradient, gradient(forward))
    torch.testing.assert_close(k2_gradient, gradient(forward))
    assert k2_value != pytest.approx(forward.item(), rel=0.01)  # biased
    assert k3_value == pytest.approx(forward.item())
    torch.testing.assert_close(k3_gradient, gradient(kl(REFERENCE_V, policy_V())))
    assert both_value == pytest.approx(forward.item())
    torch.testing.assert_close(both_gradient, gradient(forward))


def test_the_value_of_k1_has_either_sign_token_by_token() -> None:
    out = reference_kl_k1_k2(row(-1.0, -2.0), row(-2.0, -1.5), row(1.0, 1.0), kl_coef=0.1)
    assert out.loss.item() == pytest.approx(0.1 * (1.0 - 0.5))


def test_weighted_form_is_unbiased_on_another_samplers_tokens() -> None:
    found_value, found_gradient = expected(reference_kl_weighted, SAMPLER_V, REFERENCE_V, SAMPLER_V)
    forward = kl(policy_V(), REFERENCE_V)
    assert found_value == pytest.approx(forward.item())
    torch.testing.assert_close(found_gradient, gradient(forward))


def test_sampler_kl_is_the_divergence_from_the_sampler() -> None:
    out = sampler_kl(policy_V(), SAMPLER_V, SAMPLER_V.exp(), sampler_kl_coef=3.0)
    exact = kl(SAMPLER_V, policy_V())
    assert out.loss.item() == pytest.approx(3 * exact.item())
    torch.testing.assert_close(gradient(out.loss), 3 * gradient(exact))


def test_entropy_bonus_lowers_the_loss_where_entropy_is_high() -> None:
    out = entropy_bonus(row(-1.0, -1.0, -1.0), row(1.0, 0.5, 0.0), row(2.0, 1.0, math.inf), entropy_coef=0.1)
    assert out.loss.item() == pytest.approx(-0.1 * 2.5)
    assert metric_values(out.metrics)["loss/entropy"] == pytest.approx(1.5)


def test_adaptive_coefficient_has_a_dead_zone() -> None:
    assert [adapt_kl_coef(1.0, kl=kl, target=0.1) for kl in (0.16, 0.14, 0.07, 0.06)] == [2.0, 1.0, 1.0, 0.5]
    assert [adapt_kl_coef(3.0, kl=kl, target=0.1) for kl in (0.16, 0.1, 0.06)] == [6.0, 3.0, 1.5]


def test_an_update_beyond_the_limit_is_scaled_back() -> None:
    assert [kl_scale(kl, limit=0.01) for kl in (0.0, 0.01, 0.04, 1.0)] == [1.0, 1.0, 0.5, 0.1]
    assert kl_scale(math.nan, limit=0.01) == kl_scale(math.inf, limit=0.01) == 0.0


def test_value_loss_by_hand() -> None:
    # errors 1 and -2: 0.5 (1 * 1 + 0.5 * 4)
    out = value(row(2.0, 1.0, 0.0), row(1.0, 3.0, 9.0), row(1.0, 0.5, 0.0))
    assert out.loss.item() == pytest.approx(1.5)
    assert metric_values(out.metrics)["loss/value_error"] == pytest.approx(1.5)


def test_clipped_value_takes_the_worse_of_both() -> None:
    # V0 = 0, c = 0.2. V = 1, R = 2: (1)^2 against (0.2 - 2)^2 = 3.24: clipped, no gradient.
    # V = 1, R = 0: 1 against 0.04: not clipped, gradient 2 * 0.5 * 1
    predicted_T = row(1.0, 1.0).requires_grad_()
    out = value_clipped(predicted_T, row(2.0, 0.0), row(0.0, 0.0), row(1.0, 1.0))
    assert out.loss.item() == pytest.approx(0.5 * (3.24 + 1.0))
    assert torch.autograd.grad(out.loss, predicted_T)[0].tolist() == pytest.approx([0.0, 1.0])
    assert metric_values(out.metrics)["loss/value_clip_frac"] == 0.5


# --- sums ------------------------------------------------------------------------------------------------------------


def test_a_sum_of_losses_is_a_loss() -> None:
    fn = find_loss("ppo + reference_kl_k3 + entropy_bonus")
    inputs = loss_inputs(fn)
    assert set(inputs.required) == {"sampler_logprobs", "advantages", "weights", "reference_logprobs"}
    assert inputs.wants_entropy
    assert inputs.params["kl_coef"] == 0.01
    rows = {"policy_logprobs_T": row(-1.0), "weights_T": row(2.0)}
    ppo_rows = {**rows, "sampler_logprobs_T": row(-1.1), "advantages_T": row(1.5)}
    reference = {"reference_logprobs_T": row(-2.0)}
    out = fn(**ppo_rows, **reference, entropy_T=row(0.7), kl_coef=0.5, clip_high=0.01)
    parts = [
        LOSSES["ppo"](**ppo_rows, clip_high=0.01),
        reference_kl_k3(**rows, **reference, kl_coef=0.5),
        entropy_bonus(**rows, entropy_T=row(0.7)),
    ]
    assert out.loss.item() == pytest.approx(sum(part.loss.item() for part in parts))
    values = metric_values(out.metrics)
    assert all(values[name] == metric.value() for part in parts for name, metric in part.metrics.items())


def test_a_sum_has_the_largest_unit_and_the_outputs_of_one_forward_pass() -> None:
    assert unit_of(sum_losses([LOSSES["dpo"], LOSSES["cross_entropy"]])) == "pair"
    assert set(loss_inputs(find_loss("ppo + shared_value")).outputs) == {"policy_logprobs", "predicted_values"}
    for terms in ("ppo + bradley_terry", "value + bradley_terry"):
        with pytest.raises(ConfigError, match="different model outputs"):
            find_loss(terms)
    with pytest.raises(ConfigError, match="'clip_low' of loss 'gspo'"):
        find_loss("ppo + gspo")
    with pytest.raises(ConfigError, match="did you mean 'entropy_bonus'"):
        find_loss("ppo + entropybonus")
