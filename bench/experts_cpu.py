"""Time mixtures and hybrids on a CPU: experts against transformers' functions, whole models against a dense one.

Experts: 2,048 tokens of training and 32 rows of decoding (forward only). Every function computes the same layer in
turn, five times after a first one; figures are medians.

Whole models: a small mixture, a hybrid of delta nets, and one of Mamba-2 mixers and experts, each beside a Qwen3 with
as many active parameters, three times in turn: forward and backward of 2,048 packed tokens, and 32 sequences of 16 + 48
tokens in an engine.

The last line is JSON with the ratio of the fastest of transformers' to ours, and of each model's time to the dense
one's.

    python bench/experts_cpu.py
"""

import asyncio
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headrace.infer.engine import EmbeddedEngine
from headrace.model.attention import Packed
from headrace.model.experts import mix_experts
from headrace.model.load import LanguageModel, prepare
from headrace.model.memory import model_dims, num_parameters
from headrace.types import SampleRequest, SamplingParams, int_array

EXPERTS, TOP_K, WIDTH, INNER = 32, 4, 512, 256
REPEATS, MODEL_REPEATS = 5, 3
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHOICE = {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("qwen3_moe", {**CHOICE, "num_hidden_layers": 4, "intermediate_size": 512}),
    "delta nets": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 512,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "mamba and experts": (
        "nemotron_h",
        {
            **CHOICE,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 256,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 4,
            "ssm_state_size": 32,
        },
    ),
}
LENGTHS = (256,) * 8


def main() -> None:
    ratio = time_experts()
    print(json.dumps({"ratio": ratio, "times_dense": time_models()}))


def time_experts() -> dict[str, float]:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    layer = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    functions: dict[str, Any] = {
        "headrace": mix_experts,
        "eager": lambda module, *inputs: module(*inputs),
        "grouped_mm": ALL_EXPERTS_FUNCTIONS["grouped_mm"],
        "batched_mm": ALL_EXPERTS_FUNCTIONS["batched_mm"],
    }
    ratios = {}
    for title, rows, train in (("training, 2,048 tokens", 2048, True), ("decoding, 32 rows", 32, False)):
        hidden = torch.randn(rows, WIDTH, generator=generator, requires_grad=train)
        weights, chosen = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K)
        chosen_functions = {
            name: fn for name, fn in functions.items() if rows < 1000 or name != "batched_mm"
        }  # it copies a matrix for every pair of token and expert
        seconds: dict[str, list[float]] = {name: [] for name in chosen_functions}
        for repeat in range(REPEATS + 1):
            for name, fn in chosen_functions.items():
                started = time.perf_counter()
                with torch.set_grad_enabled(train):
                    out = fn(layer, hidden, chosen, weights)
                if train:
                    out.sum().backward()
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
                layer.zero_grad()
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"{title}: {name} {1000 * median:.2f} ms")
        best = min(median for name, median in medians.items() if name != "headrace")
        ratios[title] = round(best / medians["headrace"], 2)
    return ratios


def time_models() -> dict[str, dict[str, float]]:
    """Return how many times a dense model's time each model takes, to train and to decode."""
    found = {}
    for title, (kind, settings) in MODELS.items():
        model = make(kind, settings)
        active = num_parameters(model_dims(model.model.config.to_dict()), active=True)
        layers = int(settings.get("num_hidden_layers", 4))
        plain = {"num_hidden_layers": layers, "intermediate_size": 8}
        around = num_parameters(model_dims(AutoConfig.for_model("qwen3", **COMMON, **plain).to_dict()))
        inner = 8 * round((active - around) / (3 * 256 * layers) / 8 + 1)
        dense = make("qwen3", {**plain, "intermediate_size": inner})
        actual = num_parameters(model_dims(dense.model.config.to_dict()))
        found[title] = {}
        for what, run in (("training", train), ("decoding", decode)):
            seconds: dict[str, list[float]] = {title: [], "dense": []}
            for repeat in range(MODEL_REPEATS + 1):
                for name, lm in ((title, model), ("dense", dense)):
                    took = run(lm)
                    if repeat:
                        seconds[name].append(took)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found[title][what] = round(medians[title] / medians["dense"], 2)
            print(
                f"{what}: {title} ({active:,} active) {1000 * medians[title]:.0f} ms, "
                f"dense ({actual:,}) {1000 * medians['dense']:.0f} ms"
            )
    return found


def make(kind: str, settings: dict[str, Any]) -> LanguageModel:
    torch.manual_seed(0)
    return prepare(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **settings)), None, source=kind
    )


def train(lm: LanguageModel) -> float:
    tokens = torch.arange(sum(LENGTHS)) * 7 % lm.vocabulary
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    started = time.perf_counter()
    hidden = lm.hidden(tokens, positions, Packed(LENGTHS))
    torch.nn.functional.cross_entropy(hidden @ lm.head_weight().T, tokens).backward()
    took = time.perf_counter() - started
    lm.model.zero_grad()
    return took


def decode(lm: LanguageModel) -> float:
    engine = EmbeddedEngine(lm, max_num_seqs=32)
    params = SamplingParams(max_tokens=48, stop_tokens=())

    async def play() -> None:
        prompts = [int_array([(11 * row + 5 * place) % lm.vocabulary for place in range(16)]) for row in range(32)]
        await asyncio.gather(*(engine.sample(SampleRequest(prompt=prompt, params=params)) for prompt in prompts))

    try:
        started = time.perf_counter()
        asyncio.run(play())
        return time.perf_counter() - started
    finally:
        engine.close()


if __name__ == "__main__":
    main()
