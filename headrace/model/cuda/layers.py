"""Fused RMS norm, rotation and gated SiLU of decoder layers: one kernel each way, in half precision.

transformers computes them operation by operation, and each is a pass through memory that rounds; here each is one pass
that rounds once, at its end. The residual stream between the layers is float32: rounding it at every addition is half
of what bfloat16 does to a log-prob. The operands of a bfloat16 model's matrix products are float16 (`fp16_matmul.py`
says why, and what "bit-cast" means). The sampler's kernels (`infer/cuda/kernels.py`) do the same.

Shape letters: T tokens, D width (of a head where there are heads), H heads.
"""

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from headrace.model.attention import Cached, Context, Packed, attend
from headrace.model.cuda import fp16_matmul, head_norms
from headrace.model.cuda.compile import FUSED
from headrace.model.cuda.recompute import RECOMPUTING, DeferredOperands
from headrace.model.cuda.reductions import add_strips
from headrace.model.vision.cuda_tower import fuse_tower_module

NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "MixtralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "Qwen3MoeRMSNorm",
    "Qwen3VLTextRMSNorm",
    "SmolLM3RMSNorm",
)
OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")  # whose weights are 1 + w
ATTENTIONS = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
    "Qwen3VLTextAttention",
)
LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "MixtralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "Qwen3VLTextDecoderLayer",
)
MLPS = (
    "LlamaMLP",
    "MistralMLP",
    "Qwen2MLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
    "Qwen3NextMLP",
    "Qwen3VLTextMLP",
    "Qwen3_5MLP",
    "Qwen3_5MoeMLP",
    "SmolLM3MLP",
)
MIXTURES = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")  # their products have bfloat16 operands
HALF = (torch.bfloat16, torch.float16)
STRIPS = 1056  # programs of the norm's backward pass, eight for each multiprocessor of an H100 or H200
BLOCK = 1024


def fuse_layers(model: nn.Module) -> None:
    """Give layers, norms, MLPs and attentions of the types listed above a fused forward; leave all others alone.

    Vision towers get theirs from `model/vision/cuda_tower.py`.
    """
    for module in model.modules():
        fuse_tower_module(module)
        name = type(module).__name__
        if name in NORMS:
            module.forward = MethodType(_norm_forward, module)  # bound, so a deep copy of the model uses its own
        elif name in OFFSET_NORMS:
            module.forward = MethodType(_offset_norm_forward, module)
        elif name in ATTENTIONS:
            module.forward = MethodType(_attention_forward, module)
        elif name in LAYERS:
            setattr(module, FUSED, _layer_forward)
            module.forward = MethodType(_layer_forward, module)
        elif name in MLPS and isinstance(module.act_fn, nn.SiLU | _silu_type()):
            module.forward = MethodType(_mlp_forward, module)


def _silu_type() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


def _applies(x: Tensor) -> bool:
    """Tell whether the fused kernels compute this tensor. A compiler sees transformers' code: it fuses by itself."""
    return x.is_cuda and x.dtype in HALF and not torch.compiler.is_compiling()


def _layer_forward(module: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Compute transformers' layer with a float32 residual stream, and return the stream."""
    first, second = module.input_layernorm, module.post_attention_layernorm
    if not _applies(first.weight):
        return type(module).forward(module, hidden_states, **options)  # type: ignore[no-any-return]
    if _fp16_applies(module, options):
        arguments = (hidden_states.float(), options["attention"], *options["position_embeddings"])
        if not defers_operands(module):
            return _layer_fp16(module, *arguments, deferred=None)
        with DeferredOperands() as deferred:
            return _layer_fp16(module, *arguments, deferred=deferred)
    stream, normed = add_norm(hidden_states.float(), None, first.weight, first.variance_epsilon)
    delta, _ = module.self_attn(hidden_states=normed, **options)
    stream, normed = add_norm(stream, delta, second.weight, second.variance_epsilon)
    return stream + module.mlp(normed)  # type: ignore[no-any-return]


def _fp16_applies(module: Any, options: Any) -> bool:
    attention, mlp = module.self_attn, module.mlp
    plain = type(mlp).__name__ in MLPS and isinstance(mlp.act_fn, nn.SiLU | _silu_type())
    listed = type(attention).__name__ in ATTENTIONS and (plain or type(mlp).__name__ in MIXTURES)
    whole = options["position_embeddings"][0].shape[-1] == attention.head_dim
    return listed and whole and fp16_matmul.supports_fp16_matmul(module)


def defers_operands(layer: Any) -> bool:
    """Tell whether operands are computed again for the backward pass: of layers with adapters that are not computed
    again as a whole, and whose own weights are frozen."""
    return torch.is_grad_enabled() and not RECOMPUTING.get() and not fp16_matmul.needs_bf16_copy(layer)


def _layer_fp16(
    module: Any, stream: Tensor, context: Context, cos: Tensor, sin: Tensor, *, deferred: DeferredOperands | None
) -> Tensor:
    first, second, attn, mlp = module.input_layernorm, module.post_attention_layernorm, module.self_attn, module.mlp
    bf16_copy = fp16_matmul.needs_bf16_copy(module)
    stream, normed = _norm_operand(stream, first, bf16_copy, deferred)
    query, key, value = (
        states.squeeze(0).unflatten(-1, (-1, attn.head_dim))  # type: ignore[no-untyped-call]
        for states in fp16_matmul.linears_fp16(normed, (attn.q_proj, attn.k_proj, attn.v_proj))
    )
    if hasattr(attn, "q_norm"):
        pairs = ((query, attn.q_norm), (key, attn.k_norm))
        query, key = (norm_fp16(states, norm, bf16_copy=False)[1][0] for states, norm in pairs)
    query, key = (rotate(states, cos[0], sin[0], bitcast=True) for states in (query, key))
    if isinstance(context, Packed):
        adapted = fp16_matmul.adapters_need_bf16(module)
        mixed = fp16_matmul.attention_fp16(query, key, value, context, attn.scaling, _window(attn), bf16_copy=adapted)
    else:
        mixed = _attend_cached(attn, query, key, value, context)
    flat = (mixed[0].flatten(-2)[None], None if mixed[1] is None else mixed[1].flatten(-2)[None])
    stream = fp16_matmul.add_linear(stream, flat, attn.o_proj)
    if type(mlp).__name__ in MIXTURES:
        stream, mixed_in = add_norm(stream, None, second.weight, second.variance_epsilon)
        return stream + mlp(mixed_in)  # type: ignore[no-any-return]
    stream, normed = _norm_operand(stream, second, bf16_copy, deferred)
    gate, up = fp16_matmul.linears_fp16(normed, (mlp.gate_proj, mlp.up_proj))
    product = gated_silu_fp16(gate, up, bf16_copy=bf16_copy)
    if deferred is not None:
        pair = gate.detach(), up.detach()
        deferred.defer(product[0], lambda: gated_silu_fp16(*pair, bf16_copy=False)[0])
    return fp16_matmul.add_linear(stream, product, mlp.down_proj)


def _norm_operand(
    stream: Tensor, norm: Any, bf16_copy: bool, deferred: DeferredOperands | None
) -> tuple[Tensor, fp16_matmul.Fp16Operand]:
    stream, normed = norm_fp16(stream, norm, bf16_copy=bf16_copy)
    if deferred is not None:
        kept = stream.detach()
        deferred.defer(normed[0], lambda: norm_fp16(kept, norm, bf16_copy=False)[1][0])
    return stream, normed


def _attend_cached(module: Any, query: Tensor, key: Tensor, value: Tensor, context: Cached) -> fp16_matmul.Fp16Operand:
    """Compute attention against the KV cache in float16; it has no gradient, so the operands need not be bit-cast."""
    q, k, v = (fp16_matmul.view_as_fp16(states).transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(module, q, k, v, None, scaling=module.scaling, attention=context, sliding_window=_window(module))
    return fp16_matmul.view_as_bf16(out[0]), out[0].to(fp16_matmul.BF16)


def _window(attention: Any) -> int | None:
    return getattr(attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None)


def _norm_forward(module: Any, hidden: Tensor) -> Tensor:
    if not _applies(module.weight):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def _offset_norm_forward(module: Any, hidden: Tensor) -> Tensor:
    """Compute the norm times 1 + w, which in half precision would lose w's bits."""
    if not (_applies(module.weight) and _applies(hidden)):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return rms_norm(hidden, 1.0 + module.weight.float(), module.eps).to(hidden.dtype)


def _mlp_forward(module: Any, hidden: Tensor) -> Tensor:
    if not _applies(hidden):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return module.down_proj(gated_silu(module.gate_proj(hidden), module.up_proj(hidden)))  # type: ignore[no-any-return]


def _attention_forward(module: Any, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
    """Keep packed tokens [T, H, D] from the projections to the kernel; sampling goes transformers' way."""
    context = options.get("attention")
    cos, sin = position_embeddings
    if not (isinstance(context, Packed) and _applies(hidden_states) and cos.shape[-1] == module.head_dim):
        return type(module).forward(module, hidden_states, position_embeddings=position_embeddings, **options)
    query, key, value = (
        projection(hidden_states).squeeze(0).unflatten(-1, (-1, module.head_dim))
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = rotate(query, cos[0], sin[0]), rotate(key, cos[0], sin[0])
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(module, q, k, v, None, scaling=module.scaling, attention=context, sliding_window=_window(module))
    return module.o_proj(out.flatten(-2)), None


def rotate(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, bitcast: bool = False) -> Tensor:
    """Compute x cos + rotate_half(x) sin for every head; both halves of cos and sin are alike.

    With `bitcast`, states and result are float16 in bfloat16 tensors.
    """
    result: Tensor = _Rotate.apply(states_THD, cos_TD, sin_TD, bitcast)  # type: ignore[no-untyped-call]
    return result


def rms_norm(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute weight * (x / sqrt(mean x^2 + eps)) over the last dimension in float32; round to the weight's type."""
    result: Tensor = _Norm.apply(hidden, None, weight_D, eps, False, False)[1]  # type: ignore[no-untyped-call]
    return result


def add_norm(stream: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute stream + delta and its norm."""
    added, normed, _ = _Norm.apply(stream, delta, weight_D, eps, False, False)  # type: ignore[no-untyped-call]
    return added, normed


def norm_fp16(hidden: Tensor, module: Any, *, bf16_copy: bool) -> tuple[Tensor, fp16_matmul.Fp16Operand]:
    """Return the hidden states as they are, and their norm as an operand. A bfloat16 tensor is read as bit-cast."""
    hidden, normed, copy = _Norm.apply(hidden, None, module.weight, module.variance_epsilon, True, bf16_copy)  # type: ignore[no-untyped-call]
    return hidden, (normed, copy)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    result: Tensor = _GatedSilu.apply(gate, up, False, False)[0]  # type: ignore[no-untyped-call]
    return result


def gated_silu_fp16(gate: Tensor, up: Tensor, *, bf16_copy: bool) -> fp16_matmul.Fp16Operand:
    """Compute silu(gate) * up of bit-cast tensors as an operand, clamped to float16's largest number."""
    product, copy = _GatedSilu.apply(gate, up, True, bf16_copy)  # type: ignore[no-untyped-call]
    return product, copy


class _Norm(torch.autograd.Function):
    """Maps (x, delta, weight, eps, bitcast, bf16_copy) to (x + delta, its norm, the norm's bfloat16 copy).

    Without a delta the first is x as it is; without `bf16_copy` the last is None.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, bitcast: bool, bf16_copy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        width, shape = hidden.shape[-1], hidden.shape
        flat_TD = hidden.reshape(-1, width).contiguous()
        if bitcast and flat_TD.dtype == fp16_matmul.BF16:
            flat_TD = fp16_matmul.view_as_fp16(flat_TD)
        added_TD = flat_TD if delta is None else torch.empty_like(flat_TD)
        out_TD = torch.empty_like(flat_TD, dtype=fp16_matmul.FP16 if bitcast else weight_D.dtype)
        copy_TD = torch.empty_like(flat_TD, dtype=weight_D.dtype) if bf16_copy else None
        scale_T = torch.empty(len(flat_TD), dtype=torch.float32, device=hidden.device)
        if not len(flat_TD):
            pass
        elif delta is None and width <= head_norms.NARROW:
            head_norms.norm(flat_TD, weight_D, eps, out_TD, copy_TD, scale_T)
        else:
            change_TD = flat_TD if delta is None else delta.reshape(flat_TD.shape).contiguous()
            _norm_kernel[(len(flat_TD),)](
                flat_TD, change_TD, weight_D, added_TD, out_TD, copy_TD, scale_T, width, eps,
                DELTA=delta is not None, COPY=bf16_copy, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        ctx.save_for_backward(added_TD, weight_D, scale_T)
        ctx.dtype, ctx.delta_dtype = hidden.dtype, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        normed = (fp16_matmul.view_as_bf16(out_TD) if bitcast else out_TD).view(shape)
        added = hidden if delta is None else added_TD.view(shape)
        return added, normed, None if copy_TD is None else copy_TD.view(shape)

    @staticmethod
    def backward(ctx: Any, grad_added: Tensor | None, grad_normed: Tensor | None, grad_copy: Tensor | None) -> Any:
        flat_TD, weight_D, scale_T = ctx.saved_tensors
        tokens, width = flat_TD.shape
        grad = fp16_matmul.add_gradients(grad_normed, grad_copy)
        assert grad is not None, "a norm whose output has no gradient"
        shape, grad_TD = grad.shape, grad.reshape(tokens, width).contiguous()
        past_TD = None if grad_added is None else grad_added.reshape(tokens, width).contiguous()
        grad_x_TD = torch.empty_like(flat_TD, dtype=ctx.dtype)
        grad_delta_TD = None if ctx.delta_dtype is None else torch.empty_like(flat_TD, dtype=ctx.delta_dtype)
        strips = min(STRIPS, max(tokens, 1))
        partial_SD = torch.empty(strips, width, dtype=torch.float32, device=grad.device)
        if not tokens:
            partial_SD.zero_()
        elif past_TD is None and grad_delta_TD is None and width <= head_norms.NARROW:
            partial_SD = head_norms.norm_backward(flat_TD, weight_D, scale_T, grad_TD, grad_x_TD)
        else:
            _norm_backward_kernel[(strips,)](
                flat_TD, weight_D, scale_T, grad_TD, past_TD, grad_x_TD, grad_delta_TD, partial_SD,
                tokens, width, triton.cdiv(tokens, strips),
                PAST=past_TD is not None, DELTA=grad_delta_TD is not None, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        grad_delta = None if grad_delta_TD is None else grad_delta_TD.view(shape)
        of_weight = add_strips(partial_SD, weight_D.dtype) if ctx.needs_input_grad[2] else None
        return grad_x_TD.view(shape), grad_delta, of_weight, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, bitcast: bool) -> Tensor:
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        ctx.save_for_backward(cos_TD, sin_TD)
        if bitcast:
            return fp16_matmul.view_as_bf16(_rotated(fp16_matmul.view_as_fp16(states_THD), cos_TD, sin_TD, 1.0))
        return _rotated(states_THD, cos_TD, sin_TD, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotated(grad, cos_TD, sin_TD, -1.0), None, None, None


def _rotated(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, direction: float) -> Tensor:
    states_THD = states_THD.contiguous()
    out_THD = torch.empty_like(states_THD)
    tokens, heads, width = states_THD.shape
    if tokens:
        _rotate_kernel[(tokens,)](
            states_THD, cos_TD, sin_TD, out_THD, direction, heads,
            WIDTH=width, BLOCK=triton.next_power_of_2(heads * width // 2),
        )  # fmt: skip
    return out_THD


class _GatedSilu(torch.autograd.Function):
    """Maps (gate, up, bitcast, bf16_copy) to (silu(gate) * up, its bfloat16 copy)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, bitcast: bool, bf16_copy: bool) -> tuple[Tensor, Tensor | None]:
        gate, up = gate.contiguous(), up.contiguous()
        copy = torch.empty_like(gate) if bf16_copy else None
        if bitcast:
            gate, up = fp16_matmul.view_as_fp16(gate), fp16_matmul.view_as_fp16(up)
        out = torch.empty_like(gate)
        if size := gate.numel():
            grid = (triton.cdiv(size, BLOCK),)
            _silu_kernel[grid](gate, up, out, copy, size, BLOCK=BLOCK, CLAMP=bitcast, COPY=bf16_copy)
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        return fp16_matmul.view_as_bf16(out) if bitcast else out, copy

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor | None, grad_copy: Tensor | None) -> Any:
        gate, up = ctx.saved_tensors
        grad = fp16_matmul.add_gradients(grad_product, grad_copy)
        assert grad is not None, "a product whose output has no gradient"
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
        if size := gate.numel():
            _silu_backward_kernel[(triton.cdiv(size, BLOCK),)](gate, up, grad, grad_gate, grad_up, size, BLOCK=BLOCK)
        return grad_gate, grad_up, None, None


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, weight, added, out, copy, scales, width, eps,
    DELTA: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(added + row * width + column, value, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(scales + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0)
    normed = value * scale * w.to(tl.float32)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + row * width + column, normed.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, past, grad_x, grad_delta, partial, tokens, width, rows,
    PAST: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx = s (w g - n mean(w g n)) + the gradient past the norm, and dw = sum_t g n, with n = x s.

    The delta's gradient is that of x. Each program owns `rows` tokens and a row of dw.
    """
    strip = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, rows):
        row = (strip * rows + step).to(tl.int64)
        there = inside & (row < tokens)
        value = tl.load(x + row * width + column, mask=there, other=0.0)
        scale = tl.load(scales + row, mask=row < tokens, other=0.0)
        n = value.to(tl.float32) * scale
        g = tl.load(grad + row * width + column, mask=there, other=0.0).to(tl.float32)
        total += g * n
        wg = w * g
        mean = tl.sum(wg * n, axis=0) / width
        dx = scale * (wg - n * mean)
        if PAST:
            dx += tl.load(past + row * width + column, mask=there, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + column, dx.to(grad_x.dtype.element_ty), mask=there)
        if DELTA:
            tl.store(grad_delta + row * width + column, dx.to(grad_delta.dtype.element_ty), mask=there)
    tl.store(partial + strip * width + column, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    states, cos, sin, out, direction, heads, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate the pair (j, j + WIDTH / 2) of every head by the angle of j."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    half = WIDTH // 2
    inside = pair < heads * half
    column = pair % half
    place = token * heads * WIDTH + (pair // half) * WIDTH + column
    first = tl.load(states + place, mask=inside, other=0.0)
    x, y = first.to(tl.float32), tl.load(states + place + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * WIDTH + column).to(tl.float32)
    s = tl.load(sin + token * WIDTH + column).to(tl.float32) * direction
    tl.store(out + place, (x * c - y * s).to(first.dtype), mask=inside)
    tl.store(out + place + half, (y * c + x * s).to(first.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, copy, size, BLOCK: tl.constexpr, CLAMP: tl.constexpr, COPY: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0)
    exact = g.to(tl.float32)
    product = exact * tl.sigmoid(exact) * u.to(tl.float32)
    if CLAMP:
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + place, product.to(u.dtype), mask=inside)
    if COPY:
        tl.store(copy + place, product.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_backward_kernel(gate, up, grad, grad_gate, grad_up, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute dup = g silu(x) and dgate = g up (sigma + silu(x) (1 - sigma)), x the gate."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(x)
    silu = x * sigma
    dtype = grad_up.dtype.element_ty
    tl.store(grad_up + place, (g * silu).to(dtype), mask=inside)
    tl.store(grad_gate + place, (g * u.to(tl.float32) * (sigma + silu * (1.0 - sigma))).to(dtype), mask=inside)
