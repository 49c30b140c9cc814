"""The attention function that trainer and engine share, registered with transformers.

The function matches on a context object that the forward call hands down as the keyword `attention`: `Packed` (training
and scoring: sequences end to end) or `Cached` (sampling: new tokens against KV slots, decode rows and prompt chunks in
one call). There are no globals, so one module object serves the trainer and the engine at once. This file must not know
about scheduling, sampling or losses.

Against the cache every query token is a row of its own, whether it is decoded or prefilled, so on CPU its result has
the same bits however its prefix got into the cache (see `docs/design.md`, determinism).

Shape letters: Q query heads, H key-value heads, G = Q / H, D head width, T packed tokens, B slots, S cached tokens.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from headrace.model import cuda
from headrace.model.cuda import cudnn_attention
from headrace.model.device import to_device
from headrace.model.hybrid.states import RecurrentStates
from headrace.names import KV_ROUND

R = TypeVar("R")
NAME = "headrace"
LONG = 2048  # tokens of a segment from which on cuDNN's attention is faster than the variable-length kernel


class KVCache:
    """Holds keys and values of every layer for `rows` slots of `tokens` positions: [B, H, S, D] each, fixed storage.

    With `storage` [layers, 2, at least B H S D] keys and values are views of it, so that another layout has the same
    addresses. `layer_shapes` has the heads of each layer and the widths of a key and a value where they differ, and
    `shared` the layers whose keys and values are those of an earlier layer: both write the same. `state_shapes`: of
    layers with a state.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Tensor | None = None,
        routing: tuple[int, int] | None = None,  # of a mixture: its routers, and the experts that a token chooses
        layer_shapes: Sequence[tuple[int, int, int]] | None = None,
        shared: Mapping[int, int] | None = None,
        state_shapes: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
    ) -> None:
        shape = (rows, heads, tokens, width)
        # [B, S, routers, K]: the experts that each cached token went to
        self.experts = (
            None if routing is None else torch.zeros((rows, tokens, *routing), dtype=torch.int16, device=device)
        )
        self.states: RecurrentStates | None = None
        if state_shapes:
            wide = torch.promote_types(dtype, torch.float32)
            self.states = RecurrentStates(state_shapes, rows=rows, dtype=wide, device=device)
        self._whole: Tensor | None = None
        if storage is None:
            sizes = layer_shapes or [(heads, width, width)] * layers
            self.keys, self.values = (
                [torch.zeros((rows, size[0], tokens, size[kind]), dtype=dtype, device=device) for size in sizes]
                for kind in (1, 2)
            )
            for layer, source in (shared or {}).items():
                self.keys[layer], self.values[layer] = self.keys[source], self.values[source]
        else:
            assert layer_shapes is None
            assert not shared
            self._whole = storage[:, :, : math.prod(shape)].view(layers, 2, *shape)
            self.keys, self.values = list(self._whole[:, 0]), list(self._whole[:, 1])
        self.rows, self.tokens = rows, tokens

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` positions of slot `source`."""
        if self.experts is not None:
            self.experts[target, :tokens] = self.experts[source, :tokens]
        if self._whole is not None:
            self._whole[:, :, target, :, :tokens] = self._whole[:, :, source, :, :tokens]
            return
        for store in (*self.keys, *self.values):
            store[target, :, :tokens].copy_(store[source, :, :tokens])

    def adopt(self, other: "KVCache", rows: int) -> None:
        """Take over the first `rows` slots of a cache of another length, which may lie in the same storage."""
        tokens = min(self.tokens, other.tokens)
        if self.experts is not None and other.experts is not None:
            self.experts[:rows, :tokens] = other.experts[:rows, :tokens]
        if self.states is not None and other.states is not None:
            self.states.adopt(other.states, rows)
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            filled = theirs[:rows, :, :tokens]
            mine[:rows, :, :tokens] = filled if self._whole is None else filled.clone()


@dataclass(frozen=True, slots=True)
class Packed:
    """Segments laid end to end. Each sees itself, causally, and all that its parent sees.

    Without parents segments are sequences. `make_packed` fills in the tensors, once for all layers of a CUDA model.
    """

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...] | None = None
    ends: Tensor | None = None  # [0, running sums of the lengths]
    seen: tuple[int, ...] | None = None  # how many tokens each segment sees
    key_rows: Tensor | None = None  # the tokens that each segment sees, end to end
    key_ends: Tensor | None = None  # [0, running sums of how many each segment sees]
    uses: Tensor | None = None  # places in `key_rows`, sorted by token
    use_ends: Tensor | None = None  # token t is at the places uses[use_ends[t] : use_ends[t + 1]]
    parts: "tuple[Part, ...] | None" = None  # where some segments are long
    routing: Any = None  # of a mixture of experts, what its routers choose (`model/experts.py`, `Routing`)

    def ancestors(self, segment: int) -> tuple[int, ...]:
        """Return the segments that come before a segment, from the first on."""
        if self.parents is None or (parent := self.parents[segment]) is None:
            return ()
        return (*self.ancestors(parent), parent)


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent segments: either long ones of one length that see nothing else, or others, which may see more."""

    tokens: int
    rows: int  # how many long ones; 0: others
    others: Packed | None = None  # their `key_rows` are tokens of the whole batch


def make_packed(
    lengths: tuple[int, ...], device: torch.device, parents: tuple[int | None, ...] | None = None
) -> Packed:
    """Make the context of segments whose tokens are on `device`."""
    if parents is not None and all(parent is None for parent in parents):
        parents = None
    plain = Packed(lengths, parents)
    if device.type != "cuda":
        return plain
    whole = _of_segments(plain, range(len(lengths)), device)
    return replace(whole, parents=parents, parts=make_parts(plain, device))


def make_parts(plain: Packed, device: torch.device) -> tuple[Part, ...] | None:
    """Divide a batch into its long segments and the others; None if there is no long one."""
    roots = plain.parents or (None,) * len(plain.lengths)
    kinds = [  # of a long segment, its length
        length if parent is None and length >= LONG else 0 for length, parent in zip(plain.lengths, roots, strict=True)
    ]
    if not any(kinds):
        return None
    parts: list[Part] = []
    for kind, run in groupby(range(len(kinds)), key=kinds.__getitem__):
        segments = list(run)
        tokens = sum(plain.lengths[segment] for segment in segments)
        others = None if kind else _of_segments(plain, segments, device)
        parts.append(Part(tokens, len(segments) if kind else 0, others))
    return tuple(parts)


def _of_segments(plain: Packed, segments: Sequence[int], device: torch.device) -> Packed:
    """Make the tensors of some segments of a batch, without their parents."""
    chains = [(*plain.ancestors(segment), segment) for segment in segments]
    lengths = tuple(plain.lengths[segment] for segment in segments)
    sizes = tuple(sum(plain.lengths[s] for s in chain) for chain in chains)
    ends = _ends(lengths, device)
    if sizes == lengths:
        return Packed(lengths, ends=ends, seen=sizes)
    starts = [0, *accumulate(plain.lengths)]
    rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for chain in chains for s in chain])
    counts = tuple(torch.bincount(rows, minlength=starts[-1]).tolist())
    return Packed(
        lengths,
        ends=ends,
        seen=sizes,
        key_rows=to_device(rows.int(), device),
        key_ends=_ends(sizes, device),
        uses=to_device(torch.argsort(rows, stable=True).int(), device),
        use_ends=_ends(counts, device),
    )


def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths), 0, out=ends[1:])
    return to_device(ends, device)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`length` prompt tokens of the sequence in slot `row`, starting at position `offset`."""

    row: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Cached:
    """Tokens laid out as: one for each of the first B slots (decode), then the prompt chunks, then padding rows."""

    cache: KVCache
    slots: Tensor  # with `positions`: where the keys and values of all tokens but the padding go
    positions: Tensor
    # [B, 1, 1, S]: 0 at keys that a decode row sees, else -inf, with S the filled part of the longest slot rounded up;
    # None without decode rows
    mask: Tensor | None
    chunks: tuple[PromptChunk, ...]
    chunk_mask: Tensor | None = None  # the same for the tokens of the chunks; without it each layer computes its own
    active: tuple[int, ...] | None = None  # decode rows that are not idle, where the host knows them
    runs: Any = None  # of layers with a state, where the caller knows them (`model/hybrid/layout.py`, `SlotRuns`)


Context = Packed | Cached


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Describes how a layer changes its scores q k^T between the product and the softmax."""

    scaling: float | None = None  # 1 / sqrt(D) without it
    window: int | None = None  # positions that a token sees, itself included
    softcap: float | None = None  # c: scores become c tanh(score / c)
    sinks_Q: Tensor | None = None  # one more score for each query head, which takes a share and adds no value

    @property
    def plain(self) -> bool:
        """True if fused kernels compute it: a scale and a window alone."""
        return self.softcap is None and self.sinks_Q is None


BLOCK = 128  # positions whose values are added in one product
SINK_BLOCK = 16  # places before the scores that the sinks take
NARROW = 16  # width of a head below which torch computes small products differently from large ones
VARLEN_WIDTH = 256  # of the widest head that torch's varlen kernel computes
ROUND = KV_ROUND  # cached lengths are read in multiples of this


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention: query [1, Q, T, D], key and value [1, H, T, D] -> [1, T, Q, D].

    `softcap` and `s_aux` are transformers' names of the soft cap and the attention sinks.
    """
    assert attention is not None, "call the model with attention=Packed(...) or Cached(...)"
    assert dropout == 0.0, "models are kept in eval mode"
    assert query.shape[0] == 1, "tokens are packed into one row"
    options = ScoreOptions(scaling, sliding_window, softcap, s_aux)
    match attention:
        case Packed():
            packed_out: Tensor = _attend_packed(query, key, value, attention, options)
            return packed_out, None
        case Cached():
            layer: int = module.layer_idx  # type: ignore[assignment]
            return _attend_cached(query, key, value, attention, layer, options), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: the context says which tokens a token sees."""


AttentionInterface.register(NAME, attend)  # transformers' own table; the name on a model's config selects it
AttentionMaskInterface.register(NAME, _no_mask)


def causal_mask(queries: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Make [queries, offset + queries], True where position offset + i sees position j (at most `window` back)."""
    row = torch.arange(offset, offset + queries, device=device)[:, None]
    column = torch.arange(offset + queries, device=device)[None, :]
    visible = column <= row
    return visible if window is None else visible & (column > row - window)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled layer calls it uncompiled: lengths differ
def _attend_packed(query: Tensor, key: Tensor, value: Tensor, context: Packed, options: ScoreOptions) -> Tensor:
    if _varlen_applies(query, value) and options.plain:
        return _packed_varlen(query, key, value, context, options)
    return _packed(query, key, value, context, options)


def _packed(query: Tensor, key: Tensor, value: Tensor, context: Packed, options: ScoreOptions) -> Tensor:
    """Compute segments of the same length behind the same parent in one call."""
    q, k, v = (torch.split(tensor, list(context.lengths), dim=2) for tensor in (query, key, value))
    outputs: dict[int, Tensor] = {}
    for members in _group_segments(context):
        before, count = context.ancestors(members[0]), len(members)
        queries, keys, values = (torch.cat([part[member] for member in members]) for part in (q, k, v))
        if before:
            keys = torch.cat([_joined(k, before).expand(count, -1, -1, -1), keys], dim=2)
            values = torch.cat([_joined(v, before).expand(count, -1, -1, -1), values], dim=2)
        num_queries, num_keys = queries.shape[2], keys.shape[2]
        mask, window = None, options.window
        if before or not options.plain or (window is not None and num_keys > window):
            mask = causal_mask(num_queries, num_keys - num_queries, window, query.device)
        out = _masked(queries, keys, values, mask, options)
        outputs.update(zip(members, torch.split(out, 1), strict=True))
    return torch.cat([outputs[segment] for segment in range(len(context.lengths))], dim=2).transpose(1, 2)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions) -> Tensor:
    """Compute attention [N, Q, T, D] to keys [N, H, S, D] under a mask that broadcasts to [N, H, T, S].

    Without a mask it is causal. torch's fused kernels have neither soft caps nor sinks: those scores are written out.
    """
    if options.plain:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=options.scaling, enable_gqa=gqa
        )
    assert mask is not None, "only plain attention is computed without a mask"
    rows, heads, queries, width = query.shape
    grouped = query.view(rows, key.shape[1], -1, queries, width)
    grouped = grouped * (width**-0.5 if options.scaling is None else options.scaling)
    scores = capped(grouped @ key[:, :, None].transpose(-1, -2), options.softcap)
    bias = (
        torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else mask
    )
    real = torch.float64 if scores.dtype == torch.float64 else torch.float32
    scores = (scores + (bias if bias.ndim == 2 else bias[:, :, None])).to(real)
    shares = softmax_with_sinks(scores, options.sinks_Q).to(value.dtype)
    return (shares @ value[:, :, None]).reshape(rows, heads, queries, value.shape[-1])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Compute c tanh(score / c)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_with_sinks(scores: Tensor, sinks_Q: Tensor | None) -> Tensor:
    """Compute the shares of scores [N, H, G, T, S] beside the sink of each query head, whose own share is left out.

    The sinks come first, and with SINK_BLOCK - 1 empty places, so that the sums over S have the same order as without.
    """
    if sinks_Q is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks_Q.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    empty = scores.new_full((*scores.shape[:-1], SINK_BLOCK - 1), -torch.inf)
    return torch.softmax(torch.cat([sinks, empty, scores], dim=-1), dim=-1)[..., SINK_BLOCK:]


def _joined(parts: tuple[Tensor, ...], segments: tuple[int, ...]) -> Tensor:
    return torch.cat([parts[segment] for segment in segments], dim=2)


def _group_segments(context: Packed) -> list[list[int]]:
    """Group the segments that have the same parent and length."""
    groups: dict[tuple[int | None, int], list[int]] = {}
    for segment, length in enumerate(context.lengths):
        parent = None if context.parents is None else context.parents[segment]
        groups.setdefault((parent, length), []).append(segment)
    return list(groups.values())


def _varlen_applies(query: Tensor, value: Tensor) -> bool:
    widest = max(query.shape[-1], value.shape[-1])
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and widest <= VARLEN_WIDTH


@cache
def _gqa_flag() -> dict[str, Any]:
    """Return the flag with which newer versions of torch's kernel read grouped key heads as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _packed_varlen(query: Tensor, key: Tensor, value: Tensor, context: Packed, options: ScoreOptions) -> Tensor:
    """Compute long segments by cuDNN and all others in one varlen kernel, for half precision on CUDA.

    Their heads have one width, a multiple of 8: narrower ones are filled up with zeros.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    width, value_width = q.shape[-1], v.shape[-1]
    common = -(-max(width, value_width) // 8) * 8
    if common != width or common != value_width:
        q, k, v = (F.pad(tensor, (0, common - tensor.shape[-1])) for tensor in (q, k, v))
        options = replace(options, scaling=width**-0.5 if options.scaling is None else options.scaling)
    if context.ends is None:
        context = make_packed(context.lengths, q.device, context.parents)
    if context.parts is None or options.window is not None or not cudnn_attention.cudnn_applies(q):
        return _varlen(q, k, v, context, options)[None, ..., :value_width]

    def long(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        return cudnn_attention.causal_rows(q, k, v, rows, options.scaling)

    def others(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
        return _varlen(q, k, v, packed, options)

    return torch.cat(by_parts(q, k, v, context.parts, long=long, others=others))[None, ..., :value_width]


def _varlen(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, context: Packed, options: ScoreOptions) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    k, v, (ends, key_ends, longest, longest_keys) = packed_keys(k_THD, v_THD, context)
    left = -1 if options.window is None else options.window - 1
    out = varlen_attn(
        q_THD, k, v, ends, key_ends, longest, longest_keys, scale=options.scaling, window_size=(left, 0), **_gqa_flag()
    )
    assert isinstance(out, Tensor)
    return out


def by_parts(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    parts: Sequence[Part],
    *,
    long: Callable[[Tensor, Tensor, Tensor, int], R],
    others: Callable[[Tensor, Tensor, Tensor, Packed], R],
) -> list[R]:
    """Compute each part: `long` gets rows of one length, and `others` all keys where its segments see other ones."""
    sizes = [part.tokens for part in parts]
    pieces = zip(*(torch.split(states, sizes) for states in (query_THD, key_THD, value_THD)), strict=True)
    results: list[R] = []
    for part, (query, key, value) in zip(parts, pieces, strict=True):
        if part.others is None:
            results.append(long(query, key, value, part.rows))
        elif part.others.key_rows is None:
            results.append(others(query, key, value, part.others))
        else:
            results.append(others(query, key_THD, value_THD, part.others))
    return results


def packed_keys(
    key_THD: Tensor, value_THD: Tensor, context: Packed
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, int, int]]:
    """Lay out keys and values as a varlen kernel reads them: those that each segment sees, end to end.

    Return them with (running sums of the queries' lengths, of the keys' lengths, longest queries, longest keys).
    """
    if context.ends is None:
        context = make_packed(context.lengths, key_THD.device, context.parents)
    assert context.ends is not None
    longest = max(context.lengths)
    if context.key_rows is None:
        return key_THD, value_THD, (context.ends, context.ends, longest, longest)
    assert context.key_ends is not None
    assert context.seen is not None
    key_THD, value_THD = _gather_keys(key_THD, value_THD, context)
    return key_THD, value_THD, (context.ends, context.key_ends, longest, max(context.seen))


def _gather_keys(key_THD: Tensor, value_THD: Tensor, context: Packed) -> tuple[Tensor, Tensor]:
    """Gather the keys and values that each segment sees, end to end."""
    assert context.key_rows is not None
    if not cuda.available():
        return key_THD[context.key_rows], value_THD[context.key_rows]
    from headrace.model.cuda.gather import gather_rows  # needs Triton

    assert context.uses is not None
    assert context.use_ends is not None
    return gather_rows(key_THD, value_THD, context.key_rows, context.uses, context.use_ends)


def _attend_cached(
    query: Tensor, key: Tensor, value: Tensor, context: Cached, layer: int, options: ScoreOptions
) -> Tensor:
    """Write keys and values into the cache and compute attention against it.

    All G query heads of a key head are rows of one product, so keys are never repeated. On CPU an odd G gets one row
    more: with several threads of arithmetic, odd products have other bits in small batches than in large ones.
    """
    keys, values, window = context.cache.keys[layer], context.cache.values[layer], options.window
    written, heads, width = context.positions.shape[0], key.shape[1], key.shape[3]
    keys[context.slots, :, context.positions] = key[0, :, :written].transpose(0, 1).to(keys.dtype)
    values[context.slots, :, context.positions] = value[0, :, :written].transpose(0, 1).to(keys.dtype)
    grouped = query[0].transpose(0, 1).to(keys.dtype).reshape(query.shape[2], heads, -1, width)
    groups = grouped.shape[2]
    if groups % 2 and not query.is_cuda:
        grouped = torch.cat([grouped, grouped[:, :, -1:]], dim=2)
        options = _pad_sinks(options, heads)
    outputs = []
    start = 0
    if context.mask is not None:
        rows, filled = context.mask.shape[0], context.mask.shape[-1]
        mask = context.mask
        if window is not None and filled > window:
            positions = context.positions[:rows].clamp_max(filled - 1)  # idle rows see some key, so they are not NaN
            mask = mask + _window_mask(positions, filled, window, mask.dtype)
        outputs.append(_by_row(grouped[:rows], keys[:rows, :, :filled], values[:rows, :, :filled], mask, options))
        start = rows
    first = start
    for chunk in context.chunks:
        filled = min(-(-(chunk.offset + chunk.length) // ROUND) * ROUND, context.cache.tokens)
        span = slice(start, start + chunk.length)
        if context.chunk_mask is None:
            mask = visible_mask(context.positions[span], filled, grouped.dtype)
        else:
            mask = context.chunk_mask[start - first : start - first + chunk.length, ..., :filled]
        if window is not None and filled > window:
            mask = mask + _window_mask(context.positions[span], filled, window, mask.dtype)
        key_HFW, value_HFW = (store[chunk.row, :, :filled] for store in (keys, values))
        if query.is_cuda and options.plain and not torch.are_deterministic_algorithms_enabled():
            outputs.append(by_chunk(grouped[span], key_HFW, value_HFW, mask, options))
        else:
            key_all, value_all = (states.expand(chunk.length, -1, -1, -1) for states in (key_HFW, value_HFW))
            outputs.append(_by_row(grouped[span], key_all, value_all, mask, options))
        start += chunk.length
    if start < query.shape[2]:
        outputs.append(grouped.new_zeros(*grouped[start:].shape[:-1], values.shape[-1]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[:, :, :groups].reshape(1, query.shape[2], -1, values.shape[-1]).to(query.dtype)


def _pad_sinks(options: ScoreOptions, heads: int) -> ScoreOptions:
    """Repeat the last sink of every key head, as its queries are repeated."""
    if options.sinks_Q is None:
        return options
    sinks_HG = options.sinks_Q.view(heads, -1)
    return replace(options, sinks_Q=torch.cat([sinks_HG, sinks_HG[:, -1:]], dim=1).flatten())


def _by_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: ScoreOptions) -> Tensor:
    """Compute attention row by row: query [R, H, G, W], key and value [R, H, F, W], mask [R, 1, 1, F] -> [R, H, G, W].

    On CPU it is batched products, twice as fast there as the fused kernel for a few queries. torch would cut a product
    over more than 192 positions depending on its length, which gives other bits beside a longer neighbour: BLOCK
    positions are added at a time.
    """
    heads, width = query.shape[1], query.shape[3]
    if query.shape[0] * heads == 1 and not query.is_cuda:  # torch computes a single product differently from several
        query, key, value = (tensor.expand(2, -1, -1, -1) for tensor in (query, key, value))
        return _by_row(query, key, value, mask, options)[:1]
    if options.plain and (query.is_cuda or width < NARROW):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=options.scaling)
    query = query * (width**-0.5 if options.scaling is None else options.scaling)
    if min(width, value.shape[-1]) < NARROW and not query.is_cuda:
        wide_query, wide_key, wide_value = (
            F.pad(tensor, (0, max(0, NARROW - tensor.shape[-1]))) for tensor in (query, key, value)
        )
        out = _by_row(wide_query, wide_key, wide_value, mask, replace(options, scaling=1.0))
        return out[..., : value.shape[-1]]
    if heads == 1 or key.stride(0) == heads * key.stride(1):
        return _products(query, key, value, mask, options)
    outputs = []
    for head in range(heads):  # rows share their keys: without a copy only one head at a time is a batch
        span, of_head = slice(head, head + 1), options
        if options.sinks_Q is not None:
            of_head = replace(options, sinks_Q=options.sinks_Q.view(heads, -1)[head])
        outputs.append(_products(query[:, span], key[:, span], value[:, span], mask, of_head))
    return torch.cat(outputs, dim=1)


def by_chunk(query: Tensor, key_HFW: Tensor, value_HFW: Tensor, mask: Tensor, options: ScoreOptions) -> Tensor:
    """Compute attention of rows with the same keys [H, F, W] in one call; last bits depend on what rows there are."""
    rows, heads, groups, width = query.shape
    queries = query.reshape(rows, heads * groups, width).transpose(0, 1)[None]
    keys, values = (states[None].repeat_interleave(groups, dim=1) for states in (key_HFW, value_HFW))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None, :, 0, 0], scale=options.scaling)
    return out[0].transpose(0, 1).unflatten(1, (heads, groups))  # type: ignore[no-untyped-call, no-any-return]


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: ScoreOptions) -> Tensor:
    """Compute `_by_row` for scaled queries, and keys whose rows and heads are one dimension in memory."""
    rows, heads, groups, _ = query.shape
    queries, keys, values = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(rows, heads, groups, -1)
    scores = capped(scores, options.softcap).add_(mask)
    shares = softmax_with_sinks(scores[..., None, :], options.sinks_Q).flatten(2, 3).flatten(0, 1)
    output = torch.bmm(shares[..., :BLOCK], values[:, :BLOCK])
    for start in range(BLOCK, key.shape[2], BLOCK):
        output.baddbmm_(shares[..., start : start + BLOCK], values[:, start : start + BLOCK])
    return output.view(rows, heads, groups, -1)


def visible_mask(positions: Tensor, filled: int, dtype: torch.dtype) -> Tensor:
    """Make [rows, 1, 1, filled]: 0 at keys up to each row's own position, -inf after it."""
    hidden = torch.arange(filled, device=positions.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]


def _window_mask(positions: Tensor, filled: int, window: int, dtype: torch.dtype) -> Tensor:
    """Make [rows, 1, 1, filled]: -inf at keys `window` or more positions back, else 0."""
    hidden = torch.arange(filled, device=positions.device) <= positions[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
