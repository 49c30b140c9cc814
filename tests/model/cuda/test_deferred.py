"""Operands that are computed again for the backward pass: the same gradients, and nothing kept."""

import weakref

import torch
from torch import Tensor, nn

from headrace.model.cuda.deferred import DeferredOperands


def test_an_operand_is_freed_and_computed_again_for_the_gradient() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(6, 8), nn.Linear(6, 8), torch.randn(4, 6, requires_grad=True)
    (first(x.sin()) * second(x.sin())).sum().backward()
    exact = [first.weight.grad.clone(), second.weight.grad.clone(), x.grad.clone()]
    for tensor in (first.weight, second.weight, x):
        tensor.grad = None
    made: list[int] = []

    def again() -> Tensor:
        made.append(1)
        return x.detach().sin()

    with DeferredOperands() as deferred:
        operand = x.sin()
        alive = weakref.ref(operand.untyped_storage())
        deferred.defer(operand, again)
        out = first(operand) * second(operand.view(2, 2, 6)).view(4, 8)
        del operand
        assert alive() is not None  # no other tensor may take its place while it could be mistaken for it
    assert alive() is None
    assert not made
    out.sum().backward()
    assert len(made) == 2
    for tensor, wanted in zip((first.weight, second.weight, x), exact, strict=True):
        torch.testing.assert_close(tensor.grad, wanted)


def test_a_part_of_an_operand_and_other_tensors_are_kept() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with DeferredOperands() as deferred:
        operand = x * 2
        deferred.defer(operand, lambda: torch.full((4, 6), torch.nan))
        out = operand[:2].sin().sum() + (operand.detach().t() @ x).sum()
    out.backward()
    assert bool(torch.isfinite(x.grad).all())
