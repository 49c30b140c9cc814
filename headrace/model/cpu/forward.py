"""The forward pass of plain decoder layers with few calls, for sampling on a CPU, where calls are half of a step.

It reads the parameters of the Hugging Face modules: query, key and value are one product, gate and up another, norm and
rotation are done once for both. Attention is the shared function. `cpu_forward` compares it with the modules' own
forward pass before it is used, and returns None for models that it cannot compute (adapters, other families, other
devices). It has no gradient.

Shape letters: T tokens, D width, Q query heads, H key-value heads, W head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.model.attention import Context, Packed, attend
from headrace.model.cpu.layers import rms_norm
from headrace.model.cpu.packed_linear import FusedLinear, PackedLinear, available, linear
from headrace.model.load import LanguageModel
from headrace.model.multi_lora import apply_adapters
from headrace.model.vision.kinds import text_config, text_model
from headrace.model.vision.tower import ImageRows

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text")  # of text halves too
CLOSE = 1e-3  # relative; another formula would be far off, rounding is below 1e-5
Forward = Callable[..., Tensor]  # tokens and positions, a context, and with `images` the features of images


def cpu_forward(lm: LanguageModel) -> Forward | None:
    """Make a forward pass with the signature and the result of `lm.hidden`; return None if the model has none."""
    if lm.device.type != "cpu" or lm.dtype != torch.float32 or not available():
        return None
    model = text_model(lm.model)
    if text_config(lm.model.config).model_type not in FAMILIES or not all(_is_plain(layer) for layer in model.layers):
        return None
    forward = _Forward(model, next(name for name, module in lm.model.named_modules() if module is model))
    tokens_T = torch.arange(6) % lm.vocabulary
    positions_T = torch.tensor([0, 1, 2, 3, 0, 1])
    with torch.inference_mode():
        expected = lm.hidden(tokens_T, positions_T, Packed((4, 2)))
        hidden_TD = forward(tokens_T, positions_T, Packed((4, 2)))
    return forward if torch.allclose(hidden_TD, expected, rtol=CLOSE, atol=CLOSE) else None


def _is_plain(layer: Any) -> bool:
    """Tell whether a layer has the usual projections, without adapters, and a SiLU."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = [(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(getattr(owner, name, None)) is PackedLinear for owner, name in names):
        return False
    return isinstance(getattr(mlp, "act_fn", None), nn.SiLU) or type(getattr(mlp, "act_fn", None)).__name__.startswith(
        "SiLU"
    )


class _Forward:
    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._layers = [_Layer(layer, f"{name}.layers.{index}") for index, layer in enumerate(model.layers)]

    def __call__(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Context, *, images: ImageRows | None = None
    ) -> Tensor:
        x_TD = F.embedding(tokens_T, self._model.embed_tokens.weight)
        if images is not None:
            x_TD = images.embed(x_TD)
        deep = () if images is None else images.deep
        cos, sin = self._model.rotary_emb(
            x_TD[None], positions_T[None] if positions_T.ndim == 1 else positions_T[:, None]
        )
        first, second = sin[0, :, None].chunk(2, dim=-1)
        signed = torch.cat([-first, second], dim=-1)
        for index, layer in enumerate(self._layers):
            x_TD = layer(x_TD, cos[0, :, None], signed, attention)
            if index < len(deep):
                assert images is not None
                x_TD = x_TD.index_add(0, images.rows_I, deep[index].to(x_TD.dtype))
        return _norm(x_TD, self._model.norm)


class _Layer:
    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._attention, self._mlp = layer, layer.self_attn, layer.mlp
        self._q, self._o = f"{name}.self_attn.q_proj", f"{name}.self_attn.o_proj"
        self._gate, self._down = f"{name}.mlp.gate_proj", f"{name}.mlp.down_proj"
        self._width = int(self._attention.head_dim)
        self._qkv = FusedLinear([self._attention.q_proj, self._attention.k_proj, self._attention.v_proj])
        self._gate_up = FusedLinear([self._mlp.gate_proj, self._mlp.up_proj])
        self._queries = self._attention.q_proj.out_features // self._width
        self._keys = self._attention.k_proj.out_features // self._width
        config = self._attention.config
        window = getattr(self._attention, "sliding_window", None)
        self._window: int | None = config.sliding_window if config.model_type == "mistral" else window

    def __call__(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attention: Context) -> Tensor:
        tokens, rotated = x_TD.shape[0], self._queries + self._keys
        normed_TD = _norm(x_TD, self._layer.input_layernorm)
        heads = apply_adapters(self._q, normed_TD, self._qkv(normed_TD)).view(tokens, -1, self._width)
        turned = heads[:, :rotated]
        if hasattr(self._attention, "q_norm"):
            parts = [(turned[:, : self._queries], "q_norm"), (turned[:, self._queries :], "k_norm")]
            turned = torch.cat([_norm(part, getattr(self._attention, name)) for part, name in parts], dim=1)
        turned = torch.addcmul(turned * cos, _rotate_half(turned), sin)
        query, key, value = turned[:, : self._queries], turned[:, self._queries :], heads[:, rotated:]
        out, _ = attend(
            self._attention,
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            None,
            scaling=self._attention.scaling,
            attention=attention,
            sliding_window=self._window,
        )
        x_TD = x_TD + _project(out.reshape(tokens, -1), self._attention.o_proj, self._o)
        normed_TD = _norm(x_TD, self._layer.post_attention_layernorm)
        gate, up = apply_adapters(self._gate, normed_TD, self._gate_up(normed_TD)).chunk(2, dim=-1)
        return x_TD + _project(F.silu(gate).mul_(up), self._mlp.down_proj, self._down)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _rotate_half(x: Tensor) -> Tensor:
    """Exchange the halves of each head; the minus sign of the first half is in the sine."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)


def _project(x: Tensor, layer: Any, name: str) -> Tensor:
    return apply_adapters(name, x, linear(x, layer.weight, layer.bias))
