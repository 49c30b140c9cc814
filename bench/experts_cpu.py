"""Time the experts of a mixture on a CPU: ours against each of transformers' own functions, forward and backward.

Two batches: 2,048 tokens of training and 32 rows of decoding (forward only). Every function computes the same layer in
turn, five times after a first one; figures are medians. The last line is JSON with the ratio of the fastest of
transformers' to ours.

    python bench/experts_cpu.py
"""

import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headrace.model.experts import mix_experts

EXPERTS, TOP_K, WIDTH, INNER = 32, 4, 512, 256
REPEATS = 5


def main() -> None:
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
    print(json.dumps({"ratio": ratios}))


if __name__ == "__main__":
    main()
