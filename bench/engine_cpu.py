"""The embedded engine against transformers' `model.generate` on the CPU: tokens per second, counting real tokens only.

    python bench/engine_cpu.py [--repeats 3]

One random-weight Llama (256 wide, 6 layers, 4 heads, 2 key-value heads, vocabulary 49,152, tied), 128 requests with
32-token prompts over 32 slots; `generate` takes them in batches of 32. Two cases: every request samples 64 tokens
("equal"), and lengths are geometric with mean 64, at most 256 ("geometric": `generate` must run a batch until its
longest member is done). Both systems sample from the whole vocabulary at temperature 1, get the same prompts and the
same lengths, and alternate; each figure is a median. `ratio` is ours / generate's tokens per second in the geometric
case.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import prepare
from headrace.types import IntArray, SampleRequest, SamplingParams, int_array

REQUESTS, ROWS, PROMPT, MEAN, LONGEST = 128, 32, 32, 64, 256
VOCABULARY = 49_152


def make_model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None  # lengths are given, nothing may stop earlier
    model.generation_config.pad_token_id = 0
    return model


def ours(engine: EmbeddedEngine, prompts: Sequence[IntArray], lengths: Sequence[int]) -> int:
    async def run() -> int:
        requests = [
            SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=length, stop_tokens=(), seed=seed))
            for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        done = await asyncio.gather(*(engine.sample(request) for request in requests))
        return sum(len(completion.tokens) for completion in done)

    return asyncio.run(run())


def plain(model: LlamaForCausalLM, prompts: Sequence[IntArray], lengths: Sequence[int]) -> int:
    """Real tokens: what a request gets beyond its own length is computed, but not counted."""
    real = 0
    for start in range(0, len(prompts), ROWS):
        wanted = lengths[start : start + ROWS]
        inputs = torch.from_numpy(np.stack(prompts[start : start + ROWS])).long()
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=max(wanted),
            )
        assert out.shape[1] == PROMPT + max(wanted)
        real += sum(wanted)
    return real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    prompts = [int_array(tokens) for tokens in rng.integers(0, VOCABULARY, (REQUESTS, PROMPT))]
    cases = {
        "equal": [MEAN] * REQUESTS,
        "geometric": np.minimum(rng.geometric(1 / MEAN, REQUESTS), LONGEST).tolist(),
    }
    engine = EmbeddedEngine(prepare(make_model("eager"), None, source="bench"), max_num_seqs=ROWS)
    model = make_model("sdpa")
    ours(engine, prompts[:ROWS], [4] * ROWS)
    plain(model, prompts[:ROWS], [4] * ROWS)
    ratios, report = {}, {}
    for name, lengths in cases.items():
        rates: dict[str, list[float]] = {"ours": [], "generate": []}
        for _ in range(repeats):
            for system, run in (
                ("ours", lambda lengths=lengths: ours(engine, prompts, lengths)),
                ("generate", lambda lengths=lengths: plain(model, prompts, lengths)),
            ):
                start = time.perf_counter()
                tokens = run()
                rates[system].append(tokens / (time.perf_counter() - start))
                assert tokens == sum(lengths)
        middle = {system: statistics.median(values) for system, values in rates.items()}
        ratios[name] = middle["ours"] / middle["generate"]
        report[name] = {system: round(rate, 1) for system, rate in middle.items()} | {"ratio": round(ratios[name], 3)}
        print(
            f"{name:>10}: {sum(lengths):,} tokens, longest {max(lengths)}; ours {middle['ours']:,.0f} tok/s, "
            f"generate {middle['generate']:,.0f} tok/s, ratio {ratios[name]:.2f}",
            flush=True,
        )
    engine.close()
    print(json.dumps({"bench": "engine_cpu", "ratio": round(ratios["geometric"], 3), **report}))


if __name__ == "__main__":
    main()
