"""Norms and rotations of float64 models without transformers' detour through float32, for tests and references.

Shape letters: T tokens, D width of a head, H heads.
"""

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# which scale by 1 + weight
PLUS_ONE_NORMS = (
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5RMSNorm",
    "Qwen3_5MoeRMSNorm",
)
CENTRED_NORMS = ("Cohere2LayerNorm",)  # which subtract the mean, and have no bias
# attentions whose rotation casts to float32, and whether cosines still have to be interleaved there
ROUNDED_ROTATIONS = {"Cohere2Attention": False, "Ernie4_5Attention": True}
ROTATION = "apply_rotary_pos_emb"  # transformers' name of the function that an attention calls


def keep_float64(model: nn.Module) -> None:
    """Replace, in place, what would round a float64 model's numbers to float32 between layers."""
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind.endswith("RMSNorm") or kind in CENTRED_NORMS:
            parent, _, leaf = name.rpartition(".")
            norm = _Float64Norm(module, plus_one=kind in PLUS_ONE_NORMS, centred=kind in CENTRED_NORMS)
            setattr(model.get_submodule(parent), leaf, norm)
        if kind in ROUNDED_ROTATIONS:
            forward = _with_rotation(type(module).forward, interleave=ROUNDED_ROTATIONS[kind])
            module.forward = MethodType(forward, module)  # bound, so a deep copy of the model uses its own


class _Float64Norm(nn.Module):
    def __init__(self, norm: Any, *, plus_one: bool, centred: bool) -> None:
        super().__init__()
        self.weight = getattr(norm, "weight", None)
        self.eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
        self.plus_one, self.centred = plus_one, centred

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return scaled
        result: Tensor = scaled * (1.0 + self.weight if self.plus_one else self.weight)
        return result


def _with_rotation(forward: Any, *, interleave: bool) -> Any:
    """Copy an attention's forward function with a rotation that casts nothing; transformers' own stays as it is."""
    plain = inspect.unwrap(forward)
    assert isinstance(plain, FunctionType)
    names = {**plain.__globals__, ROTATION: partial(_rotate_pairs, interleave=interleave)}
    copied = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return copied


def _rotate_pairs(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring pairs of [1, H, T, D] by angles of [1, T, D]."""
    cos, sin = cos[:, None], sin[:, None]
    if interleave:
        cos, sin = (angles[..., : angles.shape[-1] // 2].repeat_interleave(2, dim=-1) for angles in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * cos + turned * sin

    return rotated(query), rotated(key)
