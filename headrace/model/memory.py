"""Estimate the memory of a model and its training from its config.json alone, and plan what fits on a GPU.

Loads no weights and no torch.

Parameters are exact for the supported model types. Memory is an estimate: activations are what the backward pass
keeps per token without recomputation, and small buffers are left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, ModelError
from headrace.names import (
    JOINED_LAYERS,
    SMOLLM2_CONTEXT,
    SMOLLM2_WIDTH,
    STATE_PROJECTIONS,
    adapted_layers,
    described_context,
    min_kv_tokens,
    text_description,
)

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}
HEAD_CHUNK_TOKENS = 128  # tokens whose [tokens, vocabulary] the log-prob head holds at once
CUDA_HEAD_CHUNK_TOKENS = 2048  # the same on CUDA, where probabilities overwrite the float32 logits
HEAD_COPIES = 3  # logits, log-probs and their gradient
FP32 = 4
MLP = ("gate_proj", "up_proj", "down_proj")
USABLE = 0.92  # of a GPU's memory; the rest goes to fragments, workspaces and the driver
CUDA_CONTEXT = 2**30  # bytes that a process needs on a GPU before it computes anything
CACHE_PART = 4  # a KV cache of a quarter of the usable memory is large enough
# whose layers keep less on CUDA (`model/cuda/layers.py`)
FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text")

DELTA_NET_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # layers with a gated delta net
LATENT_TYPES = ("deepseek_v3", "glm4_moe_lite")  # whose keys and values come from a latent state
# types whose config.json need not say that the head is the embedding
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "smollm3", "cohere2", "ernie4_5")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureDims:
    """The experts of a model's layers."""

    experts: int
    per_token: int  # experts that a token chooses
    width: int  # of one expert, between its products
    shared_width: int = 0  # of the expert that every token meets
    plain_layers: int = 0  # layers with an ordinary MLP in place of experts
    biases: bool = False  # of the router and of both products of an expert
    matrices: int = 3  # of an expert; 2 without a gate
    latent: int = 0  # numbers that an expert reads and writes, where that is not the model's width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The dimensions of a model, from which all sizes follow."""

    model_type: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    tied: bool
    context: int | None
    biased: tuple[str, ...] = ()  # the projections with a bias
    norm_sizes: tuple[int, ...] = ()  # of the norms of one layer, with their biases
    joined: tuple[str, ...] = ()  # the projections that are several of Llama's in one: "qkv_proj", "gate_up_proj"
    last_norm: int | None = None  # numbers of the last norm, where they are not the width
    positions: int = 0  # learned positions
    gated: bool = True  # whether the MLP has a gate
    varied: tuple[Mapping[str, tuple[int, int]], ...] = ()  # the linear layers of each decoder layer, where they differ
    extra: int = 0  # parameters beside these: embeddings and norms of single layers
    cached: int | None = None  # numbers of a token's keys and values, where layers differ or share them
    mixture: MixtureDims | None = None
    state: int = 0  # numbers of a sequence's state in layers that have one in place of keys and values

    @property
    def projections(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of every linear layer of a decoder layer, by the name that LoRA targets use."""
        query, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        if not self.gated:
            return {
                "attn.c_attn": (self.width, query + 2 * keys),
                "attn.c_proj": (query, self.width),
                "mlp.c_fc": (self.width, self.mlp_width),
                "mlp.c_proj": (self.mlp_width, self.width),
            }
        attention = {"q_proj": (self.width, query), "k_proj": (self.width, keys), "v_proj": (self.width, keys)}
        if "qkv_proj" in self.joined:
            attention = {"qkv_proj": (self.width, query + 2 * keys)}
        inner = {"gate_proj": (self.width, self.mlp_width), "up_proj": (self.width, self.mlp_width)}
        if "gate_up_proj" in self.joined:
            inner = {"gate_up_proj": (self.width, 2 * self.mlp_width)}
        return {**attention, "o_proj": (query, self.width), **inner, "down_proj": (self.mlp_width, self.width)}

    @property
    def layer_projections(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """The projections of every decoder layer; experts are none."""
        if self.varied:
            return self.varied
        if (mixture := self.mixture) is None:
            return (self.projections,) * self.layers
        mixed = {name: size for name, size in self.projections.items() if name not in MLP}
        if mixture.shared_width:
            inner, outer = (self.width, mixture.shared_width), (mixture.shared_width, self.width)
            mixed |= {"gate_proj": inner, "up_proj": inner, "down_proj": outer}
        return (self.projections,) * mixture.plain_layers + (mixed,) * (self.layers - mixture.plain_layers)


SMOLLM2_135M = ModelDims(
    model_type="llama",
    width=SMOLLM2_WIDTH,
    layers=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    mlp_width=1536,
    vocabulary=49152,
    tied=True,
    context=SMOLLM2_CONTEXT,
    norm_sizes=(SMOLLM2_WIDTH, SMOLLM2_WIDTH),
)


def tiny_model_dims(*, width: int, layers: int, heads: int, kv_heads: int, context: int, vocabulary: int) -> ModelDims:
    """Return the dimensions of the Llama of path = "tiny": MLP four times the width, embedding tied to the head."""
    return ModelDims(
        model_type="llama",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width // heads,
        mlp_width=4 * width,
        vocabulary=vocabulary,
        tied=True,
        context=context,
        norm_sizes=(width, width),
    )


def read_model_dims(folder: Path) -> ModelDims:
    """Read the dimensions from a model folder's config.json. Raises ModelError when it is missing or incomplete."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{file} cannot be read as JSON: give a folder written by save_pretrained") from exc
    try:
        return model_dims(config)
    except KeyError as exc:
        raise ModelError(f"{file} has no {exc}, so the size of the model cannot be told") from exc


def model_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions that a parsed config.json describes. Raises KeyError with the key that is missing."""
    config = text_description(config)
    kind = config["model_type"]
    if kind == "gpt2":
        return _gpt2_dims(config)
    if kind == "gemma4_text":
        return _gemma4_dims(config)
    if kind in DELTA_NET_TYPES:
        return _delta_net_dims(config)
    if kind == "lfm2":
        return _lfm2_dims(config)
    if kind in LATENT_TYPES:
        return _latent_dims(config)
    if kind == "nemotron_h":
        return _nemotron_h_dims(config)
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or width // heads)
    query, keys = heads * head_width, kv_heads * head_width
    joined: tuple[str, ...] = {
        "phi3": ("qkv_proj", "gate_up_proj"),
        "glm": ("gate_up_proj",),
        "glm4": ("gate_up_proj",),
    }.get(kind, ())
    biased: tuple[str, ...] = ()
    if kind == "qwen2":
        biased = ("q_proj", "k_proj", "v_proj")
    elif kind == "gpt_oss" and config.get("attention_bias", True):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    elif kind in ("glm", "glm4", "seed_oss") and config.get("attention_bias", True):
        biased = ("q_proj", "k_proj", "v_proj")
        biased += ("o_proj",) if config.get("attention_out_bias") else ()
    elif config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    if config.get("use_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    norms = {
        "qwen3": (width, width, head_width, head_width),
        "exaone4": (width, width, head_width, head_width),
        "qwen3_moe": (width, width, head_width, head_width),
        "olmo2": (width, width, query, keys),
        "olmoe": (width, width, width, width // heads * kv_heads),
        "olmo3": (width, width, query, keys),
        "gemma2": (width,) * 4,
        "gemma3_text": (*(width,) * 4, head_width, head_width),
        "glm4": (width,) * 4,
        "cohere2": (width,),
        "gpt_oss": (width, width, heads),  # with the sinks of attention
    }
    if kind == "glm4_moe" and config.get("use_qk_norm"):
        norms[kind] = (width, width, head_width, head_width)
    return ModelDims(
        model_type=kind,
        width=width,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        context=described_context(config),
        biased=biased,
        norm_sizes=norms.get(kind, (width, width)),
        joined=joined,
        mixture=_mixture_dims(config),
    )


def _gpt2_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of GPT-2: learned positions, norms and layers with biases, an MLP without a gate."""
    width, heads = int(config["n_embd"]), int(config["n_head"])
    return ModelDims(
        model_type="gpt2",
        width=width,
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=int(config.get("n_inner") or 4 * width),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        context=int(config["n_positions"]),
        biased=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        norm_sizes=(width,) * 4,
        last_norm=2 * width,
        positions=int(config["n_positions"]),
        gated=False,
    )


def _gemma4_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of Gemma 4: heads of two widths, layers without keys of their own, per-layer embeddings."""
    width, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    inner, shared = int(config["intermediate_size"]), int(config.get("num_kv_shared_layers") or 0)
    pattern = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(layers)]
    kinds = [*(config.get("layer_types") or pattern)[: layers - 1], "full_attention"]
    whole = {"head_dim": config.get("global_head_dim", 512)}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        whole["num_key_value_heads"] = config["num_global_key_value_heads"]
    own = config.get("per_layer_config") or {str(i): whole for i, kind in enumerate(kinds) if kind == "full_attention"}
    beside, each = 0, int(config.get("hidden_size_per_layer_input", 256))
    varied: list[Mapping[str, tuple[int, int]]] = []
    cached = 0
    for index, kind in enumerate(kinds):
        described = {**config, **own.get(str(index), {})}
        size, keys = int(described["head_dim"]), int(described["head_dim"]) * int(described["num_key_value_heads"])
        has_keys = index < layers - shared
        mlp = inner * (2 if config.get("use_double_wide_mlp") and not has_keys else 1)
        sizes = {"q_proj": (width, heads * size)}
        if has_keys:
            sizes["k_proj"] = (width, keys)
            cached += 2 * keys
            if not (config.get("attention_k_eq_v") and kind == "full_attention"):
                sizes["v_proj"] = (width, keys)
        sizes |= {"o_proj": (heads * size, width), "gate_proj": (width, mlp), "up_proj": (width, mlp)}
        varied.append({**sizes, "down_proj": (mlp, width)})
        beside += 4 * width + size * (2 if has_keys else 1) + (2 * each * width + width if each else 0)
    if each:  # the embedding of all layers, its projection and norm
        beside += layers * each * (int(config.get("vocab_size_per_layer_input", 262_144)) + width) + each
    return ModelDims(
        model_type="gemma4_text",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_width=max(size[1] // heads for size in (layer["q_proj"] for layer in varied)),
        mlp_width=max(layer["up_proj"][1] for layer in varied),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        context=described_context(config),
        varied=tuple(varied),
        extra=beside,
        cached=cached,
    )


def _delta_net_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of Qwen3-Next and Qwen3.5: three of four layers with a gated delta net, gated attention."""
    kind = config["model_type"]
    width, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads, head_width = int(config["num_key_value_heads"]), int(config["head_dim"])
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    keys, values = key_heads * int(config["linear_key_head_dim"]), value_heads * int(config["linear_value_head_dim"])
    every = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)
    ]
    inputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads}
    if kind == "qwen3_next":
        inputs = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * value_heads}
    delta_net = {f"linear_attn.{name}": (width, outputs) for name, outputs in inputs.items()}
    delta_net["linear_attn.out_proj"] = (values, width)
    attention = {  # queries bring a gate of the result
        "q_proj": (width, 2 * heads * head_width),
        "k_proj": (width, kv_heads * head_width),
        "v_proj": (width, kv_heads * head_width),
        "o_proj": (heads * head_width, width),
    }
    in_delta_net = (2 * keys + values) * int(config["linear_conv_kernel_dim"]) + 2 * value_heads
    in_delta_net += int(config["linear_value_head_dim"])
    mixture, plain = _mixture_dims(config), _plain_layers(config)
    varied: list[Mapping[str, tuple[int, int]]] = []
    beside = 0
    for index, layer in enumerate(kinds):
        linear = layer == "linear_attention"
        mlp_width = (
            int(config.get("intermediate_size") or 0) if mixture is None or index in plain else mixture.shared_width
        )
        inner, outer = (width, mlp_width), (mlp_width, width)
        mlp = {"gate_proj": inner, "up_proj": inner, "down_proj": outer}
        varied.append({**(delta_net if linear else attention), **mlp})
        beside += 2 * width + (in_delta_net if linear else 2 * head_width)
        if not linear and config.get("attention_bias"):
            beside += sum(outputs for _, outputs in attention.values())
        if mixture is not None and index not in plain:
            beside += width  # the gate of the expert that every token meets
    full = sum(layer != "linear_attention" for layer in kinds)
    return ModelDims(
        model_type=kind,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=max(layer["up_proj"][1] for layer in varied),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=described_context(config),
        varied=tuple(varied),
        extra=beside,
        cached=2 * full * kv_heads * head_width,
        mixture=mixture,
        state=(layers - full)
        * ((2 * keys + values) * (int(config["linear_conv_kernel_dim"]) - 1) + keys // key_heads * values),
    )


def _latent_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of DeepSeek V3's kind: queries, keys and values by way of latent states, and experts."""
    width, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    rotated, value = int(config["qk_rope_head_dim"]), int(config["v_head_dim"])
    key, latent = int(config["qk_nope_head_dim"]) + rotated, int(config["kv_lora_rank"])
    inner, mixture = int(config["intermediate_size"]), _mixture_dims(config)
    assert mixture is not None
    attention = {"q_proj": (width, heads * key)}
    norms = [width, width, latent]
    if narrow := int(config.get("q_lora_rank") or 0):
        attention = {"q_a_proj": (width, narrow), "q_b_proj": (narrow, heads * key)}
        norms.append(narrow)
    attention |= {
        "kv_a_proj_with_mqa": (width, latent + rotated),
        "kv_b_proj": (latent, heads * (key - rotated + value)),
        "o_proj": (heads * value, width),
    }
    biases = 0
    if config.get("attention_bias"):
        biases = layers * (narrow + latent + rotated + width)

    def with_mlp(size: int) -> dict[str, tuple[int, int]]:
        return {**attention, "gate_proj": (width, size), "up_proj": (width, size), "down_proj": (size, width)}

    mixed = layers - mixture.plain_layers
    return ModelDims(
        model_type=config["model_type"],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=max(key, value),
        mlp_width=inner,
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=described_context(config),
        norm_sizes=tuple(norms),
        varied=(with_mlp(inner),) * mixture.plain_layers + (with_mlp(mixture.shared_width),) * mixed,
        extra=biases,
        cached=layers * heads * (key + value),
        mixture=mixture,
    )


def _lfm2_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of LFM2: short convolutions in most layers, norms of queries and keys in the others."""
    width, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads, head_width = int(config["num_key_value_heads"]), int(config.get("head_dim") or width // heads)
    inner = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim", True):
        multiple = int(config.get("block_multiple_of", 256))
        inner = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    full = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [
        "full_attention" if full is None or index in full else "conv" for index in range(layers)
    ]
    mlp = {"feed_forward.w1": (width, inner), "feed_forward.w3": (width, inner), "feed_forward.w2": (inner, width)}
    attention = {
        "q_proj": (width, heads * head_width),
        "k_proj": (width, kv_heads * head_width),
        "v_proj": (width, kv_heads * head_width),
        "self_attn.out_proj": (heads * head_width, width),
    }
    convolution = {"conv.in_proj": (width, 3 * width), "conv.out_proj": (width, width)}
    in_convolution = width * int(config.get("conv_L_cache", 3)) + (5 * width if config.get("conv_bias") else 0)
    attending = sum(kind == "full_attention" for kind in kinds)
    return ModelDims(
        model_type="lfm2",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=inner,
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        context=described_context(config),
        varied=tuple({**(attention if kind == "full_attention" else convolution), **mlp} for kind in kinds),
        extra=layers * 2 * width + attending * 2 * head_width + (layers - attending) * in_convolution,
        cached=2 * attending * kv_heads * head_width,
        state=(layers - attending) * width * (int(config.get("conv_L_cache", 3)) - 1),
    )


def _nemotron_h_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of Nemotron-H: a layer is a Mamba-2 mixer, attention, an MLP, or experts, each alone."""
    width, heads, inner = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    kv_heads, head_width = int(config.get("num_key_value_heads") or heads), int(config["head_dim"])
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    older = {"mamba": "linear_attention", "attention": "full_attention"}
    listed = config.get("layers_block_type") or [letters[letter] for letter in config["hybrid_override_pattern"]]
    kinds = [older.get(kind, kind) for kind in listed]
    mixers, taps = int(config["mamba_num_heads"]), int(config.get("conv_kernel", 4))
    values = mixers * int(config["mamba_head_dim"])
    convolved = values + 2 * int(config["n_groups"]) * int(config["ssm_state_size"])
    experts, latent = kinds.count("moe"), int(config.get("moe_latent_size") or 0)
    shared = int(config.get("moe_shared_expert_intermediate_size") or 0)
    projected = values + convolved + mixers
    beside_experts = {"up_proj": (width, shared), "down_proj": (shared, width)}
    if latent:
        beside_experts |= {"fc1_latent_proj": (width, latent), "fc2_latent_proj": (latent, width)}
    layers: dict[str, Mapping[str, tuple[int, int]]] = {
        "linear_attention": {"mixer.in_proj": (width, projected)},
        "full_attention": {
            "q_proj": (width, heads * head_width),
            "k_proj": (width, kv_heads * head_width),
            "v_proj": (width, kv_heads * head_width),
            "o_proj": (heads * head_width, width),
        },
        "mlp": {"up_proj": (width, inner), "down_proj": (inner, width)},
        "moe": beside_experts,
    }
    # the output layer of a mixer has no adapters; then its convolution, norm, and three numbers for each head
    in_mixer = values * width + convolved * (taps + bool(config.get("use_conv_bias", True))) + values + 3 * mixers
    if config.get("use_bias"):
        in_mixer += projected + width
    biases = {kind: sum(outputs for _, outputs in layers[kind].values()) for kind in ("mlp", "moe")}
    extra = kinds.count("linear_attention") * in_mixer
    if config.get("mlp_bias"):
        extra += sum(biases[kind] for kind in kinds if kind in biases)
    mixture = None
    if experts:
        mixture = MixtureDims(
            experts=int(config["n_routed_experts"]),
            per_token=int(config["num_experts_per_tok"]),
            width=int(config["moe_intermediate_size"]),
            shared_width=shared,
            plain_layers=len(kinds) - experts,
            matrices=2,
            latent=latent,
        )
    attending = kinds.count("full_attention")
    return ModelDims(
        model_type="nemotron_h",
        width=width,
        layers=len(kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=max(inner if "mlp" in kinds else 0, shared if experts else 0, projected),
        vocabulary=int(config["vocab_size"]),
        tied=False,  # whatever the configuration says
        context=described_context(config),
        norm_sizes=(width,),
        varied=tuple(layers[kind] for kind in kinds),
        extra=extra,
        cached=2 * attending * kv_heads * head_width,
        mixture=mixture,
        state=kinds.count("linear_attention") * (convolved * (taps - 1) + values * int(config["ssm_state_size"])),
    )


def _plain_layers(config: Mapping[str, Any]) -> set[int]:
    """Return the layers of a Qwen mixture that have an ordinary MLP."""
    step, plain = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    return {layer for layer in range(int(config["num_hidden_layers"])) if layer in plain or (layer + 1) % step != 0}


def _mixture_dims(config: Mapping[str, Any]) -> MixtureDims | None:
    kind, layers = config["model_type"], int(config["num_hidden_layers"])
    if kind not in (
        "qwen3_moe",
        "mixtral",
        "olmoe",
        "glm4_moe",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe_text",
        *LATENT_TYPES,
    ):
        return None
    names = ("num_local_experts", "num_experts", "n_routed_experts")  # transformers writes the first for all of them
    experts = int(next((config[name] for name in names if name in config), None) or config[names[0]])
    plain_width = kind in ("mixtral", "olmoe", "gpt_oss")
    width = int(config["intermediate_size" if plain_width else "moe_intermediate_size"])
    plain_layers, shared_width = 0, 0
    if kind in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        plain_layers = len(_plain_layers(config))
        shared_width = int(config.get("shared_expert_intermediate_size") or 0)
    elif kind in ("glm4_moe", *LATENT_TYPES):
        plain_layers = min(layers, int(config.get("first_k_dense_replace", 0)))
        if kind == "glm4_moe_lite":
            kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
            plain_layers = kinds.count("dense")
        shared_width = int(config.get("n_shared_experts", 1)) * width
    return MixtureDims(
        experts=experts,
        per_token=int(config["num_experts_per_tok"]),
        width=width,
        shared_width=shared_width,
        plain_layers=plain_layers,
        biases=kind == "gpt_oss",
    )


def num_parameters(shape: ModelDims, *, active: bool = False) -> int:
    """Count the parameters: embedding, decoder layers, last norm, and the head unless it is tied.

    `active`: only those that one token meets, which of a mixture are the experts that it chooses.
    """
    projections = shape.projections
    layers = sum(inputs * outputs for layer in shape.layer_projections for inputs, outputs in layer.values())
    beside = sum(projections[name][1] for name in shape.biased) + sum(shape.norm_sizes)
    embedding = shape.vocabulary * shape.width
    last = shape.width if shape.last_norm is None else shape.last_norm
    embedding = embedding * (1 if shape.tied else 2) + shape.positions * shape.width
    if (mixture := shape.mixture) is not None:
        chosen = mixture.per_token if active else mixture.experts
        experts_and_router = chosen * mixture.matrices * mixture.width * (mixture.latent or shape.width)
        experts_and_router += mixture.experts * shape.width
        if mixture.biases:
            experts_and_router += chosen * (2 * mixture.width + shape.width) + mixture.experts
        layers += (shape.layers - mixture.plain_layers) * experts_and_router
    return embedding + layers + shape.layers * beside + last + shape.extra


def num_lora_parameters(shape: ModelDims, *, rank: int, targets: Sequence[str]) -> int:
    """Count adapter parameters: rank x (inputs + outputs) for every targeted layer; the head counts once."""
    root = {"lm_head": (shape.width, shape.vocabulary)} if "lm_head" in targets else {}
    if shape.mixture is not None:  # the MLPs of mixtures have none (`model/lora.py`)
        targets = [name for name in targets if name not in MLP]
    places = (*shape.layer_projections, root)
    beside = 0
    if (mixture := shape.mixture) is not None:
        if "experts" in targets:
            beside += mixture.experts * (2 * (mixture.latent or shape.width) + mixture.matrices * mixture.width)
        if "router" in targets:
            beside += shape.width + mixture.experts
        beside *= rank * (shape.layers - mixture.plain_layers)
    return beside + sum(
        rank * sum(sizes[name]) for sizes in places for name in adapted_layers(list(sizes), _there(sizes, targets))
    )


def _there(sizes: Mapping[str, tuple[int, int]], targets: Sequence[str]) -> tuple[str, ...]:
    """Leave out the targets that single layers of a model lack, unless they are parts of a joined one."""
    joined = {part for end in sizes for part in (*JOINED_LAYERS.get(end, ()), *STATE_PROJECTIONS.get(end, ()))}
    return tuple(target for target in targets if target in sizes or target in joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the training device."""

    weights: int
    gradients: int
    masters: int  # float32 copies of half-precision weights
    moments: int
    activations: int
    head: int
    kv: int
    beside: int = 0  # other models: a copy for sampling, a frozen reference, a critic
    packed: int = 0  # the trainer's and the engine's packed weights on a CPU (`model/cpu/packed_linear.py`)
    gathered: int = 0  # of several cards: weights that are whole while they are computed, and their gradients
    copy: int = 0  # of several cards: the whole weights on the first, which are sampled from

    @property
    def state(self) -> int:
        """The bytes of weights, gradients, masters and moments; of several cards, this one's share."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def training(self) -> int:
        """The bytes of training, without keys and values."""
        computed = self.activations + self.head + self.gathered
        return self.state + computed + self.beside + self.packed + self.copy

    @property
    def unsharded(self) -> int:
        """The bytes that stay on every card, however many there are."""
        return self.activations + self.head + self.gathered

    @property
    def total(self) -> int:
        return self.training + self.kv


def training_memory(
    shape: ModelDims,
    *,
    dtype: str,
    trainable: int,
    frozen: int,
    micro_batch_tokens: int,
    kv_tokens: int,
    device: str = "cpu",
    recompute: bool = False,
    beside: int = 0,
    ranks: int = 1,
) -> Memory:
    """Estimate training of `trainable` parameters beside `frozen` ones while an engine holds `kv_tokens`.

    Gradients and AdamW's two moments are float32 (float64 if the model is); so are masters of bfloat16 weights. With
    several ranks these are the bytes of the first one, which samples from a copy. A rank's share of the masters is its
    share of the trained weights: they become bfloat16 when they are gathered.
    """
    size = DTYPE_BYTES[dtype]
    state = max(size, FP32)
    fused = device == "cuda" and size < FP32
    layers_kept = activation_bytes_per_token(
        shape, size, fused=fused and shape.model_type in FUSED_TYPES, adapters=frozen > trainable
    )
    if recompute:  # every layer's input, and one layer in full; on CUDA also the output of attention, and its sums
        stream = FP32 if fused and shape.model_type in FUSED_TYPES else size
        mixed = shape.heads * (shape.head_width * size + FP32) if device == "cuda" else 0
        layers_kept = layers_kept // shape.layers + shape.layers * (shape.width * stream + mixed)
    chunk = min(CUDA_HEAD_CHUNK_TOKENS if device == "cuda" else HEAD_CHUNK_TOKENS, micro_batch_tokens)
    stored = frozen if ranks > 1 and size < FP32 else trainable + frozen
    return Memory(
        weights=_share(stored * size, ranks),
        gradients=_share(trainable * state, ranks),
        masters=_share(trainable * FP32, ranks) if size < FP32 else 0,
        moments=_share(2 * trainable * state, ranks),
        gathered=gathered_bytes(shape, size, trainable=trainable, frozen=frozen) if ranks > 1 else 0,
        copy=(trainable + frozen) * size if ranks > 1 else 0,
        activations=micro_batch_tokens * layers_kept,
        head=chunk * shape.vocabulary * (FP32 if fused else state * HEAD_COPIES),
        kv=kv_tokens * kv_bytes_per_token(shape, size),
        beside=beside,
        packed=packed_numbers(shape) * FP32 if device == "cpu" and dtype == "float32" else 0,
    )


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def gathered_bytes(shape: ModelDims, size: int, *, trainable: int, frozen: int) -> int:
    """Count the bytes of weights that FSDP2 holds whole on every card, and of their gradients.

    Embedding, last norm and head are whole throughout a pass, and so are the layer that is computed and the next. The
    gradients of a layer and of the embedding and head exist in the type of the computation, and once more in float32,
    in which they are added up over the cards. With adapters (`frozen` is not 0) only theirs do.
    """
    state = max(size, FP32)
    root = (shape.vocabulary * (1 if shape.tied else 2) + shape.positions + 1) * shape.width
    layer = (num_parameters(shape) - root) // shape.layers
    trained = -(-trainable // shape.layers) if frozen else layer + root
    return (root + 2 * layer) * size + trained * (size + state)


def packed_numbers(shape: ModelDims) -> int:
    """Count the packed numbers: each linear layer, again those that the engine joins (q, k, v; gate, up), the head."""
    every = sum(inputs * outputs for layer in shape.layer_projections for inputs, outputs in layer.values())
    sizes = {name: inputs * outputs for name, (inputs, outputs) in shape.projections.items()}
    together = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if shape.model_type in FUSED_TYPES else ()
    joined = sum(sizes[name] for name in together)
    if not shape.gated:  # GPT-2's layers are not packed
        return shape.vocabulary * shape.width
    return every + shape.layers * joined + shape.vocabulary * shape.width


def activation_bytes_per_token(shape: ModelDims, size: int, *, fused: bool = False, adapters: bool = False) -> int:
    """Count the bytes that the backward pass keeps per token: L (8 D + 2 (Q + K + V) + 4 M) numbers.

    They are residuals and norms, projections before and after rotation, and the MLP. With fused kernels
    L (4 D + 2 (Q + K) + 3 M), and half of the 4 D in float32: norms keep their input, which is the residual stream, and
    their output; attention its rotated inputs and its output, the MLP gate, up and product. With adapters over frozen
    weights the output of norms and the product are computed again, and attention's inputs are kept before rotation too,
    for the norms of heads.
    """
    query, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    mlp_width = shape.mlp_width
    if (mixture := shape.mixture) is not None:  # rows of experts also keep their input and output
        mlp_width = max(mlp_width, mixture.per_token * (mixture.width + shape.width // 2) + mixture.shared_width)
    if fused:
        stream = 2 * shape.width * FP32
        if adapters:
            return shape.layers * (stream + (3 * (query + keys) + 2 * mlp_width) * size)
        return shape.layers * (stream + (2 * shape.width + 2 * (query + keys) + 3 * mlp_width) * size)
    return shape.layers * (8 * shape.width + 2 * (query + 2 * keys) + 4 * mlp_width) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device and type of a model, and how its attention is computed, with reasons in plain words."""

    device: str
    dtype: str
    device_reason: str
    attention: str


def choose_placement(*, device: str, dtype: str, gpus: Sequence[str], mps: bool) -> Placement:
    """Resolve `device` and `dtype` ("auto" or a name) with these GPUs. Raises ConfigError if the device is absent."""
    if device == "cuda" and not gpus:
        raise ConfigError("model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or 'cpu'")
    if device == "mps" and not mps:
        raise ConfigError("model.device is 'mps' but torch sees none; set it to 'auto' or 'cpu'")
    if dtype == "float64" and (device == "mps" or (device == "auto" and mps and not gpus)):
        raise ConfigError("model.dtype is 'float64', which Apple's GPU (mps) does not have: set it to 'float32'")
    if device == "auto":
        chosen = "cuda" if gpus else "mps" if mps else "cpu"
        reason = f"torch sees {gpus[0]}" if gpus else "torch sees no GPU that it can use"
        if mps and not gpus:
            reason = "torch sees Apple's GPU; sums that are float64 elsewhere are float32 there"
    else:
        chosen, reason = device, f"model.device is '{device}'"
    precision = ("bfloat16" if chosen == "cuda" else "float32") if dtype == "auto" else dtype
    if chosen == "cuda" and precision == "bfloat16":
        attention = "one variable-length kernel call for all packed sequences, which CUDA has in half precision"
    elif chosen == "cuda":
        attention = f"scaled_dot_product_attention for each sequence; the variable-length kernel cannot do {precision}"
    else:
        attention = "scaled_dot_product_attention for each sequence; the variable-length kernel needs CUDA"
    return Placement(device=chosen, dtype=precision, device_reason=reason, attention=attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The number of tokens whose keys and values the engine is to hold."""

    wanted: int  # if there is memory
    least: int  # in any case


def default_kv_room(max_num_seqs: int, longest: int) -> KvBudget:
    """Budget twice `max_num_seqs` sequences of the longest length, because slots double; at least eight slots."""
    tokens = 2 * max_num_seqs * longest
    if not tokens:
        return KvBudget(wanted=0, least=0)
    least = min_kv_tokens(longest)
    return KvBudget(wanted=max(tokens, least), least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The choices that depend on the size of the device."""

    recompute: bool
    kv_tokens: int
    memory: Memory
    without_recompute: int  # bytes in all, had nothing been recomputed


def fit_memory(
    memory_of: Callable[[bool, int], Memory], kv: KvBudget, *, recompute: bool | Literal["auto"], kv_bytes: int,
    gpu_bytes: int | None,
) -> MemoryFit:  # fmt: skip
    """Decide whether layers are recomputed and how many tokens are cached; without a GPU, as the settings say.

    `memory_of(recompute, kv_tokens)` sizes a choice; `kv_bytes` is the size of one cached token.

    Layers are recomputed if they would otherwise leave the cache less than it wants, or than a quarter of the GPU if
    that is less. Then the cache gets the remaining memory.
    """
    usable = None if gpu_bytes is None else int(USABLE * gpu_bytes)
    enough = kv.wanted if usable is None else min(kv.wanted, max(kv.least, usable // CACHE_PART // kv_bytes))
    plain = memory_of(False, enough).total
    recomputes = recompute is True or (recompute == "auto" and usable is not None and plain > usable)
    tokens = kv.wanted
    if usable is not None:
        left = (usable - memory_of(recomputes, 0).training) // kv_bytes
        tokens = min(kv.wanted, max(kv.least, left))
    memory = memory_of(recomputes, tokens)
    return MemoryFit(recompute=recomputes, kv_tokens=tokens, memory=memory, without_recompute=plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The needs of a run on the device it trains on; where stages differ, the larger counts."""

    micro_batch_tokens: int  # computed at once
    kv: KvBudget  # of the engine
    recompute: bool | Literal["auto"]  # whether layers are computed again in the backward pass
    lora_rank: int = 0  # 0: every parameter is trained
    lora_targets: tuple[str, ...] = ()
    frozen_copies: int = 0  # other models of the same size that are not trained, such as a reference
    critic: bool = False  # a value model with a trunk of its own
    graphs: bool = False  # the engine decodes in CUDA graphs, which hold copies of weights
    slots: int = 0  # of the engine, each with the state of a sequence and one that it keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sizes of a run, and the choices that depend on the memory of its GPU."""

    parameters: int
    trainable: int  # the parameters themselves, or those of the adapters beside them
    memory: Memory
    kv_tokens: int
    recompute: bool
    without_recompute: int  # bytes in all, had nothing been recomputed
    checkpoint_bytes: int
    ranks: int = 1  # over which training is sharded; `memory` is that of the first
    other_rank: int = 0  # bytes of each other rank


def plan_memory(
    request: MemoryRequest, shape: ModelDims, placement: Placement, *, gpu_bytes: int | None = None, ranks: int = 1
) -> MemoryPlan:
    """Size a run, and choose recomputation and the cache size by the memory of a GPU (`gpu_bytes`).

    With several ranks, the sizes and the choices are those of the first one's GPU, which needs the most.
    """
    parameters = num_parameters(shape)
    adapters = num_lora_parameters(shape, rank=request.lora_rank, targets=request.lora_targets)
    trainable, frozen = (adapters, parameters) if request.lora_rank else (parameters, 0)

    def memory_of(recompute: bool, kv_tokens: int) -> Memory:
        return training_memory(
            shape,
            dtype=placement.dtype,
            trainable=trainable,
            frozen=frozen,
            micro_batch_tokens=request.micro_batch_tokens,
            kv_tokens=kv_tokens,
            device=placement.device,
            recompute=recompute,
            beside=_other_models(request, parameters, placement.dtype, ranks)
            + _graph_copies(request, shape, placement)
            + 2 * request.slots * shape.state * max(DTYPE_BYTES[placement.dtype], FP32),
            ranks=ranks,
        )

    fitted = fit_memory(
        memory_of,
        request.kv,
        recompute=request.recompute,
        kv_bytes=kv_bytes_per_token(shape, DTYPE_BYTES[placement.dtype]),
        gpu_bytes=gpu_bytes if placement.device == "cuda" else None,
    )
    return MemoryPlan(
        parameters=parameters,
        trainable=trainable,
        memory=fitted.memory,
        kv_tokens=fitted.kv_tokens,
        recompute=fitted.recompute,
        without_recompute=fitted.without_recompute,
        checkpoint_bytes=checkpoint_bytes(dtype=placement.dtype, trainable=trainable, frozen=frozen),
        ranks=ranks,
        other_rank=fitted.memory.state + fitted.memory.unsharded + _critic(request, parameters, placement.dtype, ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedMemory:
    """Bytes of a trainer and an inference server that use a GPU in turns (`cluster.colocate`)."""

    trainer_stays: int  # on the GPU in both turns: the trainer's weights, and models beside it
    moved: int  # masters and moments: on the GPU while it trains, in host memory while the server samples
    training: int  # the most that training takes, with what stays
    engine_weights: int  # of the server: on the GPU while it samples
    engine_room: int  # for the server in all, while it samples
    host: int  # in host memory at most

    @property
    def kv_room(self) -> int:
        """The bytes of keys and values that fit; below 0 if not even the server's weights do."""
        return self.engine_room - self.engine_weights


def colocated_memory(planned: MemoryPlan, *, keep_weights: bool, gpu_bytes: int) -> ColocatedMemory:
    """Divide a plan into turns. `keep_weights`: those of a server that sleeps are kept, in host memory.

    With several ranks this is the first one's GPU, with a server of its own: a rank's masters are its weights, which
    stay, and so does the whole copy that servers are given.
    """
    memory = planned.memory
    stays, moved = memory.weights + memory.beside, memory.masters + memory.moments
    whole = memory.weights
    if planned.ranks > 1:
        stays, moved, whole = stays + memory.masters + memory.copy, memory.moments, memory.copy
    return ColocatedMemory(
        trainer_stays=stays,
        moved=moved,
        training=memory.training,
        engine_weights=whole,
        engine_room=max(0, int(USABLE * gpu_bytes) - stays - CUDA_CONTEXT),
        host=moved + (whole if keep_weights else 0),
    )


def _other_models(request: MemoryRequest, parameters: int, dtype: str, ranks: int) -> int:
    """Count the bytes of frozen models, which are whole on the first card, and of a critic."""
    frozen = request.frozen_copies * parameters * DTYPE_BYTES[dtype]
    return frozen + _critic(request, parameters, dtype, ranks)


def _critic(request: MemoryRequest, parameters: int, dtype: str, ranks: int) -> int:
    """Count the bytes of a critic with its gradients, masters and moments, or of a card's share of them."""
    size = DTYPE_BYTES[dtype]
    stored = size if ranks == 1 or size >= FP32 else 0
    each = stored + 3 * FP32 + (FP32 if size < FP32 else 0)
    return _share(parameters * each, ranks) if request.critic else 0


def _graph_copies(request: MemoryRequest, shape: ModelDims, placement: Placement) -> int:
    """Count the bytes of the weights that decoding in graphs copies.

    In bfloat16 these are all weights of the layers, as float16; else the joined ones: q, k and v, and gate and up.
    """
    if placement.device != "cuda" or not request.graphs or shape.model_type not in FUSED_TYPES:
        return 0
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    every = placement.dtype == "bfloat16"
    sizes = [inputs * outputs for name, (inputs, outputs) in shape.projections.items() if every or name in joined]
    return shape.layers * sum(sizes) * DTYPE_BYTES[placement.dtype]


def kv_bytes_per_token(shape: ModelDims, size: int) -> int:
    """Count the bytes of a token's keys and values in every layer and key-value head."""
    if shape.cached is not None:
        return shape.cached * size
    return 2 * shape.layers * shape.kv_heads * shape.head_width * size


def checkpoint_bytes(*, dtype: str, trainable: int, frozen: int) -> int:
    """Count the bytes of a checkpoint: weights in Hugging Face layout, masters and moments of trained parameters."""
    size = DTYPE_BYTES[dtype]
    state = max(size, FP32)
    return (trainable + frozen) * size + trainable * ((FP32 if size < FP32 else 0) + 2 * state)
