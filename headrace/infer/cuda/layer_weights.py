"""The weights that the CUDA decoder reads: the model's own parameters, and joined copies where that is faster.

Queries, keys and values are one matrix product, gate and up another, so their weights are copied next to each other;
layers with an adapter are copied merged. A bfloat16 model's layers are copied in float16, because the trainer's
products have operands of that precision too (`model/cuda/fp16_matmul.py`); head and embedding are read as they are.
`refresh` renews the copies after the model's parameters changed; the storage stays, so captured graphs stay valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.cuda.fp16_matmul import BF16, FP16
from headrace.model.load import LanguageModel
from headrace.model.lora import LoraLinear
from headrace.model.vision.kinds import text_config, text_model

TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text")  # of the text half, where a model has a vision tower
HALF = (torch.bfloat16, torch.float16)
WIDTHS = (32, 64, 128, 256)  # of an attention head


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a dense decoder: D stream, Q and H heads of width W, I inner, V vocabulary."""

    layers: int
    D: int
    Q: int
    H: int
    W: int
    inner: int
    V: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; `qkv` is queries, keys, values, and `gate_up` gate then up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    inner_norm: Tensor
    gate_up: Tensor
    down: Tensor


def unsupported_reason(lm: LanguageModel) -> str | None:
    """Say in a few words why this model cannot be decoded in CUDA graphs; return None if it can."""
    config: Any = text_config(lm.model.config)
    if lm.device.type != "cuda":
        return "the model is not on CUDA"
    if config.model_type not in TYPES:
        return f"models of type '{config.model_type}' have layers of another kind"
    layers = text_model(lm.model).layers
    attention, mlp = layers[0].self_attn, layers[0].mlp
    width, heads, kv_heads = attention.head_dim, config.num_attention_heads, config.num_key_value_heads
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    windows.append(config.sliding_window if config.model_type == "mistral" else None)
    if any(windows):
        return "it has a sliding window"
    if width not in WIDTHS or heads % kv_heads:
        return f"its heads are {width} wide"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if any(_bias(layer) is not None for layer in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return "its layers have biases"
    return None


def shape_of(lm: LanguageModel) -> DecoderShape:
    config: Any = text_config(lm.model.config)
    return DecoderShape(
        layers=config.num_hidden_layers,
        D=config.hidden_size,
        Q=config.num_attention_heads,
        H=config.num_key_value_heads,
        W=text_model(lm.model).layers[0].self_attn.head_dim,
        inner=config.intermediate_size,
        V=config.vocab_size,
        epsilon=config.rms_norm_eps,
    )


class DenseWeights:
    """The weights of a Llama-shaped model, and its rotary table for `positions` positions."""

    def __init__(self, lm: LanguageModel, *, positions: int) -> None:
        assert unsupported_reason(lm) in (None, "the model is not on CUDA")
        base = text_model(lm.model)
        self.shape = shape_of(lm)
        self.dtype = FP16 if lm.dtype == BF16 else lm.dtype  # of the operands of matrix products
        self._copies: list[tuple[Tensor, nn.Module, str]] = []
        self.embedding: Tensor = base.embed_tokens.weight.detach()
        self.norm: Tensor = base.norm.weight.detach()
        self.head = self._joined([lm.model.lm_head], dtype=lm.dtype)
        self.layers = [self._layer(layer) for layer in base.layers]
        place = torch.arange(positions, device=lm.device)[None]
        if text_config(lm.model.config).model_type == "qwen3_vl_text":  # the axes of a text token are alike
            place = place.expand(3, 1, -1)
        cosines, sines = base.rotary_emb(self.embedding[:1], place)
        half = self.shape.W // 2
        self.cosines, self.sines = (table[0, :, :half].contiguous() for table in (cosines, sines))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters again into the joined and merged copies."""
        for target, module, name in self._copies:
            target.copy_(_effective(module) if name == "weight" else getattr(module, name))

    def _layer(self, layer: Any) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biased = _bias(attention.q_proj) is not None
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return DecoderLayer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=self._joined(projections),
            qkv_bias=self._joined([_linear(module) for module in projections], "bias") if biased else None,
            query_norm=None if norms[0] is None else norms[0].weight.detach(),
            key_norm=None if norms[1] is None else norms[1].weight.detach(),
            out=self._joined([attention.o_proj]),
            inner_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._joined([mlp.gate_proj, mlp.up_proj]),
            down=self._joined([mlp.down_proj]),
        )

    def _joined(self, modules: Sequence[Any], name: str = "weight", *, dtype: torch.dtype | None = None) -> Tensor:
        """Concatenate the tensors of some layers in a copy; a single plain layer of the right type is used as it is."""
        dtype = dtype or self.dtype
        tensors = [getattr(_linear(module), name) for module in modules]
        if len(modules) == 1 and not isinstance(modules[0], LoraLinear) and tensors[0].dtype == dtype:
            parameter: Tensor = tensors[0].detach()
            return parameter
        sizes = [tensor.shape[0] for tensor in tensors]
        joined = torch.empty((sum(sizes), *tensors[0].shape[1:]), dtype=dtype, device=tensors[0].device)
        for target, module in zip(torch.split(joined, sizes), modules, strict=True):
            self._copies.append((target, module, name))
        return joined


def _linear(module: nn.Module) -> nn.Module:
    return module.base if isinstance(module, LoraLinear) else module


def _bias(module: nn.Module) -> Any:
    return getattr(_linear(module), "bias", None)


def _effective(module: nn.Module) -> Tensor:
    if not isinstance(module, LoraLinear):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight
    return module.merged_weight(dtype=torch.float32 if module.base.weight.dtype in HALF else None)
