"""Sixteen tenants sampling at once against one: tokens per second of the adapter host at equal total batch, on the CPU.

    python bench/tenants_sampling.py [--width 256] [--layers 6] [--vocabulary 8192] [--model FOLDER] [--repeats 5]

Adapters on all linear layers and the head, trained for one step. 64 requests with 16-token prompts and 32 sampled
tokens over 32 rows: all of one tenant, or of 16 in turn. Two cases: all adapters of rank 16 ("equal"), and ranks 4, 8,
16, 32 in turn ("mixed", against the mean time of one tenant of each rank). One and sixteen alternate; each figure is a
median. `ratio` is the smaller of the two cases' (sixteen tenants' throughput / one tenant's), by the clock on the wall;
`cpu_ratio` is the same by the processor time of the process, with one thread of arithmetic, on which other programs
have less influence. `base` is the throughput without any adapter. Sixteen adapters are sixteen times as much memory to
read in every step, so it is given in large pages, as `headrace serve` has it.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.model.load import LanguageModel, load_model, prepare
from headrace.model.tiny import make_model
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.start import SETTINGS, VARIABLE, runs_on_glibc
from headrace.types import CROSS_ENTROPY, Adam, Datum, SampleRequest, SamplingParams, float_array, int_array

TENANTS, REQUESTS, ROWS, PROMPT, TOKENS = 16, 64, 32, 16, 32
EQUAL, MIXED = (16,), (4, 8, 16, 32)


def open_tenants(host: AdapterHost, case: str, ranks: Sequence[int], vocabulary: int) -> list[str]:
    """Samplers of adapters that were trained for a step."""
    tokens = int_array(np.arange(17) % vocabulary)
    datum = Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(np.ones(16))})
    names = []
    for index in range(TENANTS):
        name = f"{case}-{index}"
        host.create(name, AdapterSpec(rank=ranks[index % len(ranks)], seed=index))
        host.forward_backward(name, [datum], CROSS_ENTROPY)
        host.optim_step(name, Adam(learning_rate=1e-3))
        host.snapshot(name, name).result()
        host.drop(name)
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class Times:
    wall_s: float
    cpu_s: float


def measure(host: AdapterHost, names: Sequence[str], vocabulary: int, run: int) -> Times:
    """The requests are new in every run, so that nothing is shared with the one before."""
    rng = np.random.default_rng(run)
    requests = [
        SampleRequest(
            prompt=int_array(rng.integers(0, vocabulary, PROMPT)),
            params=SamplingParams(max_tokens=TOKENS, stop_tokens=(), seed=seed),
        )
        for seed in range(REQUESTS)
    ]

    async def sample() -> None:
        await asyncio.gather(*(host.sample(names[i % len(names)], each) for i, each in enumerate(requests)))

    start, cpu = time.perf_counter(), time.process_time()
    asyncio.run(sample())
    return Times(time.perf_counter() - start, time.process_time() - cpu)


def median(times: Sequence[Times]) -> Times:
    """Without the first, which warms up."""
    return Times(
        statistics.median(each.wall_s for each in times[1:]), statistics.median(each.cpu_s for each in times[1:])
    )


def compare(host: AdapterHost, case: str, ranks: Sequence[int], vocabulary: int, repeats: int) -> dict[str, float]:
    names = open_tenants(host, case, ranks, vocabulary)
    one: list[list[Times]] = [[] for _ in ranks]
    many: list[Times] = []
    for repeat in range(repeats + 1):
        for index, times in enumerate(one):
            times.append(measure(host, names[index : index + 1], vocabulary, repeat))
        many.append(measure(host, names, vocabulary, repeat))
    for name in names:
        host.close_sampler(name).result()
    alone, together, total = [median(times) for times in one], median(many), REQUESTS * TOKENS
    wall_s = statistics.mean(each.wall_s for each in alone)
    print(f"{case}: one {total / wall_s:.0f} tokens/s, sixteen {total / together.wall_s:.0f} tokens/s")
    return {
        "one_tps": total / wall_s,
        "sixteen_tps": total / together.wall_s,
        "ratio": wall_s / together.wall_s,
        "cpu_ratio": statistics.mean(each.cpu_s for each in alone) / together.cpu_s,
    }


def make(options: argparse.Namespace) -> LanguageModel:
    if options.model:
        return load_model(options.model)
    heads = max(2, options.width // 64)
    model = make_model(
        vocab_size=options.vocabulary,
        width=options.width,
        layers=options.layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        context=512,
        seed=0,
    )
    return prepare(model, None, source="bench")


def begin_as_serve_does() -> None:
    """Start again with the C library's settings of `headrace serve`."""
    if VARIABLE not in os.environ and runs_on_glibc():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: SETTINGS})


def main() -> None:
    begin_as_serve_does()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm = make(options)
    host = AdapterHost(lm, max_num_seqs=ROWS, kv_tokens=2 * ROWS * 128)
    host.open_sampler("base", None).result()
    base = median([measure(host, ["base"], lm.vocabulary, run) for run in range(options.repeats + 1)])
    cases = {
        case: compare(host, case, ranks, lm.vocabulary, options.repeats)
        for case, ranks in (("equal", EQUAL), ("mixed", MIXED))
    }
    host.close()
    rounded = {case: {name: round(value, 2) for name, value in found.items()} for case, found in cases.items()}
    ratios = {name: round(min(found[name] for found in cases.values()), 2) for name in ("ratio", "cpu_ratio")}
    print(json.dumps({**ratios, "base_tps": round(REQUESTS * TOKENS / base.wall_s), **rounded}))


if __name__ == "__main__":
    main()
