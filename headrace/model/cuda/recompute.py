"""Recompute a layer for the backward pass without its attention, whose output and softmax sums are kept.

Attention is most of a layer's time where sequences are long, and its output is a small part of what a layer keeps.
"""

from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ATTENTION = (
    ("aten", "_flash_attention_forward"),
    ("aten", "_scaled_dot_product_cudnn_attention"),
    ("aten", "_scaled_dot_product_efficient_attention"),
    ("aten", "_scaled_dot_product_flash_attention"),
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("torch_attn", "_varlen_attn"),  # registered by torch.nn.attention.varlen
)

# in the passes of a layer that is computed again: checkpointing keeps nothing but what it is told to
RECOMPUTING: ContextVar[bool] = ContextVar("headrace_recomputing", default=False)


def keep_attention() -> Any:
    """Return the contexts of a layer's first and second forward pass, as `checkpoint` takes them."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_attention(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and tuple(op._schema.name.split("::")) in ATTENTION
