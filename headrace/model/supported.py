"""Lists of the model types that run on the shared attention function, by `model_type`, and of those that do not.

A type is listed as supported when `tests/model/test_supported.py` has compared it with transformers' own forward pass
(packed training, prefill in chunks, decode). A type that is not listed is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError
from headrace.model.vision.kinds import is_vision, text_config, text_model

SUPPORTED: Mapping[str, str] = {
    "llama": "Llama 2 and 3, SmolLM and SmolLM2, TinyLlama, Yi",
    "mistral": "Mistral 7B, with or without sliding window",
    "qwen2": "Qwen2 and Qwen2.5, with or without sliding window",
    "qwen3": "Qwen3 dense models",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text",
    "gemma4_text": "Gemma 4 dense models, text",
    "phi3": "Phi-3, Phi-3.5 mini, Phi-4 and Phi-4 mini",
    "granite": "Granite 3 dense models",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4 0414, GLM-Z1",
    "ministral3": "Ministral 3, text",
    "cohere2": "Command R7B, Command A",
    "ernie4_5": "ERNIE 4.5 dense models",
    "seed_oss": "Seed-OSS",
    "exaone4": "EXAONE 4",
    "gpt2": "GPT-2",
    "qwen3_moe": "Qwen3 mixtures of experts (30B-A3B, 235B-A22B)",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "glm4_moe": "GLM-4.5, 4.6 and 4.7",
    "gpt_oss": "gpt-oss 20b and 120b",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5 dense models, text",
    "qwen3_5_moe_text": "Qwen3.5 mixtures of experts, text",
    "lfm2": "LFM2 dense models",
    "nemotron_h": "Nemotron 3, Nemotron Nano 2 and Nemotron-H, text",
    "deepseek_v3": "DeepSeek V3 and R1, Kimi K2, Moonlight",
    "glm4_moe_lite": "GLM-4.7-Flash",
}

# compared with transformers in half precision on CUDA too, by `tests/gpu/test_families.py` and `test_vision.py`
ON_CUDA = (*SUPPORTED, "qwen3_vl", "qwen2_5_vl", "smolvlm", "idefics3")

REFUSED: Mapping[str, str] = {
    "gemma3n_text": "has per-layer embeddings and keys shared between layers; not tested yet",
    "deepseek_v2": "has latent (MLA) key-value caches",
    "mamba": "is recurrent",
    "mamba2": "is recurrent",
    "jamba": "mixes recurrent and attention layers",
    "falcon_mamba": "is recurrent",
    "cohere": "has not been compared; cohere2 has",
    "phi": "has a bias on its output head",
}

DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_dropout",
    "residual_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
)
SWITCHES = {
    "use_bidirectional_attention": "lets a token see later ones",
    "scale_attn_by_inverse_layer_idx": "is a variant of GPT-2's attention that has not been compared",
    "reorder_and_upcast_attn": "is a variant of GPT-2's attention that has not been compared",
    "add_cross_attention": "attends to another model",
    "enable_moe_block": "is a mixture of experts",
}
# of each type: the settings that change its logits, and those that this package applies
LOGIT_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "gemma2": ("final_logit_softcapping",),
    "gemma3_text": ("final_logit_softcapping",),
    "gemma4_text": ("final_logit_softcapping",),
    "granite": ("logits_scaling",),
    "cohere2": ("logit_scale",),
}
# names of layers in `layer_types` that have no keys and values: a state in their place, or experts or an MLP alone
KEYLESS_LAYERS = ("linear_attention", "conv", "moe", "mlp")
CAPPED_ATTENTION = ("gemma2",)  # types whose layers pass attn_logit_softcapping to the attention function


def check_supported(config: Any) -> None:
    """Raise ModelError unless a Hugging Face config describes a model that the shared attention function can run."""
    kind = getattr(config, "model_type", "unknown")
    if is_vision(config):
        config = text_config(config)
    elif kind not in SUPPORTED:
        reason = REFUSED.get(kind, "has not been tested")
        raise ModelError(
            f"models of type '{kind}' are not supported: it {reason}. Supported types: {', '.join(sorted(SUPPORTED))}"
        )
    applied = LOGIT_SETTINGS.get(getattr(config, "model_type", kind), ())
    if kind in CAPPED_ATTENTION:
        applied += ("attn_logit_softcapping",)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0) and name not in applied:
            raise ModelError(f"this '{kind}' model sets {name}, which is not supported")
    for name, reason in SWITCHES.items():
        if getattr(config, name, False) not in (None, False, "vision"):  # of pictures, which text does not have
            raise ModelError(f"this '{kind}' model sets {name}, which {reason}; that is not supported")
    for rope in _rotary_settings(config):
        kept = rope.get("rope_type", "default")
        if kept == "longrope" and not rope.get("original_max_position_embeddings"):
            raise ModelError(
                f"this '{kind}' model has 'longrope' rotary positions without original_max_position_embeddings, so "
                "the length up to which they stay the same is not known"
            )
    if getattr(config, "kv_lora_rank", None) is not None and config.num_key_value_heads != config.num_attention_heads:
        raise ModelError(
            f"this '{kind}' model has {config.num_key_value_heads} key heads of {config.num_attention_heads}; its keys "
            "are expanded for every head, so both must be alike"
        )
    for name in DROPOUTS:
        if getattr(config, name, 0.0):
            raise ModelError(f"this '{kind}' model sets {name}; set it to 0 in its config.json")


def check_device(config: Any, device: str) -> None:
    """Raise ModelError on a device on which models of this type have not been compared with transformers' own."""
    kind = getattr(config, "model_type", "unknown")
    if device.startswith("cuda") and kind not in ON_CUDA:
        raise ModelError(
            f"models of type '{kind}' have been compared with transformers on a CPU only, so they do not run on CUDA: "
            f"set model.device = 'cpu'. Types that run on CUDA: {', '.join(ON_CUDA)}"
        )


def logit_settings(config: Any) -> dict[str, float]:
    """Return the scale and the soft cap of a model's logits, where it has them, by the names of `head.LogitRule`."""
    config = text_config(config)
    names = LOGIT_SETTINGS.get(getattr(config, "model_type", ""), ())
    settings = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    rule: dict[str, float] = {}
    if "final_logit_softcapping" in settings:
        rule["softcap"] = float(settings["final_logit_softcapping"])
    if "logits_scaling" in settings:
        rule["scale"] = 1.0 / float(settings["logits_scaling"])
    if "logit_scale" in settings:
        rule["scale"] = float(settings["logit_scale"])
    return rule


def context_of(config: Any) -> int:
    """Return the positions that a sequence may have.

    transformers chooses the frequencies of "longrope" by the longest sequence of a batch: one set up to
    `original_max_position_embeddings`, another beyond. A sequence that crossed it would have other keys than the ones
    it was sampled with, so it ends there. "dynamic" frequencies change beyond `max_position_embeddings` only.
    """
    config = text_config(config)
    limits = [int(config.max_position_embeddings)]
    for rope in _rotary_settings(config):
        if rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
    return min(limits)


def cached_shapes(config: Any) -> list[tuple[int, int, int]]:
    """Return the number of the key-value heads of each layer, the width of a key and that of a value.

    Layers without attention have no heads. Keys and values that a layer expands from a latent one (DeepSeek) are cached
    as they are expanded.
    """
    config = text_config(config)
    if getattr(config, "kv_lora_rank", None) is not None:
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        return [(config.num_attention_heads, keys, config.v_head_dim)] * int(config.num_hidden_layers)
    described = getattr(config, "per_layer_config", None)
    layers = [config if described is None else described[index] for index in range(config.num_hidden_layers)]
    widths = [getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers]
    kinds = getattr(config, "layer_types", None) or ("",) * len(layers)
    return [
        (
            0 if kind in KEYLESS_LAYERS else getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            width,
            width,
        )
        for layer, kind, width in zip(layers, kinds, widths, strict=True)
    ]


def shared_layers(config: Any) -> dict[int, int]:
    """Return the layers that have no keys and values of their own, each with the layer that it takes them from.

    Of Gemma 4 that is the last layer of the same kind that has some.
    """
    config = text_config(config)
    count = int(getattr(config, "num_kv_shared_layers", 0) or 0)
    first, kinds = config.num_hidden_layers - count, getattr(config, "layer_types", None) or ()
    return {
        layer: max(index for index in range(first) if kinds[index] == kinds[layer])
        for layer in range(first, config.num_hidden_layers if count else first)
    }


def decoder_layers(model: Any) -> Any:
    """Return a model's list of decoder layers, by whatever name it has them ("layers", GPT-2's "h")."""
    count = int(text_config(model.config).num_hidden_layers)
    lists = (child for child in text_model(model).children() if type(child).__name__ == "ModuleList")
    found = next((child for child in lists if len(child) == count), None)
    if found is None:
        raise ModelError(f"models of type '{model.config.model_type}' have no list of their {count} decoder layers")
    return found


def _rotary_settings(config: Any) -> list[Mapping[str, Any]]:
    """List the rotary settings of a config: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]
