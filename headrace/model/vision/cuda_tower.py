"""Make vision towers fast on CUDA: one attention call for all images, rotation in one kernel, patches by a product.

transformers reads the lengths of the images from the device in every layer and computes their attention one by one,
rotates queries and keys in a dozen passes through memory, and embeds patches by a convolution, which is a slow way to
write a matrix product (and one that rounds operands to TensorFloat-32 in float32 models).

Shape letters: T patches of all images, H heads, D width of a head.
"""

import itertools
import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.model import cuda
from headrace.model.cuda import cudnn_attention

ATTENTIONS = ("Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3_5VisionAttention")
LENGTHS = "_headrace_lengths"  # on a tensor of running sums: the numbers, read from the device once for all layers


def fuse_tower_module(module: nn.Module) -> None:
    """Give an attention of a type listed above, or a convolution over separate patches, a fast forward."""
    if type(module).__name__ in ATTENTIONS:
        module.forward = MethodType(_attention_forward, module)  # bound, so a deep copy of the model uses its own
    elif _embeds_patches(module):
        module.forward = MethodType(embed_patches, module)


def _embeds_patches(module: nn.Module) -> bool:
    if type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    conv: Any = module
    flat = all(padding == 0 for padding in conv.padding) if isinstance(conv.padding, tuple) else conv.padding == "valid"
    return conv.kernel_size == conv.stride and flat and conv.groups == 1 and set(conv.dilation) == {1}


def embed_patches(conv: Any, pixels: Tensor) -> Tensor:
    """Compute a convolution whose steps are as large as its kernel, as a product: [N, C, sizes] -> [N, D, patches]."""
    counts = [size // kernel for size, kernel in zip(pixels.shape[2:], conv.kernel_size, strict=True)]
    pairs = list(zip(counts, conv.kernel_size, strict=True))
    for dim, (count, kernel) in enumerate(pairs):
        pixels = pixels.narrow(2 + dim, 0, count * kernel)
    split = pixels.reshape(*pixels.shape[:2], *itertools.chain.from_iterable(pairs))
    places, inner = range(2, 2 + 2 * len(pairs), 2), range(3, 3 + 2 * len(pairs), 2)
    patches = split.permute(0, *places, 1, *inner).reshape(-1, pixels.shape[1] * math.prod(conv.kernel_size))
    embedded = F.linear(patches, conv.weight.flatten(1), conv.bias)
    return embedded.view(pixels.shape[0], *counts, -1).movedim(-1, 1)


def _attention_forward(
    module: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None, **_: Any
) -> Tensor:
    tokens = hidden_states.shape[0]
    query, key, value = module.qkv(hidden_states).view(tokens, 3, module.num_heads, -1).unbind(1)
    cos, sin = position_embeddings
    query, key = (rotate(states, cos, sin) for states in (query, key))
    out = attend_images(query, key, value, cu_seqlens, module.scaling)
    projected: Tensor = module.proj(out.flatten(1))
    return projected


def rotate(states_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Compute x cos + rotate_half(x) sin in float32 for every head, in the type of x."""
    if states_THD.is_cuda and cuda.available():
        from headrace.model.cuda.layers import rotate as fused  # needs Triton

        return fused(states_THD, cos_TD, sin_TD)
    wide = torch.promote_types(states_THD.dtype, torch.float32)
    x, cos, sin = states_THD.to(wide), cos_TD[:, None].to(wide), sin_TD[:, None].to(wide)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(states_THD.dtype)


def attend_images(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    """Compute attention inside of each image or window, which lie end to end: `ends` has 0 and the running sums."""
    lengths = _lengths(ends)
    if len(set(lengths)) == 1:
        count = len(lengths)
        q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (query_THD, key_THD, value_THD))  # type: ignore[no-untyped-call]
        return _attend(q, k, v, scale).transpose(1, 2).flatten(0, 1)
    if query_THD.is_cuda and query_THD.dtype in cudnn_attention.HALF:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (t.contiguous() for t in (query_THD, key_THD, value_THD))
        out = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), scale=scale, window_size=(-1, -1))
        assert isinstance(out, Tensor)
        return out
    whole = (states.transpose(0, 1)[None] for states in (query_THD, key_THD, value_THD))
    queries, keys, values = (torch.split(states, lengths, dim=2) for states in whole)
    parts = [_attend(q, k, v, scale) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _attend(query_NHTD: Tensor, key_NHTD: Tensor, value_NHTD: Tensor, scale: float | None) -> Tensor:
    if cudnn_attention.cudnn_applies(query_NHTD):
        return cudnn_attention.attention(query_NHTD, key_NHTD, value_NHTD, scale, causal=False)
    return F.scaled_dot_product_attention(query_NHTD, key_NHTD, value_NHTD, scale=scale)


def _lengths(ends: Tensor) -> list[int]:
    found: list[int] | None = getattr(ends, LENGTHS, None)
    if found is None:
        numbers = ends.tolist()
        found = [stop - start for start, stop in itertools.pairwise(numbers)]
        setattr(ends, LENGTHS, found)
    return found
