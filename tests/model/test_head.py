"""The chunked head equals a plain log-softmax in value and gradient, and holds one chunk of logits at a time.

Shape letters: T tokens, D width, V vocabulary, K alternatives per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, composite, integers, sampled_from
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.model.head import PLAIN, LogitRule, Targets, fused_loss, logprobs

Loss = Callable[[slice, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    hidden_TD: Tensor
    weight_VD: Tensor
    targets: Targets
    factors: Tensor  # shape of the targets
    entropy_factor: float
    chunk_tokens: int
    rule: LogitRule = PLAIN

    @property
    def want_entropy(self) -> bool:
        return self.entropy_factor != 0.0

    def loss(self, span: slice, picked: Tensor, entropy: Tensor | None) -> Tensor:
        """A curved function of the log-probs, so that a wrong factor anywhere shows."""
        value = (self.factors[span] * (picked + 0.1 * picked**2)).sum()
        if entropy is not None:
            value = value + self.entropy_factor * (entropy**2).sum()
        return value


def make_problem(
    *,
    tokens: int = 7,
    vocabulary: int = 11,
    alternatives: int = 0,
    tempered: bool = True,
    entropy_factor: float = 0.3,
    chunk_tokens: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    rule: LogitRule = PLAIN,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, alternatives) if alternatives else (tokens,)
    return Problem(
        hidden_TD=torch.randn(tokens, 5, generator=generator).to(dtype),
        weight_VD=torch.randn(vocabulary, 5, generator=generator).to(dtype),
        targets=Targets(
            torch.randint(vocabulary, shape, generator=generator),
            (0.4 + torch.rand(tokens, generator=generator)).to(dtype) if tempered else None,
        ),
        factors=torch.randn(shape, generator=generator).to(dtype),
        entropy_factor=entropy_factor,
        chunk_tokens=chunk_tokens,
        rule=rule,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    grad_hidden: Tensor
    grad_weight: Tensor


def plain(problem: Problem) -> Answer:
    """Full logits and torch's own autograd."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (problem.hidden_TD, problem.weight_VD))
    logits = problem.rule.scale * (hidden @ weight.T)
    if problem.rule.softcap is not None:
        logits = torch.tanh(logits / problem.rule.softcap) * problem.rule.softcap
    if problem.targets.temperature is not None:
        logits = logits / problem.targets.temperature[:, None]
    logp = torch.log_softmax(logits, dim=-1)
    tokens = problem.targets.tokens
    picked = torch.stack([logp[t][tokens[t]] for t in range(len(tokens))])
    entropy = -(logp.exp() * logp).sum(-1) if problem.want_entropy else None
    loss = problem.loss(slice(None), picked, entropy)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return Answer(loss=loss, logprobs=picked, entropy=entropy, grad_hidden=grad_hidden, grad_weight=grad_weight)


def fused(problem: Problem) -> Answer:
    grad_weight = torch.zeros_like(problem.weight_VD)
    losses: list[Tensor] = []

    def evaluate(span: slice, picked: Tensor, entropy: Tensor | None) -> Tensor:
        value = problem.loss(span, picked, entropy)
        losses.append(value.detach())
        return value

    out = fused_loss(
        problem.hidden_TD,
        problem.weight_VD,
        problem.targets,
        evaluate,
        want_entropy=problem.want_entropy,
        grad_weight_VD=grad_weight,
        want_gradient=True,
        chunk_tokens=problem.chunk_tokens,
        rule=problem.rule,
    )
    assert out.grad_hidden_TD is not None
    return Answer(
        loss=torch.stack(losses).sum(),
        logprobs=out.logprobs,
        entropy=out.entropy_T,
        grad_hidden=out.grad_hidden_TD,
        grad_weight=grad_weight,
    )


def whole(problem: Problem) -> Answer:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (problem.hidden_TD, problem.weight_VD))
    picked, entropy = logprobs(
        hidden,
        weight,
        problem.targets,
        want_entropy=problem.want_entropy,
        chunk_tokens=problem.chunk_tokens,
        rule=problem.rule,
    )
    loss = problem.loss(slice(None), picked, entropy)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return Answer(loss=loss, logprobs=picked, entropy=entropy, grad_hidden=grad_hidden, grad_weight=grad_weight)


PATHS = {"fused": fused, "whole": whole}


def assert_close(ours: Answer, expected: Answer, *, tolerance: float) -> None:
    for name in ("loss", "logprobs", "entropy", "grad_hidden", "grad_weight"):
        left, right = getattr(ours, name), getattr(expected, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.shape == right.shape, name
            assert torch.linalg.vector_norm(left - right) <= tolerance * (1 + torch.linalg.vector_norm(right)), name


@composite
def problems(draw: Any) -> dict[str, Any]:
    return {
        "tokens": draw(integers(1, 9)),
        "vocabulary": draw(sampled_from([2, 11, 64])),
        "alternatives": draw(sampled_from([0, 1, 3])),  # drawn with repetition: the same token may be there twice
        "tempered": draw(booleans()),
        "entropy_factor": draw(sampled_from([0.0, 0.3])),
        "chunk_tokens": draw(integers(1, 10)),
        "seed": draw(integers(0, 2**32)),
        "rule": draw(sampled_from([PLAIN, LogitRule(scale=0.3), LogitRule(softcap=1.5), LogitRule(2.0, 3.0)])),
    }


@settings(max_examples=60, deadline=None)
@given(problems())
def test_both_ways_in_equal_a_plain_log_softmax(arguments: dict[str, Any]) -> None:
    problem = make_problem(**arguments)
    expected = plain(problem)
    for path in PATHS.values():
        assert_close(path(problem), expected, tolerance=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_float32_is_right_to_its_own_rounding(path: str) -> None:
    exact = make_problem(tokens=40, vocabulary=300, chunk_tokens=16)
    rounded = make_problem(tokens=40, vocabulary=300, chunk_tokens=16, dtype=torch.float32)
    assert_close(PATHS[path](rounded), plain(exact), tolerance=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_unlikely_tokens_of_scaled_logits_keep_their_bits(path: str) -> None:
    """Log-probs below -80 are read off the log-softmax, under the same rule."""
    exact = make_problem(tokens=40, vocabulary=30, entropy_factor=0.0, rule=LogitRule(scale=60.0))
    rounded = make_problem(
        tokens=40, vocabulary=30, entropy_factor=0.0, rule=LogitRule(scale=60.0), dtype=torch.float32
    )
    assert plain(exact).logprobs.min() < -200
    assert torch.allclose(PATHS[path](rounded).logprobs.double(), plain(exact).logprobs, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("path", PATHS)
def test_a_sure_token_has_entropy_zero_and_finite_gradients(path: str) -> None:
    # logits 1000 apart: p is exactly 1 or 0, log p 0 or -1000; p log p must not become nan
    problem = Problem(
        hidden_TD=torch.ones(2, 1, dtype=torch.float64),
        weight_VD=torch.tensor([[1000.0], [0.0]], dtype=torch.float64),
        targets=Targets(torch.tensor([0, 1])),
        factors=torch.ones(2, dtype=torch.float64),
        entropy_factor=1.0,
        chunk_tokens=2,
    )
    answer = PATHS[path](problem)
    assert answer.logprobs.tolist() == [0.0, -1000.0]
    assert answer.entropy is not None
    assert answer.entropy.tolist() == [0.0, 0.0]
    assert torch.isfinite(answer.grad_hidden).all()
    assert torch.isfinite(answer.grad_weight).all()


def test_by_hand() -> None:
    # z = h w / tau = (ln 3, 0) at tau 1: p = (3/4, 1/4). At tau 1/2: z = (2 ln 3, 0), p = (9/10, 1/10).
    log3 = torch.tensor(3.0, dtype=torch.float64).log()
    hidden = log3.expand(2, 1).clone().requires_grad_()
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    targets = Targets(torch.tensor([0, 1]), torch.tensor([1.0, 0.5], dtype=torch.float64))
    picked, entropy = logprobs(hidden, weight, targets, want_entropy=True, chunk_tokens=1)
    assert picked.exp().tolist() == pytest.approx([0.75, 0.1])
    assert entropy is not None
    assert entropy[0].item() == pytest.approx(0.5623351446188083)  # -(3/4 ln 3/4 + 1/4 ln 1/4)
    # d log p_y / dh = (1[y = 0] - p_0) w / tau: 0.25 for the first, -0.9 / 0.5 for the second
    (gradient,) = torch.autograd.grad(picked.sum(), hidden)
    assert gradient[:, 0].tolist() == pytest.approx([0.25, -1.8])


def test_the_whole_gradient_passes_gradcheck() -> None:
    problem = make_problem(tokens=4, vocabulary=6, chunk_tokens=3)

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        picked, entropy = logprobs(hidden, weight, problem.targets, want_entropy=True, chunk_tokens=3)
        assert entropy is not None
        return picked, entropy

    inputs = (problem.hidden_TD.clone().requires_grad_(), problem.weight_VD.clone().requires_grad_())
    assert torch.autograd.gradcheck(run, inputs)


def test_a_loss_without_a_gradient_gives_zero_and_one_of_the_entropy_alone_gives_its_own() -> None:
    problem = make_problem(entropy_factor=0.0)

    def gradient(loss: Loss, *, want_entropy: bool) -> Tensor:
        out = fused_loss(
            problem.hidden_TD,
            problem.weight_VD,
            problem.targets,
            loss,
            want_entropy=want_entropy,
            grad_weight_VD=None,
            want_gradient=True,
            chunk_tokens=2,
        )
        assert out.grad_hidden_TD is not None
        return out.grad_hidden_TD

    constant = gradient(lambda span, picked, entropy: torch.tensor(3.0), want_entropy=False)
    assert constant.abs().max() == 0.0

    def only_entropy(span: slice, picked: Tensor, entropy: Tensor | None) -> Tensor:
        assert entropy is not None
        return entropy.sum()

    hidden = problem.hidden_TD.clone().requires_grad_()
    assert problem.targets.temperature is not None
    logp = torch.log_softmax(hidden @ problem.weight_VD.T / problem.targets.temperature[:, None], dim=-1)
    (expected,) = torch.autograd.grad(-(logp.exp() * logp).sum(), hidden)
    assert torch.allclose(gradient(only_entropy, want_entropy=True), expected, rtol=1e-12, atol=1e-12)


def test_without_a_wanted_gradient_none_is_made() -> None:
    problem = make_problem()
    out = fused_loss(
        problem.hidden_TD,
        problem.weight_VD,
        problem.targets,
        problem.loss,
        want_entropy=False,
        grad_weight_VD=None,
        want_gradient=False,
        chunk_tokens=3,
    )
    assert out.grad_hidden_TD is None
    assert out.entropy_T is None
    assert torch.allclose(out.logprobs, plain(problem).logprobs, rtol=1e-12)


# --- half precision --------------------------------------------------------------------------------------------------


def test_chunks_of_a_half_precision_weight_add_up_in_float32() -> None:
    # 1024 equal tokens, a chunk each: a bfloat16 sum of equal terms stops growing at 256 of them
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    picked, _ = logprobs(hidden, weight, Targets(torch.zeros(1024, dtype=torch.long)), chunk_tokens=1)
    picked.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [512.0, -512.0]  # 1024 times 1 - p = 1/2


def test_half_precision_logprobs_are_float32_of_half_precision_logits() -> None:
    problem = make_problem(tempered=False, entropy_factor=0.0, dtype=torch.bfloat16)
    picked, _ = logprobs(problem.hidden_TD, problem.weight_VD, problem.targets)
    logits = (problem.hidden_TD @ problem.weight_VD.T).float()
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(7), problem.targets.tokens]
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked, expected, rtol=0, atol=2e-6)  # half precision would be off by 1e-2


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("path", PATHS)
def test_no_tensor_is_larger_than_one_chunk_of_logits(path: str) -> None:
    tokens, vocabulary, chunk = 64, 96, 8
    problem = make_problem(tokens=tokens, vocabulary=vocabulary, chunk_tokens=chunk)
    assert vocabulary * 5 < chunk * vocabulary  # the weight is smaller than a chunk of logits
    with Largest() as ours:
        PATHS[path](problem)
    assert ours.numel == chunk * vocabulary
    with Largest() as full:
        plain(problem)
    assert full.numel == tokens * vocabulary


@pytest.mark.parametrize("gap", [50.0, 90.0, 400.0])
def test_tokens_of_no_probability_have_log_probs(gap: float) -> None:
    """exp(-90) has few bits in float32 and exp(-400) none; the log-prob is still what it is."""
    weight = torch.zeros(6, 4)
    weight[0, 0], weight[3, 0] = 1.0, -1.0
    hidden = torch.zeros(3, 4)
    hidden[:, 0] = torch.tensor([gap / 2, 0.0, gap / 2])
    targets = Targets(torch.tensor([3, 1, 0]), torch.tensor([1.0, 1.0, 2.0]))
    expected = torch.log_softmax(hidden.double() @ weight.double().T / targets.temperature[:, None], dim=-1)
    found, _ = logprobs(hidden, weight, targets)
    torch.testing.assert_close(found.double(), expected.gather(1, targets.tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6)
