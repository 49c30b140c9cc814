"""Compile decoder layers with torch.compile, for training: norms, rotation and activation become a few kernels.

The first step waits for the compiler. Attention stays a call of its own between two compiled parts, so that sequence
lengths, adapters and caches are not compiled in; one compilation serves all layers and all numbers of tokens. Sampling
and scoring, which run without gradients, keep the plain layers.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from headrace.errors import ModelError
from headrace.model.lora import lora_layers
from headrace.model.supported import decoder_layers

COMPILED = "_headrace_compiled"
FUSED = "_headrace_fused"  # on a layer: a function that takes the place of its class's (`model/cuda/layers.py`)


def compile_layers(model: Any) -> None:
    """Compile every decoder layer for passes with gradients. Call it before `recompute_layers`, if both are used.

    Raises ModelError for a model with adapters, whose choice per token a compiled layer could not follow.
    """
    if any(True for _ in lora_layers(model)):
        raise ModelError("model.compile does not go with [model.lora]: set it to false")
    for layer in decoder_layers(model):
        setattr(layer, COMPILED, True)
        layer.forward = MethodType(_compiled, layer)  # bound to the layer, so a deep copy of the model uses its own


def plain_layers(model: nn.Module) -> None:
    """Restore the forward functions of all modules that fusing, compiling or recomputing has replaced."""
    for module in model.modules():
        module.__dict__.pop("forward", None)


def layer_forward(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that computes this layer now: the class's own, the same compiled, or a fused one."""
    forward = type(layer).forward
    if torch.is_grad_enabled() and getattr(layer, COMPILED, False):
        return compiled_forward(forward)
    return getattr(layer, FUSED, forward)


def _compiled(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer_forward(layer)(layer, *args, **kwargs)


@cache
def compiled_forward(forward: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compile one function for all layers of a class; their weights are arguments to it."""
    return torch.compile(forward, dynamic=True, backend=backend)
