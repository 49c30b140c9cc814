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
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.3,  # some step sizes are below it
}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
LOCAL = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    }
}


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
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, one plain layer, weights as they are": (
        "qwen3_moe",
        {**MIXTURE, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "mixtral, window": ("mixtral", {**WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 6,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v3, plain queries, biases": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "rope_interleave": False,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "q_lora_rank": 24, "n_routed_experts": 6, "v_head_dim": 24}),
    "gpt_oss": (
        "gpt_oss",
        {
            **WINDOW,
            **ALTERNATING,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "gemma2": ("gemma2", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 20, **CAPS}),
    "gemma2, narrow heads": ("gemma2", {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, **CAPS}),
    "gemma3_text": ("gemma3_text", {**WINDOW, **ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 24, **LOCAL}),
    "gemma3_text, capped logits": ("gemma3_text", {**WINDOW, "head_dim": 16, "final_logit_softcapping": 4.0}),
    "gemma4_text": (
        "gemma4_text",
        {
            **WINDOW,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4_text, values are keys": (
        "gemma4_text",
        {
            **WINDOW,
            **ALTERNATING,
            "head_dim": 16,
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
    ),
    "olmo3": ("olmo3", {**WINDOW, **ALTERNATING}),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", WINDOW),
    "phi3, partial and long positions": (
        "phi3",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [4.0, 9.0],
            },
        },
    ),
    "llama, dynamic positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "cohere2": ("cohere2", {**WINDOW, **ALTERNATING, "logit_scale": 0.25}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "exaone4": ("exaone4", {**WINDOW, **ALTERNATING}),
    "exaone4, without window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_5_text": ("qwen3_5_text", {**LINEAR, "tie_word_embeddings": True}),
    "qwen3_5_text, one head of keys, two taps": (
        "qwen3_5_text",
        {**LINEAR, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "layer_types": ["linear_attention"] * 3},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 20}),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "head_dim": 16,
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "lfm2, four taps": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **MAMBA,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h, without experts, biases": (
        "nemotron_h",
        {
            **MAMBA,
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention"],
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
    ),
    "gpt2": (
        "gpt2",
        {"num_key_value_heads": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_inner": 48},
    ),
}


def config_of(kind: str, **more: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SMALL, **more})


def make(variant: str, **more: Any) -> Any:
    """The same random weights at every call, biases and norms included."""
    kind, own = VARIANTS[variant]
    if "vocab_size" in more and "vocab_size_per_layer_input" in own:
        more["vocab_size_per_layer_input"] = more["vocab_size"]
    generator = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind, **{**own, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.25 if parameter.ndim > 1 else 0.1
            shift = 0.0 if parameter.ndim > 1 else 0.5
            parameter.copy_(shift + spread * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4, which its checkpoints hold
                buffer.fill_(0.8)
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model
