"""Decoder layers of bfloat16 models whose matrix products have factors of 11 bits, as float16 has, and not of 8.

Sampler and trainer compute the same sums in another order, and every bfloat16 number between two products turns the
last bit of such a sum into a difference of one part in 256 for some of them; over 28 layers that made 0.015 in a
log-prob. Here what goes into a product of the forward pass is float16: norms, queries, keys and values, what attention
mixed, the gate's product. bfloat16 weights are float16 numbers as they are (but for those below 6e-8), and what may be
large, the residual stream, is float32. The gate's product ends at 65,504.

Gradients are bfloat16, which has the range for it. Autograd gives a tensor's gradient the tensor's own type, so between
functions float16 numbers travel as bfloat16 tensors of the same bits (`dress`), and only functions of this package may
read those. Where a product's backward pass will want its factor, a twin in true bfloat16 is written beside it and kept
in its place; attention's output is kept as it is, because the backward pass of attention wants it, and cast there.

Shape letters: T tokens, D width (of a head where there are heads), H heads, N outputs of a product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from headrace.model.attention import Packed, packed_keys
from headrace.model.cpu.packed_linear import PackedLinear
from headrace.model.cuda.compile import FUSED
from headrace.model.lora import LoraLinear

FINE, COARSE = torch.float16, torch.bfloat16
Fp16Operand = tuple[Tensor, Tensor | None]  # dressed float16 numbers, and their twin if it was asked for


def view_as_bf16(numbers: Tensor) -> Tensor:
    """float16 numbers as a bfloat16 tensor of the same bits."""
    return numbers.view(COARSE)


def view_as_fp16(numbers: Tensor) -> Tensor:
    """The float16 numbers of a dressed tensor."""
    return numbers.view(FINE)


def linears(layer: Any) -> tuple[nn.Module, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    outer = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return (*outer, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def supports_fp16_matmul(layer: Any) -> bool:
    """Whether a layer of a kind that is known here can be computed this way: it is bfloat16, its products are plain,
    and nobody has hooked into a part of it, because none of them is called."""
    if any(_hooked(module) for module in layer.modules() if module is not layer):
        return False
    return layer.input_layernorm.weight.dtype == COARSE and all(_plain(linear) for linear in linears(layer))


def _hooked(module: nn.Module) -> bool:
    forward = bool(module._forward_hooks or module._forward_pre_hooks)
    return forward or bool(module._backward_hooks or module._backward_pre_hooks)


def _plain(linear: nn.Module) -> bool:
    """Whether this module's own weights are all that its result depends on, and lie there as they are."""
    if isinstance(linear, LoraLinear):
        return _plain(linear.base)
    usual = type(linear) in (nn.Linear, PackedLinear) and "forward" not in vars(linear)
    return usual and type(linear.weight) is nn.Parameter and linear.weight.dtype == COARSE


def cache_dtype(model: Any, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values that a model's layers, in `dtype`, leave for later tokens."""
    first = model.base_model.layers[0]
    return FINE if dtype == COARSE and hasattr(first, FUSED) and supports_fp16_matmul(first) else dtype


def needs_bf16_copy(layer: Any) -> bool:
    """For gradients, and for adapters, whose small products are in bfloat16."""
    return torch.is_grad_enabled() or any(isinstance(linear, LoraLinear) for linear in linears(layer))


def linears_fp16(x: Fp16Operand, modules: Sequence[Any]) -> tuple[Tensor, ...]:
    """linear(x) of each, dressed."""
    parts = [_parts(x, module) for module in modules]
    flat = [part[kind] for kind in range(3) for part in parts]
    results: tuple[Tensor, ...] = _Products.apply(*x, len(parts), *flat)  # type: ignore[no-untyped-call]
    return results


def add_linear(stream: Tensor, x: Fp16Operand, module: Any) -> Tensor:
    """stream + linear(x), in float32."""
    weight, bias, update = _parts(x, module)
    for more in (bias, update):
        stream = stream if more is None else stream + more
    result: Tensor = _ProductOnto.apply(stream, *x, weight)  # type: ignore[no-untyped-call]
    return result


def addmm_fp32(stream_TN: Tensor, factor_TD: Tensor, weight_ND: Tensor, out: Tensor | None = None) -> Tensor:
    """stream + factor @ weight.T, added up in float32 by the product itself; `out` may be the stream."""
    if factor_TD.is_cuda and factor_TD.dtype != stream_TN.dtype:
        return torch.addmm(stream_TN, factor_TD, weight_ND.t(), out_dtype=stream_TN.dtype, out=out)
    return torch.addmm(stream_TN, factor_TD.to(stream_TN.dtype), weight_ND.t().to(stream_TN.dtype), out=out)


def attention_of(
    query: Tensor, key: Tensor, value: Tensor, context: Packed, scale: float, window: int | None, *, twin: bool
) -> Fp16Operand:
    """Causal attention of packed tokens, [T, H, D] each, dressed."""
    key, value, spans = packed_keys(key, value, context)
    mixed, coarse = _Attention.apply(query, key, value, *spans, scale, window, twin)  # type: ignore[no-untyped-call]
    return mixed, coarse


def _parts(x: Fp16Operand, module: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight, bias, and what an adapter adds."""
    if not isinstance(module, LoraLinear):
        return module.weight, module.bias, None
    assert x[1] is not None
    return module.base.weight, module.base.bias, module.update(x[1])


def add_fp32(grad: Tensor | None, grad_twin: Tensor | None) -> Tensor | None:
    """The gradient of a factor that was read as it is and as its twin."""
    if grad is None or grad_twin is None:
        return grad_twin if grad is None else grad
    return grad + grad_twin


class _Products(torch.autograd.Function):
    """(x, its twin, n, n weights, n biases, n updates) to n products."""

    @staticmethod
    def forward(ctx: Any, dressed: Tensor, twin: Tensor | None, count: int, *parts: Tensor | None) -> Any:
        x_TD, shape = view_as_fp16(dressed).flatten(0, -2), dressed.shape[:-1]
        found = []
        for weight, bias, update in zip(parts[:count], parts[count : 2 * count], parts[2 * count :], strict=True):
            assert weight is not None
            fine_DN = _cast(weight, FINE).t()
            out = x_TD @ fine_DN if bias is None else torch.addmm(bias.to(FINE), x_TD, fine_DN)
            out = out.view(*shape, -1)
            found.append(view_as_bf16(out if update is None else (out + update).to(FINE)))
        ctx.save_for_backward(twin, *parts[:count])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        twin, *weights = ctx.saved_tensors
        count, needed = len(weights), ctx.needs_input_grad
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        grad_x: Tensor | None = None
        for grad_TN, weight_ND in zip(flat, weights, strict=True):
            if needed[0] and grad_TN is not None:
                grad_x = grad_TN @ weight_ND if grad_x is None else grad_x.addmm_(grad_TN, weight_ND)
        of_weights = [
            _weight_gradient(grad_TN, twin) if needed[3 + i] and grad_TN is not None else None
            for i, grad_TN in enumerate(flat)
        ]
        of_biases = [
            _column_sums(grad_TN) if needed[3 + count + i] and grad_TN is not None else None
            for i, grad_TN in enumerate(flat)
        ]
        grad_x = None if grad_x is None else grad_x.view(*twin.shape)
        of_updates = [grad if needed[3 + 2 * count + i] else None for i, grad in enumerate(grads)]
        return grad_x, None, None, *of_weights, *of_biases, *of_updates


class _ProductOnto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, dressed: Tensor, twin: Tensor | None, weight_ND: Tensor) -> Tensor:
        ctx.dressed = twin is None
        ctx.save_for_backward(dressed if twin is None else twin, weight_ND)
        x_TD = view_as_fp16(dressed).flatten(0, -2)
        return addmm_fp32(stream.flatten(0, -2), x_TD, _cast(weight_ND, FINE)).view(stream.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, weight_ND = ctx.saved_tensors
        grad_TN = grad.flatten(0, -2).to(COARSE)
        grad_x = (grad_TN @ weight_ND).view(kept.shape) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[3]:
            return grad, grad_x, None, None
        return grad, grad_x, None, _weight_gradient(grad_TN, _cast(view_as_fp16(kept), COARSE) if ctx.dressed else kept)


def _cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    if not numbers.is_cuda:
        return numbers.to(dtype)

    return cast(numbers, dtype)


def _column_sums(numbers_TN: Tensor) -> Tensor:
    if not numbers_TN.is_cuda:
        return numbers_TN.sum(dim=0)
    from headrace.model.cuda.reductions import column_sums  # needs Triton

    return column_sums(numbers_TN)


def _weight_gradient(grad_TN: Tensor, twin: Tensor) -> Tensor:
    return grad_TN.t() @ twin.flatten(0, -2)


class _Attention(torch.autograd.Function):
    """torch's own variable-length kernels, in float16 both ways: with softmax sums of other scores than its own, as of
    queries and keys rounded to bfloat16, a backward pass has errors that do not cancel where scores are large. Only
    gradients have the range of bfloat16 outside (`scaled.py`)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int,
        longest_keys: int, scale: float, window: int | None, twin: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        q, k, v = (view_as_fp16(states).contiguous() for states in (query, key, value))
        ctx.longest, ctx.causal = (longest, longest_keys), window is None
        ctx.how = {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        ctx.set_materialize_grads(False)
        spans = (ends, key_ends, *ctx.longest)
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *spans, 0.0, ctx.causal, False, **ctx.how
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, unused, ends, key_ends)
        return view_as_bf16(out), _cast(out, COARSE) if twin else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_twin: Tensor | None) -> Any:

        q, k, v, out, lse, seed, unused, ends, key_ends = ctx.saved_tensors
        wanted = add_fp32(grad, grad_twin)
        assert wanted is not None, "an attention that nobody reads"
        scale = GradientScale.of(wanted, terms=ctx.longest[0] * (q.shape[1] // k.shape[1]))  # of a value's gradient
        spans = (ends, key_ends, *ctx.longest)
        grads = torch.ops.aten._flash_attention_backward(
            scale.to_float16(wanted), q, k, v, out, lse, *spans, 0.0, ctx.causal, seed, unused, **ctx.how
        )
        return *(scale.from_float16(each, COARSE) for each in grads), *([None] * 7)


CAST_BLOCK = 4096


def cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """As `numbers.to(dtype)`, in the layout of a contiguous tensor."""
    numbers = numbers.contiguous()
    out = torch.empty_like(numbers, dtype=dtype)
    if size := numbers.numel():
        _cast_kernel[(triton.cdiv(size, CAST_BLOCK),)](numbers, out, size, BLOCK=CAST_BLOCK, num_warps=8)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(numbers, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    number = tl.load(numbers + place, mask=inside, other=0.0)
    tl.store(out + place, number.to(tl.float32).to(out.dtype.element_ty), mask=inside)


SCALE_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class GradientScale:
    """Of a gradient: its largest number goes below 2^(top + 1)."""

    peak: Tensor
    top: int

    @staticmethod
    def of(gradient: Tensor, terms: int) -> "GradientScale":
        """For sums of so many of its numbers, each times 1 at most."""
        peak = torch.linalg.vector_norm(gradient, math.inf, dtype=torch.float32)
        return GradientScale(peak, min(3, 14 - math.ceil(math.log2(max(terms, 1)))))

    def to_float16(self, gradient: Tensor) -> Tensor:
        return self._times(gradient, torch.float16, 1)

    def from_float16(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """What was computed from the scaled gradient, without the scale."""
        return self._times(result, dtype, -1)

    def _times(self, numbers: Tensor, dtype: torch.dtype, direction: int) -> Tensor:
        numbers = numbers.contiguous()
        out = torch.empty_like(numbers, dtype=dtype)
        if size := numbers.numel():
            grid = (triton.cdiv(size, SCALE_BLOCK),)
            _scale_kernel[grid](numbers, self.peak, out, size, self.top, DIRECTION=direction, BLOCK=SCALE_BLOCK)
        return out


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(numbers, peak, out, size, top, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Times 2^(top - e), or its inverse, with 2^e the power of two in the peak."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    exponent = tl.maximum(((tl.load(peak).to(tl.int32, bitcast=True) >> 23) & 255) - 127, -100)
    factor = ((DIRECTION * (top - exponent) + 127) << 23).to(tl.float32, bitcast=True)
    found = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)
