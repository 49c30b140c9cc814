"""Check adapters: a model with LoRA layers computes what it would with merged weights, and so do their gradients.

With W' = W + s B A, the gradients of the factors follow from that of W': dA = s B^T dW' and dB = s dW' A^T. The
reference merges the factors into its weights, and knows no LoRA layer.

Shape letters: R rank, I inputs, O outputs.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.model.load import LanguageModel
from headrace.model.lora import BESIDE, LoraLinear, LoraParameter, add_lora, is_transposed, lora_layers
from headrace.verify.gradient_check import (
    ALONE,
    CLIP,
    MARGIN,
    SMALL_LOSS,
    measured,
    relative_error,
    training_data,
    where,
    yardstick,
)
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.reference import plain_model, reference_gradients, reference_model
from headrace.verify.subject import Played, VerifySubject

RANK, ALPHA = 4, 8.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts", "router")
SPREAD = 0.02  # of the factors B, which a new adapter has at 0


def check_adapters(parts: VerifySubject, played: Played) -> PropertyResult:
    """Compare the factors' gradients with those that follow from the gradients of merged weights in float64."""
    data = [replace(datum, experts=None) for datum in training_data(played)]  # adapters let routers choose others
    adapted = _with_adapters(parts.lm)
    layers = dict(lora_layers(adapted.model))
    merged = _merged_copy(adapted)
    exact = reference_gradients(reference_model(merged), data, clip=CLIP)[0]
    rounding = yardstick(exact, reference_gradients(plain_model(merged), data, clip=CLIP)[0])
    actual = measured(replace(parts, lm=adapted), [data], parts.cross_entropy, micro_batch_tokens=ALONE)
    expected = _factor_gradients(layers, exact.gradient.of)
    factors = {name: gradient for name, gradient in actual.of.items() if name in expected}
    loss = abs(actual.loss - exact.gradient.loss) / max(abs(exact.gradient.loss), SMALL_LOSS)
    return PropertyResult(
        name="adapters are merged weights",
        figures=(
            Figure(label="loss, relative error", value=loss, bound=MARGIN * rounding.loss),
            Figure(
                label="gradient of the factors, relative error",
                value=relative_error(factors, expected),
                bound=MARGIN * rounding.gradient,
            ),
        ),
        detail=f"adapters on {len(layers)} layers; {where(factors, expected)}",
    )


def _with_adapters(lm: LanguageModel) -> LanguageModel:
    """Copy the model with adapters on all linear layers but the head, on routers and on experts; no factor is 0."""
    adapted = replace(lm, model=copy.deepcopy(lm.model))
    add_lora(adapted.model, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, layer in lora_layers(adapted.model):
            layer.up.copy_(SPREAD * torch.randn(layer.up.shape, generator=generator))
    return adapted


def _merged_copy(lm: LanguageModel) -> LanguageModel:
    """Copy the model with every LoRA layer replaced by its base layer, merged."""
    model: Any = copy.deepcopy(lm.model)
    for name, layer in list(lora_layers(model)):
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(layer, LoraParameter):
            weight = getattr(owner, leaf.removesuffix(BESIDE))
            with torch.no_grad():
                weight.copy_(layer.merged_weight(weight))
            delattr(owner, leaf)
            continue
        with torch.no_grad():
            layer.base.weight.copy_(layer.merged_weight())
        setattr(owner, leaf, layer.base)
    model.requires_grad_(True)
    return replace(lm, model=model)


def _factor_gradients(
    layers: Mapping[str, LoraLinear | LoraParameter], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compute dA and dB of each layer from the gradient of its merged weight."""
    expected = {}
    for name, layer in layers.items():
        if isinstance(layer, LoraParameter):
            expected[f"{name}.down"], expected[f"{name}.up"] = _parameter_gradients(
                layer, gradients[name.removesuffix(BESIDE)]
            )
            continue
        grad = gradients[f"{name}.weight"]
        grad_OI = grad.T if is_transposed(layer.base) else grad
        up_OR, down_RI = layer.up[0].detach().to(grad.dtype), layer.down[0].detach().to(grad.dtype)
        expected[f"{name}.down"] = layer.scale * (up_OR.T @ grad_OI)[None]
        expected[f"{name}.up"] = layer.scale * (grad_OI @ down_RI.T)[None]
    return expected


def _parameter_gradients(layer: LoraParameter, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute dA and dB of a router or of all experts, laid out as the factors are."""
    grad_EOI = grad if grad.ndim == 3 else grad[None]
    if layer.transposed:
        grad_EOI = grad_EOI.transpose(1, 2)
    experts = layer.experts
    down_ERI = layer.down[0].detach().to(grad.dtype).view(experts, layer.rank, -1)
    up_EOR = layer.up[0].detach().to(grad.dtype).view(-1, layer.rank, experts).permute(2, 0, 1)
    down = layer.scale * (up_EOR.transpose(1, 2) @ grad_EOI)
    up = layer.scale * (grad_EOI @ down_ERI.transpose(1, 2))
    return down.flatten(0, 1)[None], up.permute(1, 2, 0).flatten(1)[None]
