"""The grouped products of experts, as CUDA computes them, against the loop over experts of a CPU."""

import copy
from typing import Any

import pytest
import torch

from headrace.model import experts as cpu
from headrace.model.cuda import grouped_experts as grouped
from headrace.model.experts import mix_experts
from headrace.model.load import prepare
from headrace.model.lora import BESIDE, add_lora
from support.model_variants import make

VARIANTS = ("qwen3_moe", "mixtral, window", "glm4_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "qwen3_5_moe_text")


def experts_of(variant: str, *, adapted: bool) -> Any:
    model = prepare(make(variant), None, source=variant).model
    if adapted:
        add_lora(model, rank=3, alpha=5.0, targets=("experts",), seed=0)
    found = next(module.experts for module in model.modules() if hasattr(module, "experts"))
    for name, child in found.named_children():
        if name.endswith(BESIDE):
            torch.nn.init.normal_(child.up, std=0.2)
    return found


def inputs(experts: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    weights, chosen = torch.rand(tokens, experts.num_experts, generator=generator).topk(2)
    chosen[:, 0] = torch.where(chosen[:, 0] == 1, 0, chosen[:, 0])  # an expert that few tokens choose
    return torch.randn(tokens, width, generator=generator), chosen, weights


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_the_loop(variant: str, tokens: int, adapted: bool) -> None:
    if adapted and variant == "qwen3_5_moe_text":
        pytest.skip("its adapters are those of qwen3_moe")
    looped = experts_of(variant, adapted=adapted)
    sorted_ = copy.deepcopy(looped)
    hidden, chosen, weights = inputs(looped, tokens)
    results = []
    for module, mix in ((looped, mix_experts), (sorted_, lambda *args: grouped.mix_sorted(*args, cpu._product))):
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = mix(module, leaves[0], chosen, leaves[1])
        (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
        grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
        results.append([out.detach(), leaves[0].grad, leaves[1].grad, *(grad for _, grad in sorted(grads.items()))])
        assert len(grads) == (4 if adapted else len(list(module.parameters())))
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5 * float(its.abs().max()))


def test_experts_that_nothing_chose_have_no_gradient_and_frozen_ones_keep_no_inputs() -> None:
    experts = experts_of("qwen3_moe", adapted=False)
    hidden, chosen, weights = inputs(experts, 9)
    chosen = torch.tensor([[0, 3]]).expand_as(chosen)
    grouped.mix_sorted(experts, hidden, chosen, weights, cpu._product).sum().backward()
    assert [bool(gradient.any()) for gradient in experts.down_proj.grad] == [True, False, False, True, False]
    experts.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        grouped.mix_sorted(experts, hidden.requires_grad_(), chosen, weights, cpu._product)
    wide = [tensor for tensor in saved if tensor.is_floating_point() and tensor.ndim == 2]
    assert [tensor.shape[1] for tensor in wide] == [2 * experts.down_proj.shape[2]]  # gate and up of every row alone


def test_a_token_goes_to_the_row_of_its_expert() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [2, 3]])
    rows = grouped.SortedRows.of(chosen, 5)
    assert chosen.flatten()[rows.order_N].tolist() == [0, 1, 2, 2, 2, 3]
    assert rows.order_N[rows.place_N].tolist() == list(range(6))
    assert rows.ends_E.tolist() == [1, 2, 5, 6, 6]
    assert rows.ends_E.dtype == torch.int32
