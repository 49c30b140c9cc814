"""Policy losses beyond PPO: numbers by hand, and gradients where a coefficient is held constant."""

import math

import pytest
import torch
from torch import Tensor

from headrace.algo.losses import LOSSES
from headrace.algo.losses.decoupled import decoupled_ppo, loglinear_ppo, m2po
from headrace.algo.losses.score_function import aipo, cispo, geometric_mis, icepop, mis, sequence_mis, sequence_tis
from headrace.algo.losses.sequence import gspo, gspo_token, sequence_ppo
from headrace.algo.losses.soft_clip import dro, sapo
from headrace.algo.losses.supervised import distillation
from headrace.metrics import metric_values

E = math.e


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values: float) -> Tensor:
    return row(*values).requires_grad_()


def grad(loss: Tensor, output: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, output)
    return list(gradient.tolist())


# three tokens with r = e, 1, 1/e; policy log-probs -1, -2, -3; A = 1, -1, 2; w = 1
POLICY = (-1.0, -2.0, -3.0)
SAMPLER_T, ADVANTAGES_T, ONES_T = row(-2.0, -2.0, -2.0), row(1.0, -1.0, 2.0), row(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("fn", "numbers", "coefficients"),
    [
        (cispo, {"ratio_low": 0.5, "ratio_high": 2.0}, (2.0, 1.0, 0.5)),
        (cispo, {}, (E, 1.0, 1 / E)),
        (aipo, {"cap": 2.0}, (2.0, 1.0, 1 / E)),
        (mis, {"cap": 2.0}, (0.0, 1.0, 1 / E)),
        (icepop, {"floor": 0.5, "cap": 2.0}, (0.0, 1.0, 0.0)),
    ],
)
def test_token_coefficients(fn: object, numbers: dict[str, float], coefficients: tuple[float, ...]) -> None:
    # L = -sum c A log pi; the gradient is -c A because c is a constant
    policy_T = leaf(*POLICY)
    out = fn(policy_T, SAMPLER_T, ADVANTAGES_T, ONES_T, **numbers)  # type: ignore[operator]
    terms = [-c * a for c, a in zip(coefficients, (1.0, -1.0, 2.0), strict=True)]
    assert out.loss.item() == pytest.approx(sum(t * p for t, p in zip(terms, POLICY, strict=True)))
    assert grad(out.loss, policy_T) == pytest.approx(terms)
    values = metric_values(out.metrics)
    assert values["loss/weight_mean"] == pytest.approx(sum(coefficients) / 3)
    squares = sum(coefficient**2 for coefficient in coefficients)
    assert values["loss/weight_effective"] == pytest.approx(sum(coefficients) ** 2 / squares / 3 if squares else 0.0)


def test_dropped_tokens_are_counted_by_reason() -> None:
    out = icepop(leaf(*POLICY), SAMPLER_T, ADVANTAGES_T, ONES_T, floor=0.5, cap=2.0)
    values = metric_values(out.metrics)
    assert values["loss/dropped_low"] == values["loss/dropped_high"] == pytest.approx(1 / 3)


# two sequences: tokens 0, 1 with log r = 1, 0 and token 2 with log r = -1
SEGMENTS_T = torch.tensor([0, 0, 1])


@pytest.mark.parametrize(
    ("fn", "numbers", "coefficients"),
    [
        (sequence_tis, {"cap": 2.0}, (2.0, 2.0, 1 / E)),  # products e and 1/e
        (sequence_mis, {"cap": 2.0}, (0.0, 0.0, 1 / E)),
        (geometric_mis, {"floor": 0.5, "cap": 2.0}, (E, 1.0, 0.0)),  # geometric means e^0.5 = 1.65 and 1/e
    ],
)
def test_sequence_coefficients(fn: object, numbers: dict[str, float], coefficients: tuple[float, ...]) -> None:
    policy_T = leaf(*POLICY)
    out = fn(policy_T, SAMPLER_T, ADVANTAGES_T, ONES_T, SEGMENTS_T, **numbers)  # type: ignore[operator]
    assert grad(out.loss, policy_T) == pytest.approx([-coefficients[0], coefficients[1], -2 * coefficients[2]])


def test_sapo_by_hand() -> None:
    # r = 1: 4 sigma(0) = 2 times A, gradient A; r = 2, A = 1: 4 sigma(1), slope 4 sigma (1 - sigma) r
    # r = 2, A = -1 with tau = 2: 2 sigma(2), slope 4 sigma (1 - sigma) r
    policy_T = leaf(-1.0, math.log(2) - 1.0, math.log(2) - 1.0)
    out = sapo(policy_T, row(-1.0, -1.0, -1.0), row(1.0, 1.0, -1.0), ONES_T, tau_pos=1.0, tau_neg=2.0)
    s1, s2 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert out.loss.item() == pytest.approx(-2.0 - 4 * s1 + 2 * s2)
    assert grad(out.loss, policy_T) == pytest.approx([-1.0, -8 * s1 * (1 - s1), 8 * s2 * (1 - s2)])


def test_dro_by_hand() -> None:
    # -(A lp - beta / 2 d^2): lp = -1, d = 1, A = 2, beta = 0.5: -(-2 - 0.25); gradient -(A - beta d) = -1.5
    policy_T = leaf(-1.0)
    out = dro(policy_T, row(-2.0), row(2.0), row(1.0), beta=0.5)
    assert out.loss.item() == pytest.approx(2.25)
    assert grad(out.loss, policy_T) == pytest.approx([-1.5])


def test_gspo_by_hand() -> None:
    # sequence 0: log s = (0.2 + 0) / 2 = 0.1, A = 1, kept; sequence 1: log s = -0.5, A = -1, clipped at 0.8
    # L = -(2 e^0.1 - 0.8); the gradient of s is shared by its two tokens: -2 e^0.1 / 2 each
    policy_T = leaf(-1.0, -1.0, -1.5)
    arguments = (row(-1.2, -1.0, -1.0), row(1.0, 1.0, -1.0), ONES_T, SEGMENTS_T)
    out = gspo(policy_T, *arguments, clip_low=0.2, clip_high=0.2)
    assert out.loss.item() == pytest.approx(-2 * math.exp(0.1) + 0.8)
    assert grad(out.loss, policy_T) == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.0])
    assert metric_values(out.metrics)["loss/clip_frac_low"] == pytest.approx(1 / 3)


def test_gspo_token_gives_each_token_its_own_advantage() -> None:
    # equal values; the gradient of token t is s A_t instead of s mean(A)
    policy_T = leaf(-1.0, -1.0, -1.5)
    arguments = (row(-1.2, -1.0, -1.5), row(1.0, 3.0, 0.5), ONES_T, SEGMENTS_T)
    plain = gspo(policy_T, *arguments, clip_low=0.2, clip_high=0.2)
    token = gspo_token(policy_T, *arguments, clip_low=0.2, clip_high=0.2)
    assert token.loss.item() == pytest.approx(plain.loss.item())
    s = math.exp(0.1)
    assert grad(plain.loss, policy_T) == pytest.approx([-2 * s, -2 * s, -0.5])
    assert grad(token.loss, policy_T) == pytest.approx([-s, -3 * s, -0.5])


def test_gspo_ratio_mask_says_which_tokens_are_averaged() -> None:
    policy_T = leaf(-1.0, -1.0, -1.5)
    arguments = (row(-1.2, -1.0, -1.5), ONES_T, ONES_T, SEGMENTS_T)
    out = gspo(policy_T, *arguments, row(1.0, 0.0, 1.0), clip_low=0.5, clip_high=0.5)
    assert out.loss.item() == pytest.approx(-2 * math.exp(0.2) - 1.0)


def test_sequence_ppo_takes_the_product() -> None:
    # sequence 0: s = e^(0.1 + 0.05) = 1.16, A = 1, kept; sequence 1: s = e^0.5, A = 1, clipped at 1.2
    policy_T = leaf(-1.0, -1.0, -1.5)
    out = sequence_ppo(policy_T, row(-1.1, -1.05, -2.0), ONES_T, row(0.5, 0.5, 1.0), SEGMENTS_T)
    assert out.loss.item() == pytest.approx(-math.exp(0.15) - 1.2)
    assert grad(out.loss, policy_T) == pytest.approx([-math.exp(0.15), -math.exp(0.15), 0.0])


def test_decoupled_ppo_by_hand() -> None:
    # r = policy / proximal = e^0.1 kept, e^0.5 clipped to 1.2; b = 2 and 0.5; third token rejected (b = 0)
    policy_T = leaf(-1.0, -1.0, -1.0)
    proximal_T, sampler_T = row(-1.1, -1.5, -1.0), row(-1.1 - math.log(2), -1.5 + math.log(2), -9.0)
    out = decoupled_ppo(policy_T, proximal_T, sampler_T, row(2.0, 0.5, 0.0), ONES_T, ONES_T)
    assert out.loss.item() == pytest.approx(-2 * math.exp(0.1) - 0.5 * 1.2)
    assert grad(out.loss, policy_T) == pytest.approx([-2 * math.exp(0.1), 0.0, 0.0])
    assert metric_values(out.metrics)["loss/weight_mean"] == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "loglinear_ppo"])
def test_clip_fractions_count_tokens_whose_gradient_was_cut(name: str) -> None:
    # r = 1.25, 1.25, 1.25, 0.75, 0.75, 0.75 with A = 1, -1, 0 each, bounds 0.8 and 1.2: one of six at each bound
    log_ratio_T = row(1.25, 1.25, 1.25, 0.75, 0.75, 0.75).log()
    before_T, advantages_T, ones_T = torch.full_like(log_ratio_T, -1.0), row(1, -1, 0, 1, -1, 0), row(*[1.0] * 6)
    extra = {
        "ppo": {},
        "decoupled_ppo": {"proximal_logprobs_T": before_T, "behaviour_weights_T": ones_T},
        "loglinear_ppo": {"lags_T": ones_T},
    }[name]
    rows = {"sampler_logprobs_T": before_T, "advantages_T": advantages_T, "weights_T": ones_T}
    policy_T = (before_T + log_ratio_T).requires_grad_()
    out = LOSSES[name](policy_T, **rows, **extra)
    values = metric_values(out.metrics)
    assert values["loss/clip_frac_high"] == values["loss/clip_frac_low"] == pytest.approx(1 / 6)
    assert [gradient == 0 for gradient in grad(out.loss, policy_T)] == [True, False, True, False, True, True]


def test_loglinear_splits_the_ratio_by_lag() -> None:
    # Delta = policy - sampler = 0.3. lag 0 and 1: b = 1, r = e^0.3 (clipped at 1.2);
    # lag 3: b = e^0.2, r = e^0.1
    policy_T = leaf(-1.0, -1.0, -1.0)
    out = loglinear_ppo(policy_T, row(-1.3, -1.3, -1.3), row(0.0, 1.0, 3.0), ONES_T, ONES_T)
    assert out.loss.item() == pytest.approx(-1.2 - 1.2 - math.exp(0.3))
    assert grad(out.loss, policy_T) == pytest.approx([0.0, 0.0, -math.exp(0.3)])


def test_m2po_leaves_out_masked_tokens() -> None:
    policy_T = leaf(-1.0, -1.0, -1.0)
    out = m2po(policy_T, row(-1.5, -9.0, -1.0), row(1.0, 0.0, 1.0), ONES_T, ONES_T)
    assert grad(out.loss, policy_T) == pytest.approx([-math.exp(0.5), 0.0, -1.0])
    assert metric_values(out.metrics)["loss/dropped_m2"] == pytest.approx(1 / 3)


def test_distillation_pulls_towards_the_teacher() -> None:
    # on-policy: value = policy - teacher, gradient the same number: too likely is pushed down, too unlikely up
    policy_T = leaf(-1.0, -2.0)
    out = distillation(policy_T, row(-1.5, -1.0), row(-1.0, -2.0), row(1.0, 2.0))
    assert out.loss.item() == pytest.approx(0.5 - 2.0)
    assert grad(out.loss, policy_T) == pytest.approx([0.5, -2.0])


def test_distillation_gradient_is_that_of_the_reverse_kl() -> None:
    # expectation over a three-letter alphabet against autograd of the closed form
    logits = leaf(0.3, -0.2, 0.9)
    teacher_V = torch.log_softmax(row(1.0, 0.0, -1.0), 0)
    log_V = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((log_V.exp() * (log_V - teacher_V)).sum(), logits, retain_graph=True)[0]
    out = distillation(log_V, teacher_V, log_V.detach(), log_V.detach().exp())
    torch.testing.assert_close(torch.autograd.grad(out.loss, logits)[0], exact)
