"""Sampling with adapters on one GPU: tokens a second of the engine with one and with sixteen adapters, none merged,
against the same engine without.

    python bench/gpu/adapters.py [--shape 0.6B|8B] [--rank 32] [--rows 128] [--tokens 512] [--repeats 5] [--parts]

A model of the shape of Qwen3-0.6B or Qwen3-8B with random weights in bfloat16; adapters on all linear layers and the
head, as the tinker SDK makes them. "sixteen" has as many rows of the base as of each adapter in the batch. The three
cases take turns; prefill of 128 tokens a row is part of the time, compiling and capturing are not. With `--parts` one
decode step is also timed alone, with and without the side stream on which A x is computed.

The last line is JSON; `one` and `sixteen` are throughputs over that without adapters (medians).
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from qwen import timed
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.multistep import DecodeRow
from headrace.model.attention import PromptChunk
from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import LanguageModel, prepare
from headrace.model.multi_lora import Adapter, AdapterTable, install_hooks
from headrace.types import SampleRequest, SamplingParams, int_array

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
VOCABULARY, PROMPT = 151_936, 128


def make(shape: str) -> LanguageModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=shape == "0.6B",
        eos_token_id=None,
        bos_token_id=None,
        **SHAPES[shape],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False)
    lm = prepare(model, None, source="bench")
    fuse_layers(lm.model)
    return lm


def random_adapter(table: AdapterTable, rank: int, seed: int) -> Adapter:
    generator = torch.Generator("cuda").manual_seed(seed)
    down, up = {}, {}
    for part in table.parts.values():
        for name, outputs in zip(part.names, part.outputs, strict=True):
            down[name] = torch.randn(rank, part.inputs, generator=generator, device="cuda") / part.inputs**0.5
            up[name] = torch.randn(outputs, rank, generator=generator, device="cuda") * 0.01
    return Adapter(rank=rank, alpha=rank, down=down, up=up)


def sample(engine: EmbeddedEngine, rows: int, tokens: int, keys: Sequence[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        SampleRequest(
            prompt=int_array(rng.integers(2, VOCABULARY, PROMPT)),
            params=SamplingParams(max_tokens=tokens, seed=seed * rows + index, stop_tokens=()),
        )
        for index in range(rows)
    ]

    async def run() -> None:
        await asyncio.gather(*(engine.sample(r, adapter=keys[i % len(keys)]) for i, r in enumerate(requests)))

    asyncio.run(run())


def step_times(decoder: Any, rows: int, cases: dict[str, list[int]]) -> None:
    """Print milliseconds of a decode step at 256 cached tokens, 16 steps at a time."""
    for name, keys in cases.items():
        for side in (True, False) if any(keys) else (True,):
            beside, decoder._beside = decoder._beside, decoder._beside if side else None
            decoder._drop_graphs(set(decoder._graphs))

            def run(keys: list[int] = keys) -> None:
                decoder.start(
                    [DecodeRow(i, 5, 256, 0, 300, i, 1.0, (), adapter=keys[i % len(keys)]) for i in range(rows)],
                    16,
                )
                decoder.finish()

            with torch.inference_mode():
                times = timed(run, 12)[4:]
            print(
                f"step, {name}{'' if side else ', one stream'}: {1000 * statistics.median(times) / 16:.3f} ms",
                flush=True,
            )
            decoder._beside = beside
    decoder._drop_graphs(set(decoder._graphs))


def profile(decoder: Any, rows: int, cases: dict[str, list[int]]) -> None:
    """Print the kernels of a decode step: calls, and microseconds each."""
    for name, keys in cases.items():
        given = [DecodeRow(i, 5, 256, 0, 300, i, 1.0, (), adapter=keys[i % len(keys)]) for i in range(rows)]
        with torch.inference_mode():
            for _ in range(2):
                decoder.start(given, 16)
                decoder.finish()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                decoder.start(given, 16)
                decoder.finish()
        averages = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
        print(f"{name}: kernels of a step take {sum(each.self_device_time_total for each in averages) / 16:.0f} us")
        for each in averages[:14]:
            mean = each.self_device_time_total / each.count
            print(f"  {each.count / 16:6.1f} x {mean:7.2f} us  {each.key[:90]}", flush=True)


def prefill_times(decoder: Any, rows: int, cases: dict[str, list[int]]) -> None:
    count = decoder.prompt_tokens // PROMPT
    chunks = [PromptChunk(i, 0, PROMPT) for i in range(count)]
    tokens = np.random.default_rng(0).integers(2, VOCABULARY, count * PROMPT).tolist()
    for name, keys in cases.items():
        with torch.inference_mode():
            times = timed(lambda: decoder.prefill(chunks, tokens, [keys[i % len(keys)] for i in range(count)]), 8)[3:]  # noqa: B023
        print(f"prefill of {count * PROMPT} tokens, {name}: {1000 * statistics.median(times):.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    lm = make(given.shape)
    table = AdapterTable(lm.model)
    install_hooks(lm.model, table)
    kv_tokens = given.rows * -(-(PROMPT + given.tokens + 1) // 64) * 64
    decoder = graph_decoder(lm, max_num_seqs=given.rows, kv_tokens=kv_tokens, graphs=True, adapters=table)
    began = time.perf_counter()
    keys = [table.put(random_adapter(table, given.rank, seed)) for seed in range(16)]
    torch.cuda.synchronize()
    print(f"16 adapters put in {time.perf_counter() - began:.2f} s", flush=True)
    cases = {"none": [0], "one": keys[:1], "sixteen": [0, *keys]}
    if given.parts:
        decoder.cache(given.rows, kv_tokens // given.rows)
        step_times(decoder, given.rows, cases)
        prefill_times(decoder, given.rows, cases)
    if given.profile:
        decoder.cache(given.rows, kv_tokens // given.rows)
        profile(decoder, given.rows, cases)
    engine = EmbeddedEngine(lm, max_num_seqs=given.rows, kv_tokens=kv_tokens, decoder=decoder, adapters=table)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for chosen in cases.values():
        sample(engine, given.rows, 40, chosen, 0)
    for repeat in range(1, given.repeats + 1):
        for name, chosen in cases.items():
            seconds = timed(lambda: sample(engine, given.rows, given.tokens, chosen, repeat), 1)  # noqa: B023
            times[name] += seconds
    engine.close()
    figures: dict[str, Any] = {"shape": given.shape, "rank": given.rank, "rows": given.rows}
    rates = {name: given.rows * given.tokens / statistics.median(each) for name, each in times.items()}
    for name, each in times.items():
        print(f"{name}: {rates[name]:,.0f} tok/s ({' '.join(f'{one:.3f}' for one in each)} s)")
    figures |= {f"{name}_tokens_per_s": round(rate) for name, rate in rates.items()}
    figures |= {name: round(rates[name] / rates["none"], 3) for name in ("one", "sixteen")}
    print(json.dumps({**figures, "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}))


if __name__ == "__main__":
    main()
