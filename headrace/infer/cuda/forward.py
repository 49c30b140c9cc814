"""One pass of a dense decoder over rows of tokens, in Triton kernels and matrix products into buffers that stay.

It is the trainer's arithmetic (`model/cuda/layers.py`) with fewer launches: 8 a layer. Decode rows and prompt pieces
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
from headrace.infer.cuda.weights import DenseWeights
from headrace.model.attention import KVCache
from headrace.model.cuda.fine import add_product

GATE_BLOCK = 1024
MANY = 128  # programs of decoding attention with which no processor is without one


@dataclass(frozen=True, slots=True)
class Workspace:
    """Intermediate results for T rows in the type of the factors of products; but the stream is float32, and `last`,
    what the head reads, has the type of its weights."""

    stream: Tensor
    last: Tensor
    normed: Tensor
    qkv: Tensor
    mixed: Tensor
    both: Tensor
    inner: Tensor

    @staticmethod
    def make(weights: DenseWeights, rows: int) -> "Workspace":
        shape, head = weights.shape, weights.head

        def empty(width: int, dtype: torch.dtype = weights.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=head.device)

        return Workspace(
            stream=empty(shape.D, torch.float32),
            last=empty(shape.D, head.dtype),
            normed=empty(shape.D),
            qkv=empty((shape.Q + 2 * shape.H) * shape.W),
            mixed=empty(shape.Q * shape.W),
            both=empty(2 * shape.inner),
            inner=empty(shape.inner),
        )

    def first(self, rows: int) -> "Workspace":
        return Workspace(*(getattr(self, name)[:rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Where rows stand: `positions` and `slots` [T] int64, and the positions a slot has, on the device. Of rows that
    decode also in which slots their first `shared` positions are read, where they have them too."""

    positions: Tensor
    slots: Tensor
    slot_tokens: Tensor
    donors: Tensor | None = None
    shared: Tensor | None = None


def hidden(
    weights: DenseWeights, tokens_T: Tensor, buffers: Workspace, attend: Callable[[int], None], *, only_cache: bool
) -> None:
    """Leaves the last hidden states in `buffers.last`; with `only_cache`, stops when the last layer's keys are made.

    `attend(layer)` turns `buffers.qkv` into `buffers.mixed`.
    """
    norm(weights, buffers, buffers.normed, weights.layers[0].input_norm, embed=tokens_T)
    for index, layer in enumerate(weights.layers):
        if layer.qkv_bias is None:
            torch.mm(buffers.normed, layer.qkv.t(), out=buffers.qkv)
        else:
            torch.addmm(layer.qkv_bias, buffers.normed, layer.qkv.t(), out=buffers.qkv)
        attend(index)
        last = index + 1 == len(weights.layers)
        if last and only_cache:
            return
        add_product(buffers.stream, buffers.mixed, layer.out, out=buffers.stream)
        norm(weights, buffers, buffers.normed, layer.inner_norm)
        torch.mm(buffers.normed, layer.gate_up.t(), out=buffers.both)
        gate(buffers)
        add_product(buffers.stream, buffers.inner, layer.down, out=buffers.stream)
        if last:
            norm(weights, buffers, buffers.last, weights.norm)
        else:
            norm(weights, buffers, buffers.normed, weights.layers[index + 1].input_norm)


def norm(weights: DenseWeights, buffers: Workspace, out: Tensor, scale: Tensor, *, embed: Tensor | None = None) -> None:
    """The norm of the stream, which with `embed` starts from the tokens' embeddings."""
    rows, width = buffers.stream.shape
    kernels.norm_kernel[(rows,)](
        out,
        buffers.stream,
        weights.embedding,
        buffers.stream if embed is None else embed,
        scale,
        weights.shape.epsilon,
        width,
        BLOCK=triton.next_power_of_2(width),
        EMBED=embed is not None,
        num_warps=8 if width > 1024 else 4,
    )


def gate(buffers: Workspace) -> None:
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

    def __call__(self, layer: int, buffers: Workspace, places: TokenIndex, cache: KVCache) -> None:
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
            places.donors,
            places.shared,
            of.query_norm if norm else unused,
            of.key_norm if norm else unused,
            kernels.LOG2_E * shape.W**-0.5,
            shape.epsilon,
            Q=shape.Q,
            H=shape.H,
            G=shape.Q // shape.H,
            GP=max(16, triton.next_power_of_2(shape.Q // shape.H)),
            W=shape.W,
            SPLITS=splits,
            NORM=norm,
            PRECISION=precision(buffers.qkv),
            **_program(buffers.qkv, rows * shape.H, shape.W),
        )


def _program(like: Tensor, programs: int, width: int) -> dict[str, int]:
    """How a program of decoding attention reads: keys at a time, warps, and rounds that are on their way at once. Where
    there are several programs to a processor one warp of each has nobody to wait for."""
    if like.dtype == torch.float32 or programs < MANY or width > 128:
        return {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK": 32, "num_warps": 1, "num_stages": 4}


def precision(like: Tensor) -> str:
    """Of a float32 product in a kernel: exact. Half precision has one way only."""
    return "ieee" if like.dtype == torch.float32 else "tf32"


def prompt_attention(
    weights: DenseWeights,
    layer: int,
    buffers: Workspace,
    places: TokenIndex,
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
