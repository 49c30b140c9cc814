"""One pass of a dense decoder over rows of tokens, in Triton kernels and matrix products into buffers that stay.

It is the modules' arithmetic with fewer launches: 8 a layer. Decode rows and prompt pieces
differ in their attention only.

Shape letters: T rows, D stream, Q and H heads of width W, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from headrace.infer.cuda import kernels
from headrace.infer.cuda.layout import PROMPT_ROWS, splits_for
from headrace.infer.cuda.weights import DenseWeights, Shape
from headrace.model.attention import KVCache

GATE_BLOCK = 1024
DECODE_BLOCK = 64  # keys that a decode program reads at a time


@dataclass(frozen=True, slots=True)
class Buffers:
    """Intermediate results for T rows; the stream is float32."""

    stream: Tensor
    normed: Tensor
    delta: Tensor
    qkv: Tensor
    mixed: Tensor
    both: Tensor
    inner: Tensor

    @staticmethod
    def make(shape: Shape, rows: int, like: Tensor) -> "Buffers":
        def empty(width: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=like.device)

        return Buffers(
            stream=empty(shape.D, torch.float32),
            normed=empty(shape.D),
            delta=empty(shape.D),
            qkv=empty((shape.Q + 2 * shape.H) * shape.W),
            mixed=empty(shape.Q * shape.W),
            both=empty(2 * shape.inner),
            inner=empty(shape.inner),
        )

    def first(self, rows: int) -> "Buffers":
        return Buffers(*(getattr(self, name)[:rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows stand: `positions` and `slots` [T] int64, and the positions a slot has, on the device."""

    positions: Tensor
    slots: Tensor
    slot_tokens: Tensor


def hidden(
    weights: DenseWeights, tokens_T: Tensor, buffers: Buffers, attend: Callable[[int], None], *, only_cache: bool
) -> None:
    """Leaves the last hidden states in `buffers.normed`; with `only_cache`, stops when the last layer's keys are made.

    `attend(layer)` turns `buffers.qkv` into `buffers.mixed`.
    """
    add_norm(weights, buffers, weights.layers[0].input_norm, embed=tokens_T)
    for index, layer in enumerate(weights.layers):
        if layer.qkv_bias is None:
            torch.mm(buffers.normed, layer.qkv.t(), out=buffers.qkv)
        else:
            torch.addmm(layer.qkv_bias, buffers.normed, layer.qkv.t(), out=buffers.qkv)
        attend(index)
        last = index + 1 == len(weights.layers)
        if last and only_cache:
            return
        torch.mm(buffers.mixed, layer.out.t(), out=buffers.delta)
        add_norm(weights, buffers, layer.inner_norm)
        torch.mm(buffers.normed, layer.gate_up.t(), out=buffers.both)
        gate(buffers)
        torch.mm(buffers.inner, layer.down.t(), out=buffers.delta)
        add_norm(weights, buffers, weights.norm if last else weights.layers[index + 1].input_norm)


def add_norm(weights: DenseWeights, buffers: Buffers, scale: Tensor, *, embed: Tensor | None = None) -> None:
    """The stream takes the delta (or starts from the tokens' embeddings), and its norm is made."""
    rows, width = buffers.stream.shape
    kernels.add_norm_kernel[(rows,)](
        buffers.normed,
        buffers.stream,
        buffers.delta,
        weights.embedding,
        buffers.delta if embed is None else embed,
        scale,
        weights.shape.epsilon,
        width,
        BLOCK=triton.next_power_of_2(width),
        EMBED=embed is not None,
        num_warps=8 if width > 1024 else 4,
    )


def gate(buffers: Buffers) -> None:
    rows, width = buffers.inner.shape
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    kernels.gate_kernel[grid](buffers.inner, buffers.both, width, BLOCK=GATE_BLOCK, num_warps=4)


class DecodeAttention:
    """Attention of one new token a row, for up to `rows` rows; the buffers of split rows are its own."""

    def __init__(self, weights: DenseWeights, rows: int) -> None:
        shape, like = weights.shape, weights.embedding
        most = max(splits_for(count, shape.H) * count for count in range(1, rows + 1))
        self._weights = weights
        self._parts = torch.zeros(most * shape.Q * shape.W, dtype=torch.float32, device=like.device)
        self._part_weights = torch.zeros(most * shape.Q, dtype=torch.float32, device=like.device)
        self._arrivals = torch.zeros(rows * shape.H, dtype=torch.int32, device=like.device)

    def __call__(self, layer: int, buffers: Buffers, places: Places, cache: KVCache) -> None:
        shape, weights = self._weights.shape, self._weights
        rows = buffers.qkv.shape[0]
        splits = splits_for(rows, shape.H)
        of = weights.layers[layer]
        norm = of.query_norm is not None
        unused = weights.norm
        kernels.decode_kernel[(rows, shape.H, splits)](
            buffers.mixed,
            self._parts,
            self._part_weights,
            self._arrivals,
            buffers.qkv,
            weights.cosines,
            weights.sines,
            cache.keys[layer],
            cache.values[layer],
            places.positions,
            places.slots,
            places.slot_tokens,
            of.query_norm if norm else unused,
            of.key_norm if norm else unused,
            kernels.LOG2_E * shape.W**-0.5,
            shape.epsilon,
            Q=shape.Q,
            H=shape.H,
            G=shape.Q // shape.H,
            GP=max(16, triton.next_power_of_2(shape.Q // shape.H)),
            W=shape.W,
            BLOCK=DECODE_BLOCK,
            SPLITS=splits,
            NORM=norm,
            PRECISION=precision(buffers.qkv),
            num_warps=4,
            num_stages=2,
        )


def precision(like: Tensor) -> str:
    """Of a float32 product in a kernel: exact. Half precision has one way only."""
    return "ieee" if like.dtype == torch.float32 else "tf32"


def prompt_attention(
    weights: DenseWeights,
    layer: int,
    buffers: Buffers,
    places: Places,
    cache: KVCache,
    blocks: Tensor,
    *,
    only_cache: bool,
) -> None:
    """Keys and values of prompt tokens into their slots; then, unless `only_cache`, causal attention over them."""
    shape, of = weights.shape, weights.layers[layer]
    norm = of.query_norm is not None
    unused = weights.norm
    kernels.turn_kernel[(buffers.qkv.shape[0],)](
        buffers.qkv,
        weights.cosines,
        weights.sines,
        cache.keys[layer],
        cache.values[layer],
        places.positions,
        places.slots,
        places.slot_tokens,
        of.query_norm if norm else unused,
        of.key_norm if norm else unused,
        shape.epsilon,
        Q=shape.Q,
        H=shape.H,
        HEADS=triton.next_power_of_2(shape.Q + 2 * shape.H),
        W=shape.W,
        NORM=norm,
        num_warps=4,
    )
    if only_cache:
        return
    exact = buffers.qkv.dtype == torch.float32
    kernels.prompt_kernel[(blocks.shape[0], shape.Q)](
        buffers.mixed,
        buffers.qkv,
        cache.keys[layer],
        cache.values[layer],
        blocks,
        places.slot_tokens,
        kernels.LOG2_E * shape.W**-0.5,
        Q=shape.Q,
        H=shape.H,
        W=shape.W,
        ROWS=PROMPT_ROWS,
        BLOCK=32 if exact else 64,
        PRECISION=precision(buffers.qkv),
        num_warps=4,
        num_stages=1 if exact else 3,
    )
