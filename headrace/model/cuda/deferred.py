"""Keep how to compute an operand again instead of the operand: a norm's output, or the gate's product.

The gradient of an adapter needs the operand of its layer. Norms and gates are one cheap kernel over tensors that their
own backward pass keeps in any case, so running it once more costs little time and saves a quarter of a layer's memory;
no matrix product is computed twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
