"""The one attention function, registered with transformers, that trainer and engine share.

It matches on a context object handed down the forward call as the keyword `attention`: `Packed` (training and
scoring: sequences end to end), `Prefill` (pieces of prompts into KV slots) or `Decode` (one new token per slot).
There are no globals, so one module object serves the trainer and the engine at once. It must not know about
scheduling, sampling or losses.

Shape letters: Q query heads, H key-value heads, G = Q / H, D head width, T packed tokens, B slots, S cached tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "headrace"


class KVCache:
    """Keys and values of every layer for `rows` slots of `tokens` positions: [B, H, S, D] each, fixed storage."""

    def __init__(
        self, *, layers: int, rows: int, heads: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (rows, heads, tokens, width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.rows, self.tokens = rows, tokens

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` positions of slot `source`."""
        for store in (*self.keys, *self.values):
            store[target, :, :tokens].copy_(store[source, :, :tokens])

    def take(self, row: int, tokens: int) -> list[Tensor]:
        """A copy of one slot's first `tokens` positions, outside of the cache (for preemption)."""
        return [store[row, :, :tokens].clone() for store in (*self.keys, *self.values)]

    def put(self, row: int, saved: list[Tensor]) -> None:
        for store, tensor in zip((*self.keys, *self.values), saved, strict=True):
            store[row, :, : tensor.shape[1]].copy_(tensor)


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences laid end to end; each sees only itself, causally."""

    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` tokens of the sequence in slot `row`, starting at position `offset`."""

    row: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Pieces laid end to end (rows after the last piece are padding); keys and values go to the cache."""

    cache: KVCache
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for each of the first B slots, written at `positions`; `mask` is 0 where a key is visible, else -inf.

    `window_mask` is the same for layers with a sliding window, None when the model has none.
    """

    cache: KVCache
    positions: Tensor  # [B]
    mask: Tensor  # [B, 1, 1, S], S = the filled part of the longest slot, rounded up
    window_mask: Tensor | None = None


Context = Packed | Prefill | Decode


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention: Context | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, Q, T, D], key and value [1, H, T, D] -> [1, T, Q, D]."""
    assert attention is not None, "call the model with attention=Packed(...), Prefill(...) or Decode(...)"
    assert dropout == 0.0, "models are kept in eval mode"
    assert query.shape[0] == 1, "tokens are packed into one row"
    match attention:
        case Packed(lengths):
            if _varlen_applies(query):
                return _packed_varlen(query, key, value, lengths, scaling, sliding_window), None
            return _packed(query, key, value, lengths, scaling, sliding_window), None
        case Prefill(cache, pieces):
            layer: int = module.layer_idx  # type: ignore[assignment]
            return _prefill(query, key, value, cache, layer, pieces, scaling, sliding_window), None
        case Decode():
            layer = module.layer_idx  # type: ignore[assignment]
            return _decode(query, key, value, attention, layer, scaling, sliding_window), None


def _no_mask(*_: Any, **__: Any) -> None:
    """What may see what is in the context; transformers builds no mask."""


AttentionInterface.register(NAME, attend)  # transformers' own table; the name on a model's config selects it
AttentionMaskInterface.register(NAME, _no_mask)


def causal_mask(queries: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, offset + queries] True where position offset + i may see position j (at most `window` back)."""
    row = torch.arange(offset, offset + queries, device=device)[:, None]
    column = torch.arange(offset + queries, device=device)[None, :]
    visible = column <= row
    return visible if window is None else visible & (column > row - window)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    outputs = []
    spans = [torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)]
    gqa = query.shape[1] != key.shape[1]
    for q, k, v in zip(*spans, strict=True):
        mask = None
        if window is not None and q.shape[2] > window:
            mask = causal_mask(q.shape[2], 0, window, q.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _varlen_applies(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _packed_varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    """CUDA half precision: one varlen kernel for all sequences (torch's has no GQA, so key heads are repeated)."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths), 0, out=ends[1:])
    ends = ends.to(query.device, non_blocking=True)
    longest = max(lengths)
    left = -1 if window is None else window - 1
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
    )
    assert isinstance(out, Tensor)
    return out[None]


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    layer: int,
    pieces: tuple[Piece, ...],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    keys, values = cache.keys[layer], cache.values[layer]
    outputs = torch.zeros_like(query)
    gqa = query.shape[1] != key.shape[1]
    start = 0
    for piece in pieces:
        span, end = slice(start, start + piece.length), piece.offset + piece.length
        keys[piece.row, :, piece.offset : end] = key[0, :, span]
        values[piece.row, :, piece.offset : end] = value[0, :, span]
        whole = piece.offset == 0 and (window is None or piece.length <= window)
        outputs[:, :, span] = F.scaled_dot_product_attention(
            query[:, :, span],
            keys[piece.row : piece.row + 1, :, :end],
            values[piece.row : piece.row + 1, :, :end],
            attn_mask=None if whole else causal_mask(piece.length, piece.offset, window, query.device),
            is_causal=whole,
            scale=scaling,
            enable_gqa=gqa,
        )
        start += piece.length
    return outputs.transpose(1, 2)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, context: Decode, layer: int, scaling: float | None, window: int | None
) -> Tensor:
    """All G query heads of a key head are rows of one product, so keys are never repeated."""
    rows = context.positions.shape[0]
    heads, width = key.shape[1], key.shape[3]
    keys, values = context.cache.keys[layer], context.cache.values[layer]
    slots = torch.arange(rows, device=query.device)
    keys[slots, :, context.positions] = key[0].transpose(0, 1)
    values[slots, :, context.positions] = value[0].transpose(0, 1)
    mask = context.mask if window is None or context.window_mask is None else context.window_mask
    filled = mask.shape[-1]
    grouped = query[0].transpose(0, 1).reshape(rows, heads, -1, width)
    out = F.scaled_dot_product_attention(
        grouped, keys[:rows, :, :filled], values[:rows, :, :filled], attn_mask=mask, scale=scaling
    )
    return out.reshape(1, rows, -1, width)
