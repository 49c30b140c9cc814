"""Matrix products and attention of bfloat16 models with float16 operands, which have 11 significant bits and not 8.

Sampler and trainer compute the same sums in another order, and every bfloat16 number between two products turns the
last bit of such a sum into a difference of one part in 256 for some of them; over 28 layers that made 0.015 in a
log-prob. Here the operands of the forward pass's products are float16: norms, queries, keys and values, attention's
output, the gate's product. bfloat16 weights are exact in float16 (but for those below 6e-8), and the residual stream,
which may be large, is float32. The gate's product is clamped to 65,504.

Gradients are bfloat16, which has the range for them. Autograd gives a tensor's gradient the tensor's own type, so
between functions float16 numbers travel as bfloat16 tensors of the same bits (`view_as_bf16`), and only functions of
this package may read those: they are called *bit-cast*. Where a product's backward pass will need its operand, a copy
in true bfloat16 is written beside it and kept in its place. Attention's output is kept as it is, because attention's
backward pass needs it, and cast there.

The module imports without Triton and runs on a CPU too, so that tests can compare it with plain products.

Shape letters: T tokens, D width (of a head where there are heads), H heads, N outputs of a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.attention import Packed, by_parts, make_packed, packed_keys
from headrace.model.cpu.packed_linear import PackedLinear
from headrace.model.cuda import cudnn_attention
from headrace.model.cuda.compile import FUSED
from headrace.model.lora import ADAPTER, LoraLinear
from headrace.model.multi_lora import adapters_in_use, is_adapter_hook, row_update
from headrace.model.supported import decoder_layers

FP16, BF16 = torch.float16, torch.bfloat16
Fp16Operand = tuple[Tensor, Tensor | None]  # bit-cast float16 numbers, and their bfloat16 copy if there is one


def view_as_bf16(numbers: Tensor) -> Tensor:
    """View float16 numbers as a bfloat16 tensor of the same bits."""
    return numbers.view(BF16)


def view_as_fp16(numbers: Tensor) -> Tensor:
    """View a bit-cast tensor as the float16 numbers that it holds."""
    return numbers.view(FP16)


# --- which layers --------------------------------------------------------------------------------------------------


def supports_fp16_matmul(layer: Any) -> bool:
    """Tell whether a layer of a fused kind has bfloat16 weights, plain products, and no hooks on its parts.

    Hooks would not run, because the parts are not called.
    """
    mlp: Any = getattr(layer, "mlp", None)
    called = set(mlp.modules()) if hasattr(mlp, "experts") else set[nn.Module]()  # experts are called with their hooks
    if any(_has_hooks(module) for module in layer.modules() if module is not layer and module not in called):
        return False
    return layer.input_layernorm.weight.dtype == BF16 and all(_is_plain(linear) for linear in _linears(layer))


def cache_dtype(model: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the keys and values that a model in `dtype` puts into the KV cache."""
    first = decoder_layers(model)[0]
    return FP16 if dtype == BF16 and hasattr(first, FUSED) and supports_fp16_matmul(first) else dtype


def needs_bf16_copy(layer: Any) -> bool:
    """Tell whether operands need a bfloat16 copy: for gradients of weights, or `adapters_need_bf16`."""
    if adapters_need_bf16(layer):
        return True
    return torch.is_grad_enabled() and any(_weight(linear).requires_grad for linear in _linears(layer))


def adapters_need_bf16(layer: Any) -> bool:
    """Tell whether tokens have different adapters, whose products are bfloat16; one adapter's are float16 here."""
    one = isinstance(ADAPTER.get(), int | None)
    return adapters_in_use() or (not one and any(isinstance(linear, LoraLinear) for linear in _linears(layer)))


def _weight(linear: Any) -> Tensor:
    weight: Tensor = linear.base.weight if isinstance(linear, LoraLinear) else linear.weight
    return weight


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    """Return the linear layers whose products have float16 operands; those of experts have not."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return projections if hasattr(mlp, "experts") else (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks other than those of row adapters, which are applied here too."""
    forward = any(not is_adapter_hook(hook) for hook in module._forward_hooks.values()) or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _is_plain(linear: nn.Module) -> bool:
    """Tell whether the result depends on the module's own bfloat16 weights alone, stored as they are."""
    if isinstance(linear, LoraLinear):
        return _is_plain(linear.base)
    usual = type(linear) in (nn.Linear, PackedLinear) and "forward" not in vars(linear)
    return usual and type(linear.weight) is nn.Parameter and linear.weight.dtype == BF16


# --- products and attention ----------------------------------------------------------------------------------------


def linears_fp16(x: Fp16Operand, modules: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute linear(x) for each module, bit-cast."""
    parts = [_parts(x, module) for module in modules]
    flat = [getattr(part, name) for name in ("weight", "bias", "update", "down", "up") for part in parts]
    scales = tuple(part.scale for part in parts)
    results: tuple[Tensor, ...] = _Linears.apply(*x, scales, *flat)  # type: ignore[no-untyped-call]
    return results


def add_linear(stream: Tensor, x: Fp16Operand, module: Any) -> Tensor:
    """Compute stream + linear(x) in float32."""
    part = _parts(x, module)
    for term in (part.bias, part.update):
        stream = stream if term is None else stream + term
    result: Tensor = _AddLinear.apply(stream, *x, part.weight, part.down, part.up, part.scale)  # type: ignore[no-untyped-call]
    return result


def addmm_fp32(stream_TN: Tensor, factor_TD: Tensor, weight_ND: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute stream + factor @ weight.T, added up in float32 by the product itself; `out` may be the stream."""
    if factor_TD.is_cuda and factor_TD.dtype != stream_TN.dtype:
        return torch.addmm(stream_TN, factor_TD, weight_ND.t(), out_dtype=stream_TN.dtype, out=out)
    return torch.addmm(stream_TN, factor_TD.to(stream_TN.dtype), weight_ND.t().to(stream_TN.dtype), out=out)


def attention_fp16(
    query: Tensor, key: Tensor, value: Tensor, context: Packed, scale: float, window: int | None, *, bf16_copy: bool
) -> Fp16Operand:
    """Compute causal attention of packed tokens, [T, H, D] each, bit-cast: long segments by cuDNN."""

    def others(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Fp16Operand:
        k, v, spans = packed_keys(k, v, packed)
        out, copy = _Attention.apply(q, k, v, *spans, scale, window, bf16_copy)  # type: ignore[no-untyped-call]
        return out, copy

    def long(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Fp16Operand:
        out, copy = _LongAttention.apply(q, k, v, rows, scale, bf16_copy)  # type: ignore[no-untyped-call]
        return out, copy

    if context.ends is None:
        context = make_packed(context.lengths, query.device, context.parents)
    if context.parts is None or window is not None or not cudnn_attention.cudnn_applies(query):
        return others(query, key, value, context)
    results = by_parts(query, key, value, context.parts, long=long, others=others)
    outs, copies = (list(column) for column in zip(*results, strict=True))
    return _joined(outs), _joined(copies) if bf16_copy else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def add_gradients(grad: Tensor | None, grad_copy: Tensor | None) -> Tensor | None:
    """Add the gradients of an operand and of its bfloat16 copy, either of which may be missing."""
    if grad is None or grad_copy is None:
        return grad_copy if grad is None else grad
    return grad + grad_copy


@dataclass(frozen=True, slots=True)
class _Parts:
    """Hold what a linear layer adds up: W x + bias + scale B (A x), or an update that was computed elsewhere."""

    weight: Tensor
    bias: Tensor | None
    update: Tensor | None = None
    down: Tensor | None = None  # A [R, D]
    up: Tensor | None = None  # B [N, R]
    scale: float = 1.0


def _parts(x: Fp16Operand, module: Any) -> _Parts:
    if not isinstance(module, LoraLinear):
        return _Parts(module.weight, module.bias, None if x[1] is None else row_update(module, x[1]))
    weight, bias, slot = module.base.weight, module.base.bias, ADAPTER.get()
    if slot is None:
        return _Parts(weight, bias)
    if isinstance(slot, int):
        return _Parts(weight, bias, down=module.down[slot], up=module.up[slot], scale=module.scale)
    assert x[1] is not None
    return _Parts(weight, bias, module.update(x[1]))


class _Linears(torch.autograd.Function):
    """Maps (x, its bfloat16 copy, n scales, n weights, n biases, n updates, n A, n B) to n products.

    Nothing is computed, or kept, for weights that are frozen. All A x are one product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_copy: Tensor | None, scales: tuple[float, ...], *parts: Tensor | None) -> Any:
        count, shape, x_TD = len(scales), x.shape[:-1], view_as_fp16(x).flatten(0, -2)
        weights, biases, updates, downs, ups = (parts[start * count : (start + 1) * count] for start in range(5))
        lows = _lows(x_TD, downs)
        products = []
        for weight, bias, update, low, up, scale in zip(weights, biases, updates, lows, ups, scales, strict=True):
            assert weight is not None
            weight_DN = _cast(weight, FP16).t()
            out = x_TD @ weight_DN if bias is None else torch.addmm(bias.to(FP16), x_TD, weight_DN)
            if low is not None and up is not None:
                out.addmm_(low, _cast(up, FP16).t(), alpha=scale)
            out = out.view(*shape, -1)
            products.append(view_as_bf16(out if update is None else (out + update).to(FP16)))
        needed = ctx.needs_input_grad[3 : 3 + count]
        adapted = any(down is not None for down in downs)
        kept = x_copy if x_copy is not None else x if any(needed) or adapted else None
        ctx.bitcast, ctx.count, ctx.scales, ctx.shape = kept is x, count, scales, x.shape
        ctx.save_for_backward(kept if any(needed) or adapted else None, *weights, *downs, *ups, *lows)
        ctx.set_materialize_grads(False)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kept, *saved = ctx.saved_tensors
        count, needed = ctx.count, ctx.needs_input_grad
        weights, downs, ups, lows = (saved[start * count : (start + 1) * count] for start in range(4))
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        x_copy = _cast(view_as_fp16(kept), BF16) if ctx.bitcast and kept is not None else kept
        grad_x: Tensor | None = None
        for grad_TN, weight_ND in zip(flat, weights, strict=True):
            if needed[0] and grad_TN is not None:
                grad_x = grad_TN @ weight_ND if grad_x is None else grad_x.addmm_(grad_TN, weight_ND)
        of_weights = [
            _weight_gradient(grad_TN, x_copy) if needed[3 + i] and grad_TN is not None else None
            for i, grad_TN in enumerate(flat)
        ]
        of_biases = [
            _column_sums(grad_TN) if needed[3 + count + i] and grad_TN is not None else None
            for i, grad_TN in enumerate(flat)
        ]
        of_updates = [grad if needed[3 + 2 * count + i] else None for i, grad in enumerate(grads)]
        of_downs, of_ups = [None] * count, [None] * count
        adapted = [i for i, grad in enumerate(flat) if grad is not None and downs[i] is not None]
        if adapted:
            grad_x, of_downs, of_ups = _adapter_gradients(grad_x, x_copy, flat, downs, ups, lows, ctx.scales, adapted)
        grad_x = None if grad_x is None else grad_x.view(*ctx.shape)
        return grad_x, None, None, *of_weights, *of_biases, *of_updates, *of_downs, *of_ups


class _AddLinear(torch.autograd.Function):
    """Maps (stream, x, its bfloat16 copy, weight, A, B, scale) to stream + x @ weight.T + scale (x @ A.T) @ B.T."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, x: Tensor, x_copy: Tensor | None, weight_ND: Tensor, down: Tensor | None,
        up: Tensor | None, scale: float,
    ) -> Tensor:  # fmt: skip
        x_TD = view_as_fp16(x).flatten(0, -2)
        out = addmm_fp32(stream.flatten(0, -2), x_TD, _cast(weight_ND, FP16))
        [low] = _lows(x_TD, [down])
        if low is not None and up is not None:
            out = addmm_fp32(out, low * scale, _cast(up, FP16), out=out)
        kept = (x if x_copy is None else x_copy) if ctx.needs_input_grad[3] or down is not None else None
        ctx.bitcast, ctx.scale, ctx.shape = x_copy is None, scale, x.shape
        ctx.save_for_backward(kept, weight_ND, down, up, low)
        return out.view(stream.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, weight_ND, down, up, low = ctx.saved_tensors
        grad_TN = grad.flatten(0, -2).to(BF16)
        grad_x = grad_TN @ weight_ND if ctx.needs_input_grad[1] else None
        x_copy = _cast(view_as_fp16(kept), BF16) if ctx.bitcast and kept is not None else kept
        of_weight = _weight_gradient(grad_TN, x_copy) if ctx.needs_input_grad[3] else None
        of_down = of_up = None
        if down is not None:
            grad_x, [of_down], [of_up] = _adapter_gradients(
                grad_x, x_copy, [grad_TN], [down], [up], [low], [ctx.scale], [0]
            )
        return grad, None if grad_x is None else grad_x.view(ctx.shape), None, of_weight, of_down, of_up, None


def _lows(x_TD: Tensor, downs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Compute A x in float16 for each adapter, in one product."""
    there = [down for down in downs if down is not None]
    if not there:
        return [None] * len(downs)
    joined = x_TD @ _cast(there[0] if len(there) == 1 else torch.cat(there), FP16).t()
    lows = iter(torch.split(joined, [len(down) for down in there], dim=1))
    return [None if down is None else next(lows) for down in downs]


def _adapter_gradients(
    grad_x: Tensor | None,
    x_copy: Tensor,
    grads: Sequence[Any],
    downs: Sequence[Any],
    ups: Sequence[Any],
    lows: Sequence[Any],
    scales: Sequence[float],
    adapted: Sequence[int],
) -> tuple[Tensor | None, list[Any], list[Any]]:
    """Add the adapters' part to the gradient of x, if that is wanted, and return those of A and B."""
    of_downs: list[Any] = [None] * len(grads)
    of_ups: list[Any] = [None] * len(grads)
    scaled = [(grads[i] @ ups[i]) * scales[i] for i in adapted]
    grad_low, joined = torch.cat(scaled, dim=1), torch.cat([downs[i] for i in adapted])
    if grad_x is not None:
        grad_x.addmm_(grad_low, joined)
    sizes = [len(downs[i]) for i in adapted]
    for i, gradient in zip(adapted, torch.split(_weight_gradient(grad_low, x_copy), sizes), strict=True):
        of_downs[i] = gradient
        of_ups[i] = (grads[i].t() @ lows[i].to(BF16)) * scales[i]
    return grad_x, of_downs, of_ups


class _Attention(torch.autograd.Function):
    """torch's variable-length attention kernels, in float16 both ways.

    A backward pass that used softmax sums of other scores than its own, as of queries and keys rounded to bfloat16,
    would have errors that do not cancel where scores are large. Only gradients have the range of bfloat16 outside
    (`fp16_kernels.py` scales them).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int,
        longest_keys: int, scale: float, window: int | None, bf16_copy: bool,
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
        return view_as_bf16(out), _cast(out, BF16) if bf16_copy else None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_copy: Tensor | None) -> Any:
        from headrace.model.cuda.fp16_kernels import GradientScale  # needs Triton

        q, k, v, out, lse, seed, unused, ends, key_ends = ctx.saved_tensors
        grad = add_gradients(grad_out, grad_copy)
        assert grad is not None, "an attention whose output has no gradient"
        scale = GradientScale.of(grad, terms=ctx.longest[0] * (q.shape[1] // k.shape[1]))  # of a value's gradient
        spans = (ends, key_ends, *ctx.longest)
        grads = torch.ops.aten._flash_attention_backward(
            scale.to_float16(grad), q, k, v, out, lse, *spans, 0.0, ctx.causal, seed, unused, **ctx.how
        )
        return *(scale.from_float16(scaled, BF16) for scaled in grads), *([None] * 7)


class _LongAttention(torch.autograd.Function):
    """Maps (query, key, value, rows, scale, bf16_copy) to causal attention of that many sequences of one length.

    By cuDNN, in float16 both ways, with gradients scaled as in `_Attention`.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: int, scale: float, bf16_copy: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (cudnn_attention.as_rows(view_as_fp16(states), rows) for states in (query, key, value))
        out_NHTD, saved = cudnn_attention.forward(q, k, v, scale, causal=True)
        ctx.rows, ctx.length, ctx.scale = rows, query.shape[0] // rows, scale
        ctx.numbers = [None if isinstance(one, Tensor) else one for one in saved]
        ctx.save_for_backward(q, k, v, out_NHTD, *(one if isinstance(one, Tensor) else None for one in saved))
        ctx.set_materialize_grads(False)
        out = out_NHTD.transpose(1, 2)[:, : ctx.length].reshape(query.shape)
        return view_as_bf16(out), _cast(out, BF16) if bf16_copy else None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_copy: Tensor | None) -> Any:
        from headrace.model.cuda.fp16_kernels import GradientScale  # needs Triton

        q, k, v, out, *tensors = ctx.saved_tensors
        saved = [number if tensor is None else tensor for tensor, number in zip(tensors, ctx.numbers, strict=True)]
        grad = add_gradients(grad_out, grad_copy)
        assert grad is not None, "an attention whose output has no gradient"
        scale = GradientScale.of(grad, terms=ctx.length * (q.shape[1] // k.shape[1]))  # of a value's gradient
        grad_NHTD = cudnn_attention.as_rows(scale.to_float16(grad), ctx.rows)
        grads = cudnn_attention.backward(grad_NHTD, q, k, v, out, saved, ctx.scale, causal=True)
        flat = (states.transpose(1, 2)[:, : ctx.length].flatten(0, 1) for states in grads)
        return *(scale.from_float16(scaled, BF16) for scaled in flat), None, None, None


def _weight_gradient(grad_TN: Tensor, x_copy: Tensor) -> Tensor:
    return grad_TN.t() @ x_copy.flatten(0, -2)


def _cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    if not numbers.is_cuda:
        return numbers.to(dtype)
    from headrace.model.cuda.fp16_kernels import cast  # needs Triton

    return cast(numbers, dtype)


def _column_sums(numbers_TN: Tensor) -> Tensor:
    if not numbers_TN.is_cuda:
        return numbers_TN.sum(dim=0)
    from headrace.model.cuda.reductions import column_sums  # needs Triton

    return column_sums(numbers_TN)
