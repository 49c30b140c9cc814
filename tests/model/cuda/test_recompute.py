"""What is computed again for the backward pass: layers without their attention, and operands; the same gradients."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headrace.model.cuda.recompute import DeferredOperands, keep_attention

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCT = torch.ops.aten.addmm.default


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] = self.calls.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.inner(x).view(2, 5, 2, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(states, states.sin(), states.cos(), is_causal=True)
        return x + torch.tanh(self.outer(mixed.transpose(1, 2).reshape(10, 16)))


@pytest.mark.parametrize("recomputed", [False, True])
def test_attention_is_computed_once_and_the_rest_again(recomputed: bool) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(10, 16)
    layer(x).square().sum().backward()
    exact = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    with Count() as count:
        out = checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention) if recomputed else layer(x)
        assert (count.calls[ATTENTION], count.calls[PRODUCT]) == (1, 2)
        out.square().sum().backward()
    assert count.calls[ATTENTION] == 1
    assert count.calls[PRODUCT] == (4 if recomputed else 2)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, exact[name])


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
