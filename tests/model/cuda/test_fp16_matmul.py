"""Products of float16 factors with bfloat16 gradients, on a CPU: values, gradients, adapters, and what is kept."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.model.cuda.compile import FUSED
from headrace.model.cuda.fp16_matmul import (
    BF16,
    FP16,
    Fp16Operand,
    add_gradients,
    add_linear,
    addmm_fp32,
    cache_dtype,
    linears_fp16,
    supports_fp16_matmul,
    view_as_bf16,
    view_as_fp16,
)
from headrace.model.lora import ADAPTER, LoraLinear
from headrace.model.quantized import QuantizedLinear

ROUNDING, GRADIENT_ROUNDING = 2**-11, 2**-7  # of float16 once; of bfloat16 about twice


def factor(x: Tensor) -> Fp16Operand:
    """Make what a norm returns: a leaf that takes the gradient, and its bfloat16 copy."""
    return view_as_bf16(x.to(FP16)).requires_grad_(), x.to(BF16)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().float() - exact).norm() / exact.norm())


def layers(count: int, *, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(48, 32).to(BF16) if bias else nn.Linear(48, 32, bias=False).to(BF16) for _ in range(count)]


def float32(modules: list[Any]) -> list[Any]:
    return [copy.deepcopy(module).float() for module in modules]


@pytest.mark.parametrize("bias", [False, True])
def test_products_have_the_layers_values_and_gradients(bias: bool) -> None:
    modules, x = layers(3, bias=bias), torch.randn(1, 20, 48).to(FP16).float()
    same, exact = factor(x), float32(modules)
    pull = torch.randn(3, 1, 20, 32).to(BF16).float()
    outs = linears_fp16(same, modules)
    leaf = x.clone().requires_grad_()
    expected = [module(leaf) for module in exact]
    for out, wanted in zip(outs, expected, strict=True):
        assert out.dtype == BF16
        assert relative(view_as_fp16(out), wanted.detach()) < ROUNDING
    torch.autograd.backward(outs, [part.to(BF16) for part in pull])
    torch.autograd.backward(expected, list(pull))
    assert same[0].grad is not None
    assert same[0].grad.dtype == BF16
    assert relative(same[0].grad, leaf.grad) < GRADIENT_ROUNDING
    for module, other in zip(modules, exact, strict=True):
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert relative(mine.grad, theirs.grad) < GRADIENT_ROUNDING


def test_a_product_is_added_to_the_stream_without_rounding_it() -> None:
    [module], x, stream = layers(1, bias=False), torch.randn(1, 20, 48).to(FP16).float(), torch.randn(1, 20, 32) * 1e6
    same = factor(x)
    leaf = stream.clone().requires_grad_()
    out = add_linear(leaf, same, module)
    exact = stream.double() + (x.double() @ module.weight.double().T)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2**-22, atol=0.0)
    out.backward(torch.ones_like(out))
    assert leaf.grad is not None
    assert bool((leaf.grad == 1).all())
    assert relative(module.weight.grad, x[0].sum(0).expand(32, -1)) < GRADIENT_ROUNDING


@pytest.mark.parametrize("slot", [0, 1, None])
def test_adapters_add_what_they_add_to_a_plain_layer(slot: int | None) -> None:
    torch.manual_seed(0)
    [base] = layers(1, bias=True)
    module = LoraLinear(base, rank=4, alpha=8.0, slots=2, seed=0)
    module.up.data.normal_(std=0.5)
    [exact] = float32([module])
    x = torch.randn(1, 20, 48).to(BF16).float()
    same, leaf = factor(x), x.clone().requires_grad_()
    coarse = same[1]
    assert coarse is not None
    coarse.requires_grad_()
    token = ADAPTER.set(slot)
    try:
        [out], expected = linears_fp16(same, [module]), exact(leaf)
        onto = add_linear(torch.zeros(1, 20, 32), same, module)
    finally:
        ADAPTER.reset(token)
    small = GRADIENT_ROUNDING if slot is not None else ROUNDING
    assert relative(view_as_fp16(out), expected.detach()) < small
    assert relative(onto, expected.detach()) < small
    pull = torch.randn(1, 20, 32).to(BF16)
    out.backward(pull)
    expected.backward(pull.float())
    assert module.base.weight.grad is None
    through = add_gradients(same[0].grad, coarse.grad)
    assert through is not None
    assert relative(through, leaf.grad) < GRADIENT_ROUNDING
    if slot is not None:
        assert relative(module.up.grad[slot], exact.up.grad[slot]) < 2 * GRADIENT_ROUNDING
        assert bool((module.up.grad[1 - slot] == 0).all())


def layer(**changes: nn.Module) -> Any:
    """A decoder layer as far as it is looked at."""
    found, attention, mlp = nn.Module(), nn.Module(), nn.Module()
    for name in "qkvo":
        attention.add_module(f"{name}_proj", nn.Linear(8, 8).to(BF16))
    for name in ("gate", "up", "down"):
        mlp.add_module(f"{name}_proj", changes.get(f"{name}_proj", nn.Linear(8, 8).to(BF16)))
    found.add_module("self_attn", attention)
    found.add_module("mlp", mlp)
    found.add_module("input_layernorm", nn.RMSNorm(8).to(BF16))
    return found


def test_only_layers_whose_products_are_their_weights_fit() -> None:
    assert supports_fp16_matmul(layer())
    assert supports_fp16_matmul(layer(up_proj=LoraLinear(nn.Linear(8, 8).to(BF16), rank=2, alpha=2.0, slots=1, seed=0)))
    assert not supports_fp16_matmul(layer(up_proj=nn.Linear(8, 8)))
    assert not supports_fp16_matmul(layer(up_proj=QuantizedLinear(nn.Linear(8, 8), 8)))
    replaced = nn.Linear(8, 8).to(BF16)
    replaced.forward = lambda x: x
    assert not supports_fp16_matmul(layer(up_proj=replaced))

    class Packed(Tensor):
        pass

    packed = nn.Linear(8, 8).to(BF16)
    packed.weight = nn.Parameter(packed.weight.detach().as_subclass(Packed))
    assert not supports_fp16_matmul(layer(up_proj=packed))


@pytest.mark.parametrize("part", ["mlp.up_proj", "mlp", "self_attn", "input_layernorm", "mlp.down_proj.base"])
@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_layers_that_somebody_listens_to_do_not_fit(part: str, hook: str) -> None:
    whole = layer(down_proj=LoraLinear(nn.Linear(8, 8).to(BF16), rank=2, alpha=2.0, slots=1, seed=0))
    assert supports_fp16_matmul(whole)
    getattr(whole.get_submodule(part), f"register_{hook}")(lambda *_: None)  # as adapters over a shared base do
    assert not supports_fp16_matmul(whole)


def test_a_hook_of_the_whole_layer_is_called_anyway() -> None:
    whole = layer()
    whole.register_forward_hook(lambda *_: None)
    assert supports_fp16_matmul(whole)


def test_keys_and_values_are_fine_where_the_layers_are() -> None:
    fused, other = layer(), layer()
    setattr(fused, FUSED, True)
    for first, dtype, expected in (
        (fused, BF16, FP16),
        (other, BF16, BF16),
        (fused, torch.float32, torch.float32),
    ):
        trunk = nn.Module()
        trunk.layers = nn.ModuleList([first])
        model = SimpleNamespace(base_model=trunk, config=SimpleNamespace(num_hidden_layers=1))
        assert cache_dtype(model, dtype) == expected


@given(st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=20))
def test_bit_cast_numbers_keep_their_bits(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=FP16)
    assert view_as_fp16(view_as_bf16(x)).view(torch.int16).tolist() == x.view(torch.int16).tolist()


def test_every_usual_bfloat16_weight_is_a_float16_number() -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weights = bits.view(BF16)
    usual = weights[(weights.abs() < 60000) & (weights.abs() >= 2**-14)]
    assert len(usual) > 7000
    assert bool((usual.to(FP16).float() == usual.float()).all())


def test_the_stream_may_be_added_to_in_its_place() -> None:
    stream, x, weight = torch.randn(5, 8), torch.randn(5, 6).to(FP16), torch.randn(8, 6).to(FP16)
    expected = stream + x.float() @ weight.float().T
    addmm_fp32(stream, x, weight, out=stream)
    torch.testing.assert_close(stream, expected)


def test_a_gradient_that_did_not_come_is_none() -> None:
    one, other = torch.ones(2), torch.full((2,), 2.0)
    assert add_gradients(None, None) is None
    assert add_gradients(one, None) is one
    assert add_gradients(None, other) is other
    both = add_gradients(one, other)
    assert both is not None
    assert both.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("rank", [0, 4])
def test_frozen_layers_keep_no_operand_but_that_of_adapters(rank: int) -> None:
    """Without a bfloat16 copy: the float16 operand is kept for A, and nothing where there is none."""
    modules: list[Any] = layers(2, bias=True)
    for module in modules:
        module.requires_grad_(False)
    if rank:
        modules = [LoraLinear(module, rank=rank, alpha=8.0, slots=1, seed=seed) for seed, module in enumerate(modules)]
        for module in modules:
            module.up.data.normal_(std=0.5)
    exact, x = float32(modules), torch.randn(1, 20, 48).to(FP16).float()
    operand, leaf = view_as_bf16(x.to(FP16)).requires_grad_(), x.clone().requires_grad_()
    outs = linears_fp16((operand, None), modules)
    onto = add_linear(torch.zeros(1, 20, 32), (operand, None), modules[0])
    kept = [tensor for out in (outs[0], onto) for tensor in out.grad_fn.saved_tensors if tensor is not None]
    assert any(tensor.data_ptr() == operand.data_ptr() for tensor in kept) == bool(rank)
    expected = [module(leaf) for module in exact]
    pull = torch.randn(3, 1, 20, 32).to(BF16)
    torch.autograd.backward([*outs, onto], [pull[0], pull[1], pull[2].float()])
    torch.autograd.backward([*expected, exact[0](leaf)], list(pull.float()))
    assert relative(operand.grad, leaf.grad) < GRADIENT_ROUNDING
    for module, other in zip(modules if rank else [], exact, strict=bool(rank)):
        assert relative(module.down.grad, other.down.grad) < 2 * GRADIENT_ROUNDING
        assert relative(module.up.grad, other.up.grad) < 2 * GRADIENT_ROUNDING
