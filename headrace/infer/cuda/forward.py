"""Run one forward pass of a dense model over rows of tokens, in Triton kernels and matrix products into fixed buffers.

The arithmetic is the trainer's (`model/cuda/layers.py`) with fewer launches: 8 a layer. Decode rows and prompt chunks
differ in their attention only.

Shape letters: T rows, D stream, Q and H heads of width W, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from headrace.infer.cuda import kernels
from headrace.infer.cuda.adapter_factors import DOWN, GATE_UP, OUT, QKV, AdaptedRows
from headrace.infer.cuda.layer_weights import DenseWeights
from headrace.infer.cuda.tiling import LEAST_KEYS, PROMPT_ROWS, splits_for
from headrace.model.attention import KVCache
from headrace.model.cuda.fp16_matmul import addmm_fp32

GATE_BLOCK = 1024
MANY = 128  # programs of decode attention that keep every processor busy


@dataclass(frozen=True, slots=True)
class Workspace:
    """Intermediate results for T rows, in the operand type of matrix products where nothing else is said."""

    stream: Tensor  # residual stream, float32
    last: Tensor  # input of the head, in the type of its weights
    normed: Tensor
    qkv: Tensor
    mixed: Tensor  # output of attention
    both: Tensor  # gate and up
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
    """The slot and position of each row, on the device."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    slot_tokens: Tensor  # positions of a slot
    donors: Tensor | None = None  # of decode rows: the slot in which the first `shared` positions are read
    shared: Tensor | None = None
    shifts: Tensor | None = None  # of decode rows: from a position to the rotary one, which pictures bring closer


def hidden(
    weights: DenseWeights,
    tokens_T: Tensor,
    workspace: Workspace,
    attend: Callable[[int], None],
    *,
    only_cache: bool,
    adapted: AdaptedRows | None = None,
) -> None:
    """Compute the last hidden states into `workspace.last`; with `only_cache`, stop once the last layer's keys exist.

    `attend(layer)` turns `workspace.qkv` into `workspace.mixed`; `adapted` has the adapters of the rows.
    """
    shape = weights.shape
    heads = (shape.Q * shape.W, shape.H * shape.W, shape.H * shape.W)
    norm(weights, workspace, workspace.normed, weights.layers[0].input_norm, embed=tokens_T)
    for number, layer in enumerate(weights.layers):
        part = 4 * number
        if adapted is not None:
            adapted.shrink(part + QKV, workspace.normed, layers=3)
        if layer.qkv_bias is None:
            torch.mm(workspace.normed, layer.qkv.t(), out=workspace.qkv)
        else:
            torch.addmm(layer.qkv_bias, workspace.normed, layer.qkv.t(), out=workspace.qkv)
        if adapted is not None:
            adapted.expand(part + QKV, workspace.qkv, heads)
        attend(number)
        last = number + 1 == len(weights.layers)
        if last and only_cache:
            return
        _add_product(workspace, workspace.mixed, layer.out, adapted, part + OUT)
        norm(weights, workspace, workspace.normed, layer.inner_norm)
        if adapted is not None:
            adapted.shrink(part + GATE_UP, workspace.normed, layers=2)
        torch.mm(workspace.normed, layer.gate_up.t(), out=workspace.both)
        if adapted is None:
            gate(workspace)
        else:
            adapted.gate(part + GATE_UP, workspace.inner, workspace.both)
        _add_product(workspace, workspace.inner, layer.down, adapted, part + DOWN)
        if last:
            norm(weights, workspace, workspace.last, weights.norm)
        else:
            norm(weights, workspace, workspace.normed, weights.layers[number + 1].input_norm)


def _add_product(workspace: Workspace, x: Tensor, weight: Tensor, adapted: AdaptedRows | None, part: int) -> None:
    """Add a product to the residual stream."""
    if adapted is not None:
        adapted.shrink(part, x)
    addmm_fp32(workspace.stream, x, weight, out=workspace.stream)
    if adapted is not None:
        adapted.expand(part, workspace.stream, (workspace.stream.shape[1],))


def norm(
    weights: DenseWeights, workspace: Workspace, out: Tensor, scale: Tensor, *, embed: Tensor | None = None
) -> None:
    """Norm the stream into `out`; with `embed`, first set the stream to the tokens' embeddings."""
    rows, width = workspace.stream.shape
    kernels.norm_kernel[(rows,)](
        out,
        workspace.stream,
        weights.embedding,
        workspace.stream if embed is None else embed,
        scale,
        weights.shape.epsilon,
        width,
        BLOCK=triton.next_power_of_2(width),
        EMBED=embed is not None,
        num_warps=8 if width > 1024 else 4,
    )


def gate(workspace: Workspace) -> None:
    rows, width = workspace.inner.shape
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    kernels.gate_kernel[grid](workspace.inner, workspace.both, width, BLOCK=GATE_BLOCK, num_warps=4)


class DecodeAttention:
    """Attend with one new token per row, for up to `rows` rows; owns the buffers of rows whose keys are split."""

    def __init__(self, weights: DenseWeights, rows: int) -> None:
        shape, like = weights.shape, weights.embedding
        most = max(splits_for(count, shape.H) * count for count in range(1, rows + 1))
        self._weights = weights
        self._parts = torch.zeros(most * shape.Q * shape.W, dtype=torch.float32, device=like.device)
        self._part_weights = torch.zeros(most * shape.Q, dtype=torch.float32, device=like.device)
        self._arrivals = torch.zeros(rows * shape.H, dtype=torch.int32, device=like.device)

    def __call__(self, layer: int, workspace: Workspace, index: TokenIndex, cache: KVCache) -> None:
        shape, weights = self._weights.shape, self._weights
        rows = workspace.qkv.shape[0]
        splits = splits_for(rows, shape.H)
        of = weights.layers[layer]
        norm = of.query_norm is not None
        unused = weights.norm
        kernels.decode_kernel[(rows, shape.H, splits)](
            workspace.mixed,
            self._parts,
            self._part_weights,
            self._arrivals,
            workspace.qkv,
            weights.cosines,
            weights.sines,
            cache.keys[layer],
            cache.values[layer],
            index.positions,
            index.slots,
            index.slot_tokens,
            index.donors,
            index.shared,
            index.shifts,
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
            LEAST=LEAST_KEYS if rows * shape.H >= MANY else 0,
            NORM=norm,
            PRECISION=precision(workspace.qkv),
            **_program(workspace.qkv, rows * shape.H, shape.W),
        )


def _program(like: Tensor, programs: int, width: int) -> dict[str, int]:
    """Choose keys per block, warps and pipeline stages of decode attention. With several programs per processor, one
    warp each is enough and has no other to wait for."""
    if like.dtype == torch.float32 or programs < MANY or width > 128:
        return {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK": 32, "num_warps": 1, "num_stages": 4}


def precision(like: Tensor) -> str:
    """Return the precision of products in a kernel: exact in float32; half precision has only one."""
    return "ieee" if like.dtype == torch.float32 else "tf32"


def prompt_attention(
    weights: DenseWeights,
    layer: int,
    workspace: Workspace,
    index: TokenIndex,
    cache: KVCache,
    blocks: Tensor,
    *,
    only_cache: bool,
) -> None:
    """Write keys and values of prompt tokens into their slots; then, unless `only_cache`, attend causally over them."""
    shape, of = weights.shape, weights.layers[layer]
    norm = of.query_norm is not None
    unused = weights.norm
    kernels.turn_kernel[(workspace.qkv.shape[0],)](
        workspace.qkv,
        weights.cosines,
        weights.sines,
        cache.keys[layer],
        cache.values[layer],
        index.positions,
        index.slots,
        index.slot_tokens,
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
    exact = workspace.qkv.dtype == torch.float32
    kernels.prompt_kernel[(blocks.shape[0], shape.Q)](
        workspace.mixed,
        workspace.qkv,
        cache.keys[layer],
        cache.values[layer],
        blocks,
        index.slot_tokens,
        kernels.LOG2_E * shape.W**-0.5,
        Q=shape.Q,
        H=shape.H,
        W=shape.W,
        ROWS=PROMPT_ROWS,
        BLOCK=32 if exact else 64,
        PRECISION=precision(workspace.qkv),
        num_warps=4,
        num_stages=1 if exact else 3,
    )
