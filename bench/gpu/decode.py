"""Sampling on one GPU: tokens a second of the embedded engine against `generate` of transformers, same model and sizes.

    python bench/gpu/decode.py [--batch 256] [--repeats 5] [--baseline-repeats 2]
    python bench/gpu/decode.py --tail      # 1,024 requests of geometric lengths over 256 slots, `generate` in batches

A model of the shape of Qwen2.5-1.5B with random weights in bfloat16; prompts of 128 random tokens, all different,
512 tokens each (`--tail`: geometric lengths of mean 256, at most 1,024, known to both sides as when a request ends).
Prefill is part of the time on both sides, compiling and capturing (printed) are not. The mean difference between the
log-probs recorded while sampling and those of the trainer's forward pass is printed as well; `floor_tokens_per_s` is
what decoding alone allows with the memory bandwidth and the matrix rate measured in the same run.

The last line is JSON; `ratio` is ours over `generate`'s in tokens a second (medians).
"""

import argparse
import asyncio
import json
import statistics
import time

import numpy as np
import torch
from qwen import VOCABULARY, random_model, step_floor, timed
from transformers import StoppingCriteria, StoppingCriteriaList

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import prepare
from headrace.types import Completion, SampleRequest, SamplingParams, int_array

PROMPT, COMPLETION, TAIL_MEAN, TAIL_MOST, TAIL_REQUESTS, TAIL_ROWS = 128, 512, 256, 1024, 1024, 256


class Lengths(StoppingCriteria):
    """Row i is done when it has `lengths[i]` tokens."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


def baseline(prompts: np.ndarray, lengths: np.ndarray, rows: int, repeats: int) -> list[float]:
    """Seconds of `generate` over all requests, in batches of `rows`."""
    model = random_model(attn_implementation="sdpa", eos_token_id=None)
    ids, wanted = torch.from_numpy(prompts).cuda(), torch.from_numpy(PROMPT + lengths).cuda()

    def run(most: int, part: slice) -> None:
        for start in range(len(ids))[part][::rows]:
            span = slice(start, start + rows)
            model.generate(
                ids[span],
                attention_mask=torch.ones_like(ids[span]),
                do_sample=True,
                top_k=0,
                temperature=1.0,
                max_new_tokens=min(most, int(lengths[span].max())),
                stopping_criteria=StoppingCriteriaList([Lengths(wanted[span])]),
            )

    with torch.inference_mode():
        run(TAIL_MOST, slice(0, rows))  # warms up: the allocator meets every length of the cache once
        return timed(lambda: run(TAIL_MOST, slice(None)), repeats)


def sample(engine: EmbeddedEngine, prompts: np.ndarray, lengths: np.ndarray, seed: int) -> list[Completion]:
    requests = [
        SampleRequest(
            prompt=int_array(prompt),
            params=SamplingParams(max_tokens=int(length), seed=seed * len(prompts) + index, stop_tokens=()),
        )
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    return asyncio.run(run())


def mismatch(engine: EmbeddedEngine, prompts: np.ndarray, completions: list[Completion], count: int = 32) -> float:
    """Mean difference of log-probs between sampling and the trainer's forward pass, over some sequences."""
    pairs = list(zip(prompts, completions, strict=True))[:count]
    scores = asyncio.run(engine.score([int_array(np.concatenate([p, c.tokens])) for p, c in pairs]))
    return float(
        np.concatenate(
            [np.abs(s[PROMPT:] - c.sampler_logprobs) for s, (_, c) in zip(scores, pairs, strict=True)]
        ).mean()
    )


def ours(prompts: np.ndarray, lengths: np.ndarray, rows: int, repeats: int) -> tuple[list[float], float]:
    lm = prepare(random_model(), None, source="bench")
    fuse_layers(lm.model)
    longest = PROMPT + int(lengths.max())
    kv_tokens = rows * -(-(longest + 1) // 64) * 64
    began = time.perf_counter()
    decoder = graph_decoder(lm, max_num_seqs=rows, kv_tokens=kv_tokens, graphs=True)
    engine = EmbeddedEngine(lm, max_num_seqs=rows, kv_tokens=kv_tokens, decoder=decoder)
    completions = sample(engine, prompts, np.minimum(lengths, 20), 0)
    sample(engine, prompts, lengths, 0)
    print(f"ours: ready after {time.perf_counter() - began:.1f} s, two warm-up runs included", flush=True)
    seeds = iter(range(1, repeats + 1))
    times = timed(lambda: completions.__setitem__(slice(None), sample(engine, prompts, lengths, next(seeds))), repeats)
    difference = mismatch(engine, prompts, completions)
    engine.close()
    return times, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baseline-repeats", type=int, default=2)
    parser.add_argument(
        "--baseline-batches", type=int, default=4, help="of the tail's four, that `generate` is timed on"
    )
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    count, rows = (TAIL_REQUESTS, TAIL_ROWS) if given.tail else (given.batch, given.batch)
    prompts = rng.integers(2, VOCABULARY, (count, PROMPT))
    lengths = np.minimum(rng.geometric(1 / TAIL_MEAN, count), TAIL_MOST) if given.tail else np.full(count, COMPLETION)
    tokens = int(lengths.sum())
    figures: dict[str, float] = {"requests": count, "rows": rows, "tokens": tokens}
    times, figures["mean_logprob_difference"] = ours(prompts, lengths, rows, given.repeats)
    print("ours:", " ".join(f"{each:.3f}" for each in times), "s", flush=True)
    torch.cuda.empty_cache()
    figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    floor = step_floor(rows, PROMPT + round(float(lengths.mean()) / 2))
    figures["floor_tokens_per_s"] = rows / floor
    figures["ours_tokens_per_s"] = tokens / statistics.median(times)
    figures["share_of_floor"] = figures["ours_tokens_per_s"] / figures["floor_tokens_per_s"]
    if given.baseline_repeats:
        part = slice(0, given.baseline_batches * rows)
        times = baseline(prompts[part], lengths[part], rows, given.baseline_repeats)
        print("generate:", " ".join(f"{each:.3f}" for each in times), "s", flush=True)
        figures["generate_tokens_per_s"] = int(lengths[part].sum()) / statistics.median(times)
        figures["ratio"] = figures["ours_tokens_per_s"] / figures["generate_tokens_per_s"]
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
