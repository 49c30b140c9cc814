"""Lists of the model types that run on the shared attention function, by `model_type`, and of those that do not.

A type is listed as supported when `tests/model/test_supported.py` has compared it with transformers' own forward pass
(packed training, prefill in chunks, decode). A type that is not listed is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError

SUPPORTED: Mapping[str, str] = {
    "llama": "Llama 2 and 3, SmolLM and SmolLM2, TinyLlama, Yi",
    "mistral": "Mistral 7B, with or without sliding window",
    "qwen2": "Qwen2 and Qwen2.5, with or without sliding window",
    "qwen3": "Qwen3 dense models",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "gemma": "Gemma 1",
}

REFUSED: Mapping[str, str] = {
    "gemma2": "caps its logits",
    "gemma3_text": "mixes window sizes and caps; not tested yet",
    "gemma3": "is multimodal; not tested yet",
    "gpt_oss": "has attention sinks",
    "deepseek_v2": "has latent (MLA) key-value caches",
    "deepseek_v3": "has latent (MLA) key-value caches",
    "mamba": "is recurrent",
    "mamba2": "is recurrent",
    "jamba": "mixes recurrent and attention layers",
    "falcon_mamba": "is recurrent",
    "qwen3_next": "mixes linear and full attention layers",
    "granite": "scales its logits",
    "cohere": "scales its logits",
    "mixtral": "is a mixture of experts; not tested yet",
    "qwen3_moe": "is a mixture of experts; not tested yet",
    "gpt2": "has learned positions and its own attention; not tested yet",
}

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """Raise ModelError unless a Hugging Face config describes a model that the shared attention function can run."""
    kind = getattr(config, "model_type", "unknown")
    if kind not in SUPPORTED:
        reason = REFUSED.get(kind, "has not been tested")
        raise ModelError(
            f"models of type '{kind}' are not supported: it {reason}. Supported types: {', '.join(sorted(SUPPORTED))}"
        )
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ModelError(f"this '{kind}' model sets {name}, which is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"this '{kind}' model has '{rope['rope_type']}' rotary positions, which depend on the longest sequence of "
            "a batch; that is not supported"
        )
    for name in ("attention_dropout", "hidden_dropout", "resid_dropout"):
        if getattr(config, name, 0.0):
            raise ModelError(f"this '{kind}' model sets {name}; set it to 0 in its config.json")
