"""Call cuDNN's attention: on Hopper faster than FlashAttention 2, for long sequences and for several of one length.

It takes a batch of sequences of one length, not sequences of several lengths end to end, and its backward pass adds
up in no fixed order, so deterministic runs do without it.

Shape letters: N sequences, Q query heads, H key-value heads, T tokens, D width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
WIDEST = 128  # of a head
Saved = Sequence[Any]  # what the backward pass needs beside the operands and the output


def cudnn_applies(query: Tensor) -> bool:
    """Tell whether cuDNN can compute attention of these queries, and may."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and width % 8 == 0
        and width <= WIDEST
        and _hopper(query.device.index)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _hopper(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9 and bool(torch.backends.cudnn.is_available())  # type: ignore[no-untyped-call]


def attention(query_NQTD: Tensor, key_NHTD: Tensor, value_NHTD: Tensor, scale: float | None, *, causal: bool) -> Tensor:
    """Compute attention of N sequences of one length, differentiable."""
    out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query_NQTD, key_NHTD, value_NHTD, None, torch.is_grad_enabled(), 0.0, causal, False, scale=scale
    )
    assert isinstance(out, Tensor)
    return out


def forward(
    query_NQTD: Tensor, key_NHTD: Tensor, value_NHTD: Tensor, scale: float | None, *, causal: bool
) -> tuple[Tensor, Saved]:
    """Compute attention, and what `backward` needs."""
    out, *saved, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query_NQTD, key_NHTD, value_NHTD, None, True, 0.0, causal, False, scale=scale
    )
    return out, saved


def backward(
    grad_NQTD: Tensor,
    query_NQTD: Tensor,
    key_NHTD: Tensor,
    value_NHTD: Tensor,
    out_NQTD: Tensor,
    saved: Saved,
    scale: float | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values."""
    lse, ends_q, ends_k, longest_q, longest_k, seed, offset = saved
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_NQTD, query_NQTD, key_NHTD, value_NHTD, out_NQTD, lse, seed, offset, None,
        ends_q, ends_k, longest_q, longest_k, 0.0, causal, scale=scale,
    )  # fmt: skip
    return grads
