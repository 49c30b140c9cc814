"""Compute again for the backward pass what is cheap: a layer without its attention, or single operands of adapters.

A layer that is recomputed keeps its attention's output and softmax sums: attention is most of its time where sequences
are long, and the output is a small part of what a layer keeps.

The gradient of an adapter needs the operand of its layer. Norms and gates are one cheap kernel over tensors that their
own backward pass keeps in any case, so running it once more costs little time and saves a quarter of a layer's memory;
no matrix product is computed twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
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


@dataclass(frozen=True, slots=True)
class _Deferred:
    make: Callable[[], Tensor]
    shape: torch.Size


class DeferredOperands:
    """Inside of `with`, autograd keeps the function given to `defer` in place of a tensor or of a view of all of it.

    Tensors given to `defer` live until the end of the block, so that no other tensor takes their place in memory.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> "DeferredOperands":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._made.clear()

    def defer(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Compute this tensor by `make` where a backward pass needs it."""
        self._made[tensor.data_ptr()] = tensor, make

    def _pack(self, tensor: Tensor) -> Tensor | _Deferred:
        tensor_and_make = self._made.get(tensor.data_ptr())
        if tensor_and_make is None:
            return tensor
        whole, make = tensor_and_make
        same = whole.numel() == tensor.numel() and whole.dtype == tensor.dtype and tensor.is_contiguous()
        return _Deferred(make, tensor.shape) if same else tensor


def _unpack(kept: Tensor | _Deferred) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.make().view(kept.shape)
