"""RMS norm and rotation of decoder layers in float32 on a CPU, with few passes through memory each way.

transformers computes them operation by operation and keeps what each of those needs for its gradient. Here a norm keeps
its input and one number per token, a rotation keeps nothing, and gradients are written out by hand. Layers of other
types, and layers that are not float32 on a CPU, go transformers' way (CUDA: `model/cuda/layers.py`).

Shape letters: T tokens, D width (of a head where there are heads), H heads.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.attention import attend

NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "MixtralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "Qwen3MoeRMSNorm",
    "Qwen3VLTextRMSNorm",
)
ATTENTIONS = (
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
    "Qwen3VLTextAttention",
)


def patch_cpu_layers(model: nn.Module) -> None:
    """Replace the forward of norms and attentions of the types listed above; leave all others alone.

    A module whose forward was replaced before, as in the copy of a model on CUDA, keeps that one.
    """
    for module in model.modules():
        name = type(module).__name__
        if "forward" in vars(module):
            continue
        if name in NORMS:
            module.forward = MethodType(_norm_forward, module)  # bound, so a deep copy of the model uses its own
        elif name in ATTENTIONS:
            module.forward = MethodType(_attention_forward, module)


def rms_norm(hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute weight * x / sqrt(mean x^2 + eps) over the last dimension."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight_D.requires_grad):
        result: Tensor = _Norm.apply(hidden, weight_D, eps)  # type: ignore[no-untyped-call]
        return result
    return (hidden * _scale(hidden, eps)).mul_(weight_D)


def rotate(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Compute x cos + rotate_half(x) sin for every head; both halves of cos and sin are alike."""
    result: Tensor = _Rotate.apply(states_THD, cos_TD[:, None], sin_TD[:, None])  # type: ignore[no-untyped-call]
    return result


def _applies(x: Tensor) -> bool:
    """Tell whether this file computes the tensor. A compiler sees transformers' code: it fuses by itself."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _norm_forward(module: Any, hidden: Tensor) -> Tensor:
    if not (_applies(hidden) and module.weight.dtype == torch.float32):
        return type(module).forward(module, hidden)  # type: ignore[no-any-return]
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def _attention_forward(module: Any, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
    """Keep tokens [T, H, D] from the projections to the attention function."""
    context = options.get("attention")
    cos, sin = position_embeddings
    if context is None or not _applies(hidden_states) or cos.shape[-1] != module.head_dim:
        return type(module).forward(module, hidden_states, position_embeddings=position_embeddings, **options)
    query, key, value = (
        projection(hidden_states).squeeze(0).unflatten(-1, (-1, module.head_dim))
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = rotate(query, cos[0], sin[0]), rotate(key, cos[0], sin[0])
    window = getattr(module if hasattr(module, "sliding_window") else module.config, "sliding_window", None)
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(module, q, k, v, None, scaling=module.scaling, attention=context, sliding_window=window)
    return module.o_proj(out.flatten(-2)), None


def _scale(hidden: Tensor, eps: float) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return size.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()


class _Norm(torch.autograd.Function):
    """dx = s (w g - n mean(w g n)) and dw = sum_t g n, with s the scale of a token and n = x s."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = _scale(hidden, eps)
        ctx.save_for_backward(hidden, weight_D, scale)
        return (hidden * scale).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight_D, scale = ctx.saved_tensors
        weighted = grad * weight_D
        mean = torch.linalg.vecdot(weighted, hidden).unsqueeze(-1).mul_(scale).mul_(scale).div_(-hidden.shape[-1])
        grad_hidden = weighted.addcmul_(hidden, mean).mul_(scale)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * hidden).mul_(scale).flatten(0, -2).sum(dim=0)
        return grad_hidden, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(states_THD, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def _rotated(states_THD: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out = states_THD * cos
    (first, second), half = states_THD.chunk(2, dim=-1), sin[..., : sin.shape[-1] // 2]
    turned_first, turned_second = out.chunk(2, dim=-1)
    turned_first.addcmul_(second, half, value=-direction)
    turned_second.addcmul_(first, half, value=direction)
    return out
