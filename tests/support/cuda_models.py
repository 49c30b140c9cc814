"""Small models of the kinds that graphs decode, on CUDA, and requests to sample from them."""

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headrace.model.cuda import available
from headrace.model.load import LanguageModel, prepare
from headrace.types import SampleRequest, SamplingParams, int_array

if available():
    from headrace.model.cuda.layers import fuse_layers  # needs Triton
VOCABULARY = 9000  # three blocks of the drawing kernel
KV_TOKENS = 32 * 512


def model_of(kind: str = "qwen2", dtype: torch.dtype = torch.float32, *, spread: float = 0.1) -> LanguageModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 384,
        "intermediate_size": 640,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": spread,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)),
    }[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    lm = prepare(model.to("cuda", dtype), None, source="test")
    fuse_layers(lm.model)  # as a run does; in float32 they stay transformers' own
    return lm


def requests_of(count: int, *, size: int = 70, tokens: int = 50, **params: Any) -> list[SampleRequest]:
    """Prompts of 1 to `size` tokens, the first third equal; temperatures 1, 0.7 and 0."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCABULARY, size)
    return [
        SampleRequest(
            prompt=int_array(shared if index < count // 3 else rng.integers(0, VOCABULARY, rng.integers(1, size + 1))),
            params=SamplingParams(
                max_tokens=tokens - index % 7,
                seed=2**63 + index,
                **{"temperature": (1.0, 0.7, 0.0)[index % 3], "stop_tokens": (), **params},
            ),
        )
        for index in range(count)
    ]
