"""Packed products: the plain product's numbers, one row's bits whatever the others are, and never an old weight."""

import copy

import pytest
import torch
from torch.nn import functional as F

from headrace.model.cpu.packed_linear import (
    ATTRIBUTE,
    SMALLEST,
    FusedLinear,
    PackedLinear,
    available,
    detached,
    invalidate_packed,
    linear,
    linear_backward_input,
    pack_linears,
    packed_weight,
)

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no oneDNN")


def weight(rows: int = 512, columns: int = 192, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1


def inputs(rows: int, columns: int = 192) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_it_is_the_plain_product() -> None:
    w, x, bias = weight(), inputs(17), torch.linspace(-1, 1, 512)
    assert packed_weight(w) is not None
    exact = x.double() @ w.double().T + bias.double()
    torch.testing.assert_close(linear(x, w, bias).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 8, 24, 33, 130])
def test_a_row_has_the_same_bits_whatever_the_others_are(rows: int) -> None:
    w, x = weight(), inputs(160)
    assert torch.equal(linear(x[:rows].clone(), w), linear(x, w)[:rows])


def test_gradients_are_the_plain_layers() -> None:
    plain = torch.nn.Linear(192, 512)
    other = copy.deepcopy(plain)
    pack_linears(torch.nn.Sequential(other))
    assert type(other) is PackedLinear
    found = []
    for layer in (plain, other):
        x = inputs(11).reshape(1, 11, 192).requires_grad_()
        (layer(x) ** 2).sum().backward()
        found.append((x.grad, layer.weight.grad, layer.bias.grad))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_changed_weight_is_packed_again() -> None:
    w, x = torch.nn.Parameter(weight()), inputs(8)
    with torch.no_grad():
        before = linear(x, w)
        w.mul_(2.0)
        assert torch.equal(linear(x, w), 2.0 * before)
        w.data = weight(seed=3)
        torch.testing.assert_close(linear(x, w), x @ w.T)


def test_an_unchanged_weight_is_packed_once_and_the_copy_is_not_shared_with_a_deep_copy() -> None:
    w = torch.nn.Parameter(weight())
    assert packed_weight(w) is packed_weight(w)
    assert getattr(copy.deepcopy(w), ATTRIBUTE, None) is None


def test_other_types_small_weights_and_switched_off_onednn_stay_plain() -> None:
    assert packed_weight(weight().double()) is None
    assert packed_weight(weight().bfloat16()) is None
    small = torch.zeros(SMALLEST // 64 - 1, 64)
    assert packed_weight(small) is None
    w, x = weight(), inputs(5)
    with torch.backends.mkldnn.flags(enabled=False):
        assert packed_weight(w) is None
        assert torch.equal(linear(x, w), F.linear(x, w))


def test_the_way_back_is_the_plain_product() -> None:
    w, grad = weight(), inputs(9, 512)
    torch.testing.assert_close(
        linear_backward_input(grad, w).double(), grad.double() @ w.double(), rtol=1e-5, atol=1e-4
    )
    assert torch.equal(linear_backward_input(grad.double(), w.double()), grad.double() @ w.double())


def test_a_change_that_torch_does_not_count_is_seen() -> None:
    """Fused optimisers and `.data` write a tensor without raising its version."""
    w, x = torch.nn.Parameter(weight()), inputs(8)
    with torch.no_grad():
        linear(x, w)
        before = w._version
        w.data.mul_(2.0)
        assert w._version == before
        torch.testing.assert_close(linear(x, w), x @ w.T)
    optimizer = torch.optim.AdamW([w], lr=0.1, fused=True)
    w.grad = torch.ones_like(w)
    optimizer.step()
    torch.testing.assert_close(linear(x, w), x @ w.T)


def test_in_inference_mode_such_a_change_needs_to_be_announced() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(192, 512, bias=False), torch.nn.Linear(192, 512, bias=False))
    pack_linears(layers)
    product, x = FusedLinear(list(layers)), inputs(8)
    with torch.inference_mode():
        for factor in (1.0, 3.0):
            for layer in layers:
                layer.weight.data.mul_(factor)
            invalidate_packed(layers)
            expected = torch.cat([x @ layer.weight.T for layer in layers], dim=1)
            torch.testing.assert_close(product(x), expected)
            torch.testing.assert_close(layers[0](x), x @ layers[0].weight.T)


def test_an_announced_change_is_seen_by_a_product_whose_layers_were_used_first() -> None:
    """Trainer and engine share layers: the one may pack a weight anew before the other looks."""
    layers = torch.nn.Sequential(torch.nn.Linear(192, 512, bias=False), torch.nn.Linear(192, 512, bias=False))
    pack_linears(layers)
    product, x = FusedLinear(list(layers)), inputs(8)
    with torch.inference_mode():
        product(x)
        for layer in layers:
            layer.weight.data.mul_(3.0)
        invalidate_packed(layers)
        layers[0](x)
        torch.testing.assert_close(product(x), torch.cat([x @ layer.weight.T for layer in layers], dim=1))


def test_a_copy_that_is_there_is_used_without_a_gradient_and_one_that_is_not_dies_with_its_user() -> None:
    table = torch.nn.Parameter(weight())
    assert not hasattr(detached(table), ATTRIBUTE)
    with torch.inference_mode():
        made = packed_weight(table)
    plain = detached(table)
    assert not plain.requires_grad
    assert packed_weight(plain) is made
    with torch.no_grad():
        table[0, 0] += 1.0
    assert packed_weight(detached(table)) is not made
    torch._foreach_add_([table.data], 1.0)  # torch does not count it
    assert packed_weight(detached(table)) is not made
