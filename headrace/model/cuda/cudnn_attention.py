"""Call cuDNN's attention: on Hopper faster than FlashAttention 2, for long sequences and for several of one length.

It takes a batch of sequences of one length, not sequences of several lengths end to end, and its backward pass adds
up in no fixed order, so deterministic runs do without it.

Shape letters: N sequences, Q query heads, H key-value heads, T tokens, D width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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


def causal_rows(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, rows: int, scale: float | None) -> Tensor:
    """Compute causal attention of `rows` sequences of one length that lie end to end, differentiable."""
    length = query_THD.shape[0] // rows
    q, k, v = (as_rows(states, rows) for states in (query_THD, key_THD, value_THD))
    return attention(q, k, v, scale, causal=True).transpose(1, 2)[:, :length].flatten(0, 1)


def as_rows(states_THD: Tensor, rows: int) -> Tensor:
    """View sequences of one length as [N, H, T, D], with zeros behind them up to a length of the grid.

    Causal queries do not see what lies behind them.
    """
    states_NTHD = states_THD.unflatten(0, (rows, -1))  # type: ignore[no-untyped-call]
    length = states_NTHD.shape[1]
    if more := padded_length(length) - length:
        states_NTHD = F.pad(states_NTHD, (0, 0, 0, 0, 0, more))
    return states_NTHD.transpose(1, 2)  # type: ignore[no-any-return]


def padded_length(length: int) -> int:
    """Round a length up by a sixteenth at most: cuDNN takes some 70 ms to plan for each length that it has not seen."""
    step = max(1, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step
