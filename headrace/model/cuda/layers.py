"""RMS norm, rotation and gated SiLU of a decoder layer, one kernel each way, in half precision.

transformers computes them operation by operation, and each is a pass through memory that rounds; here each is one pass
that rounds once, at its end. The residual stream between the layers is float32: rounding it at every addition is half
of what bfloat16 does to a log-prob. What goes into the products of a bfloat16 model's layers is float16 (`fine.py`
says why, and what "dressed" means). The sampler's kernels (`infer/cuda/kernels.py`) do the same.

Shape letters: T tokens, D width (of a head where there are heads), H heads.
"""

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from headrace.model.attention import Cached, Context, Packed, attend
from headrace.model.cuda import fp16_matmul
from headrace.model.cuda.compile import FUSED
from headrace.model.cuda.reductions import add_strips
from headrace.model.lora import LoraLinear

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm")
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP")
HALF = (torch.bfloat16, torch.float16)
STRIPS = 1056  # programs of the norm's backward pass, eight for each multiprocessor of an H100 or H200
BLOCK = 1024


def fuse_layers(model: nn.Module) -> None:
    """Give layers, norms, MLPs and attentions that are known here their fused forward; all others stay as they are."""
    for module in model.modules():
        name = type(module).__name__
        if name in NORMS:
            module.forward = MethodType(_norm_forward, module)  # bound, so a deep copy of the model uses its own
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
    """A compiler makes kernels of its own, and sees transformers' code."""
    return x.is_cuda and x.dtype in HALF and not torch.compiler.is_compiling()


def _layer_forward(module: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    """transformers' layer with a float32 stream, which is what it returns."""
    first, second = module.input_layernorm, module.post_attention_layernorm
    if not _applies(first.weight):
        return type(module).forward(module, hidden_states, **given)  # type: ignore[no-any-return]
    if _fine_applies(module, given):
        return _fine_forward(module, hidden_states.float(), given["attention"], *given["position_embeddings"])
    stream, normed = add_norm(hidden_states.float(), None, first.weight, first.variance_epsilon)
    delta, _ = module.self_attn(hidden_states=normed, **given)
    stream, normed = add_norm(stream, delta, second.weight, second.variance_epsilon)
    return stream + module.mlp(normed)  # type: ignore[no-any-return]


def _fine_applies(module: Any, given: Any) -> bool:
    attention, mlp = module.self_attn, module.mlp
    known = type(attention).__name__ in ATTENTIONS and type(mlp).__name__ in MLPS
    whole = given["position_embeddings"][0].shape[-1] == attention.head_dim
    return (
        known and whole and isinstance(mlp.act_fn, nn.SiLU | _silu_type()) and fp16_matmul.supports_fp16_matmul(module)
    )


def _fine_forward(module: Any, stream: Tensor, context: Context, cos: Tensor, sin: Tensor) -> Tensor:
    first, second, of, mlp = module.input_layernorm, module.post_attention_layernorm, module.self_attn, module.mlp
    twin = fp16_matmul.needs_bf16_copy(module)
    stream, normed = fine_norm(stream, first, twin=twin)
    query, key, value = (
        states.squeeze(0).unflatten(-1, (-1, of.head_dim))  # type: ignore[no-untyped-call]
        for states in fp16_matmul.linears_fp16(normed, (of.q_proj, of.k_proj, of.v_proj))
    )
    if hasattr(of, "q_norm"):
        query, key = (fine_norm(x, norm, twin=False)[1][0] for x, norm in ((query, of.q_norm), (key, of.k_norm)))
    query, key = (rotate(states, cos[0], sin[0], dressed=True) for states in (query, key))
    if isinstance(context, Packed):
        adapted = isinstance(of.o_proj, LoraLinear)
        mixed = fp16_matmul.attention_of(query, key, value, context, of.scaling, _window(of), twin=adapted)
    else:
        mixed = _from_cache(of, query, key, value, context)
    flat = (mixed[0].flatten(-2)[None], None if mixed[1] is None else mixed[1].flatten(-2)[None])
    stream = fp16_matmul.add_linear(stream, flat, of.o_proj)
    stream, normed = fine_norm(stream, second, twin=twin)
    gate, up = fp16_matmul.linears_fp16(normed, (mlp.gate_proj, mlp.up_proj))
    return fp16_matmul.add_linear(stream, fine_gated_silu(gate, up, twin=twin), mlp.down_proj)


def _from_cache(module: Any, query: Tensor, key: Tensor, value: Tensor, context: Cached) -> fp16_matmul.Fp16Operand:
    """Without gradients, so nothing need be dressed."""
    q, k, v = (fp16_matmul.view_as_fp16(states).transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(module, q, k, v, None, scaling=module.scaling, attention=context, sliding_window=_window(module))
    return fp16_matmul.view_as_bf16(out[0]), out[0].to(fp16_matmul.COARSE)


def _window(attention: Any) -> int | None:
    return getattr(attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None)


def _norm_forward(module: Any, hidden: Tensor) -> Tensor:
    if not _applies(module.weight):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, hidden: Tensor) -> Tensor:
    if not _applies(hidden):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return module.down_proj(gated_silu(module.gate_proj(hidden), module.up_proj(hidden)))  # type: ignore[no-any-return]


def _attention_forward(module: Any, hidden_states: Tensor, position_embeddings: Any, **given: Any) -> Any:
    """Packed tokens stay [T, H, D] from the projections to the kernel; sampling goes transformers' way."""
    context = given.get("attention")
    cos, sin = position_embeddings
    if not (isinstance(context, Packed) and _applies(hidden_states) and cos.shape[-1] == module.head_dim):
        return type(module).forward(module, hidden_states, position_embeddings=position_embeddings, **given)
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


def rotate(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, dressed: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin, for every head; both halves of cos and sin are alike. With `dressed` all of it is."""
    result: Tensor = _Rotate.apply(states_THD, cos_TD, sin_TD, dressed)  # type: ignore[no-untyped-call]
    return result


def rms_norm(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean x^2 + eps)) over the last dimension, in the weight's type; all in float32 until then."""
    result: Tensor = _Norm.apply(hidden, None, weight_D, eps, False, False)[1]  # type: ignore[no-untyped-call]
    return result


def add_norm(stream: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """stream + delta, and its norm."""
    added, normed, _ = _Norm.apply(stream, delta, weight_D, eps, False, False)  # type: ignore[no-untyped-call]
    return added, normed


def fine_norm(hidden: Tensor, module: Any, *, twin: bool) -> tuple[Tensor, fp16_matmul.Fp16Operand]:
    """What is given, and its norm. bfloat16 is taken to be dressed."""
    given, normed, coarse = _Norm.apply(hidden, None, module.weight, module.variance_epsilon, True, twin)  # type: ignore[no-untyped-call]
    return given, (normed, coarse)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    result: Tensor = _GatedSilu.apply(gate, up, False, False)[0]  # type: ignore[no-untyped-call]
    return result


def fine_gated_silu(gate: Tensor, up: Tensor, *, twin: bool) -> fp16_matmul.Fp16Operand:
    """silu(gate) * up, all of it dressed, up to float16's largest number."""
    product, coarse = _GatedSilu.apply(gate, up, True, twin)  # type: ignore[no-untyped-call]
    return product, coarse


class _Norm(torch.autograd.Function):
    """(x, delta, weight, eps, dressed, twin) to (x + delta, its norm, the norm's twin); without a delta the first is x
    as it is, without `twin` the last is None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, dressed: bool, twin: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        width, shape = hidden.shape[-1], hidden.shape
        flat_TD = hidden.reshape(-1, width)
        if dressed and flat_TD.dtype == fp16_matmul.COARSE:
            flat_TD = fp16_matmul.view_as_fp16(flat_TD)
        added_TD = flat_TD if delta is None else torch.empty_like(flat_TD)
        out_TD = torch.empty_like(flat_TD, dtype=fp16_matmul.FINE if dressed else weight_D.dtype)
        twin_TD = torch.empty_like(flat_TD, dtype=weight_D.dtype) if twin else None
        scale_T = torch.empty(len(flat_TD), dtype=torch.float32, device=hidden.device)
        if len(flat_TD):
            change_TD = flat_TD if delta is None else delta.reshape(flat_TD.shape).contiguous()
            _norm_kernel[(len(flat_TD),)](
                flat_TD, change_TD, weight_D, added_TD, out_TD, twin_TD, scale_T, width, eps,
                DELTA=delta is not None, TWIN=twin, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        ctx.save_for_backward(added_TD, weight_D, scale_T)
        ctx.dtype, ctx.delta_dtype = hidden.dtype, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        normed = (fp16_matmul.view_as_bf16(out_TD) if dressed else out_TD).view(shape)
        added = hidden if delta is None else added_TD.view(shape)
        return added, normed, None if twin_TD is None else twin_TD.view(shape)

    @staticmethod
    def backward(ctx: Any, grad_added: Tensor | None, grad_normed: Tensor | None, grad_twin: Tensor | None) -> Any:
        flat_TD, weight_D, scale_T = ctx.saved_tensors
        tokens, width = flat_TD.shape
        grad = fp16_matmul.add_fp32(grad_normed, grad_twin)
        assert grad is not None, "a norm that nobody reads"
        shape, grad_TD = grad.shape, grad.reshape(tokens, width).contiguous()
        past_TD = None if grad_added is None else grad_added.reshape(tokens, width).contiguous()
        grad_x_TD = torch.empty_like(flat_TD, dtype=ctx.dtype)
        grad_delta_TD = None if ctx.delta_dtype is None else torch.empty_like(flat_TD, dtype=ctx.delta_dtype)
        strips = min(STRIPS, max(tokens, 1))
        partial_SD = torch.empty(strips, width, dtype=torch.float32, device=grad.device)
        if not tokens:
            partial_SD.zero_()
        else:
            _norm_backward_kernel[(strips,)](
                flat_TD, weight_D, scale_T, grad_TD, past_TD, grad_x_TD, grad_delta_TD, partial_SD,
                tokens, width, triton.cdiv(tokens, strips),
                PAST=past_TD is not None, DELTA=grad_delta_TD is not None, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip
        grad_delta = None if grad_delta_TD is None else grad_delta_TD.view(shape)
        return grad_x_TD.view(shape), grad_delta, add_strips(partial_SD, weight_D.dtype), None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, dressed: bool) -> Tensor:
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        ctx.save_for_backward(cos_TD, sin_TD)
        if dressed:
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
    """(gate, up, dressed, twin) to (their product, its twin)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, dressed: bool, twin: bool) -> tuple[Tensor, Tensor | None]:
        gate, up = gate.contiguous(), up.contiguous()
        coarse = torch.empty_like(gate) if twin else None
        if dressed:
            gate, up = fp16_matmul.view_as_fp16(gate), fp16_matmul.view_as_fp16(up)
        out = torch.empty_like(gate)
        if size := gate.numel():
            grid = (triton.cdiv(size, BLOCK),)
            _silu_kernel[grid](gate, up, out, coarse, size, BLOCK=BLOCK, FINE=dressed, TWIN=twin)
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        return fp16_matmul.view_as_bf16(out) if dressed else out, coarse

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor | None, grad_twin: Tensor | None) -> Any:
        gate, up = ctx.saved_tensors
        grad = fp16_matmul.add_fp32(grad_product, grad_twin)
        assert grad is not None, "a product that nobody reads"
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
        if size := gate.numel():
            _silu_backward_kernel[(triton.cdiv(size, BLOCK),)](gate, up, grad, grad_gate, grad_up, size, BLOCK=BLOCK)
        return grad_gate, grad_up, None, None


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, weight, added, out, twin, scales, width, eps,
    DELTA: tl.constexpr, TWIN: tl.constexpr, BLOCK: tl.constexpr,
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
    if TWIN:
        tl.store(twin + row * width + column, normed.to(twin.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, past, grad_x, grad_delta, partial, tokens, width, rows,
    PAST: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = s (w g - n mean(w g n)) + what came past the norm, dw = sum_t g n, with n = x s; the delta's gradient is
    that of x. Each program owns `rows` tokens and a row of dw."""
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
        found = scale * (wg - n * mean)
        if PAST:
            found += tl.load(past + row * width + column, mask=there, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + column, found.to(grad_x.dtype.element_ty), mask=there)
        if DELTA:
            tl.store(grad_delta + row * width + column, found.to(grad_delta.dtype.element_ty), mask=there)
    tl.store(partial + strip * width + column, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    states, cos, sin, out, direction, heads, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Of every head the pair (j, j + WIDTH / 2) by the angle of j."""
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
    gate, up, out, twin, size, BLOCK: tl.constexpr, FINE: tl.constexpr, TWIN: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0)
    exact = g.to(tl.float32)
    product = exact * tl.sigmoid(exact) * u.to(tl.float32)
    if FINE:
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + place, product.to(u.dtype), mask=inside)
    if TWIN:
        tl.store(twin + place, product.to(twin.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_backward_kernel(gate, up, grad, grad_gate, grad_up, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """dup = g silu(x), dgate = g up (sigma + silu(x) (1 - sigma)), x the gate."""
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
