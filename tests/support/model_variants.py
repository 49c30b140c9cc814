"""One small model of every supported kind."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 40


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # sharp attention: a wrong mask changes the logits by far more than rounding
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


WINDOW = {"sliding_window": 6}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased, scaled positions": (
        "llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", WINDOW),
    "qwen2": ("qwen2", {}),
    "qwen2, window on the second layer": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, window": ("qwen3", {**WINDOW, "head_dim": 16, "use_sliding_window": True, "max_window_layers": 0}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, window": ("smollm3", {**WINDOW, "no_rope_layer_interval": 2, "use_sliding_window": True}),
    "olmo2": ("olmo2", {}),
    "gemma": ("gemma", {"head_dim": 16}),
}


def config_of(kind: str, **more: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SMALL, **more})


def make(variant: str, **more: Any) -> Any:
    """The same random weights at every call, biases and norms included."""
    kind, own = VARIANTS[variant]
    generator = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind, **{**own, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.25 if parameter.ndim == 2 else 0.1
            shift = 0.0 if parameter.ndim == 2 else 0.5
            parameter.copy_(shift + spread * torch.randn(parameter.shape, generator=generator))
    return model
