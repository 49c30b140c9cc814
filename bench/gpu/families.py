"""A mixture of experts and a hybrid on one GPU: a training step, decoding, and one step of reinforcement learning.

    python bench/gpu/families.py --model mixture|hybrid --what train|decode|rl [--full] [--profile]

The mixture has the shape of Qwen3-30B-A3B, the hybrid that of Qwen3.5-4B; weights are random, made on the device in
bfloat16. Training is of LoRA of rank 32 on all linear layers that have one by default, with `--full` of all weights.

- train: forward, backward and AdamW over 16,384 packed tokens in sequences of 1,024. `share` is of the card's matrix
  rate and counts 4 N operations a token for LoRA and 6 N for all weights, N the parameters that a token meets, and
  attention's own.
- decode: 128 rows, 128 prompt tokens and 256 sampled ones. `share_of_floor` is against reading weights, keys and values
  and states once a step (and writing states) at the bandwidth of a large copy, measured in the same run.
- rl: 8 prompts of 256 tokens x 8 samples of 512, sampled, then one update of PPO's loss, with the experts replayed.

`--device cpu --tiny` runs all of it on small shapes, to test the script. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.schema import ALL_LINEAR
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model import load
from headrace.model.compute_thread import ComputeThread
from headrace.model.lora import add_lora
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    LossSpec,
    SampleRequest,
    SamplingParams,
    SharedWeights,
    float_array,
    int_array,
)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
    ),
    "hybrid": (
        "qwen3_5_text",
        {
            "vocab_size": 248_320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
    ),
}
TINY = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_PARTS = {
    "mixture": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
RATE = 752e12  # operations a second of a large bfloat16 product on an H200, where it is not measured


class Run:
    """One invocation: the device, the shape, and how much of everything."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device, self.tiny = given, torch.device(given.device), given.tiny
        kind, shape = SHAPES[given.model]
        if given.tiny:
            shape = {**shape, **TINY, **TINY_PARTS[given.model]}
        if given.layers:
            shape = {**shape, "num_hidden_layers": given.layers}
        more = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        self.config = AutoConfig.for_model(kind, **{**shape, **more})

    def model(self, *, lora: bool) -> load.LanguageModel:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = AutoModelForCausalLM.from_config(self.config).eval()
        finally:
            torch.set_default_dtype(before)
        lm = load.prepare(model, None, source="random")
        if self.device.type == "cuda":
            from headrace.model.cuda.layers import fuse_layers

            fuse_layers(lm.model)
        if lora:
            add_lora(lm.model, rank=32, alpha=32.0, targets=ALL_LINEAR, seed=0)
        if self.given.recompute:
            load.recompute_layers(lm.model)
        return lm

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return times

    def peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of a large copy."""
        size = 2**24 if self.tiny else 2**32
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / statistics.median(self.seconds(lambda: target.copy_(source), 7)[2:])

    def matrix_rate(self) -> float:
        size = 256 if self.tiny else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / statistics.median(self.seconds(lambda: a @ b, 13)[3:])

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        if not self.given.profile:
            yield
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as seen:
            yield
            self.wait()
        rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows) / 1e3
        print(f"device time {total:.1f} ms")
        for row in rows[:40]:
            print(f"{row.self_device_time_total / 1e3:9.2f} ms {row.count:6d} x  {row.key[:110]}")


def active_parameters(lm: load.LanguageModel) -> int:
    """Parameters whose products a token takes part in: of experts its own; without the embedding and adapters."""
    total = 0
    config = lm.model.config
    for name, parameter in lm.model.named_parameters():
        if name.endswith((".down", ".up")) or (name.endswith("embed_tokens.weight") and not config.tie_word_embeddings):
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
        total += round(parameter.numel() * share)
    return total


def full_layers(config: Any) -> int:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind == "full_attention" for kind in kinds)


def attention_operations(config: Any, tokens: int, length: int) -> float:
    """Of forward and backward pass, causal: two products of half a square each, and twice that."""
    return 3 * 2 * full_layers(config) * tokens * length * config.num_attention_heads * config.head_dim


def state_numbers(config: Any) -> int:
    """Numbers of the recurrent states of one sequence."""
    layers = config.num_hidden_layers - full_layers(config)
    if not layers:
        return 0
    return layers * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim


def decode_floor(run: Run, lm: load.LanguageModel, rows: int, length: int, *, lora: bool) -> float:
    """Bytes that a decode step must move: weights that any row meets, filled keys and values, states both ways."""
    config, weights = lm.model.config, 0.0
    for name, parameter in lm.model.named_parameters():
        if (name.endswith("embed_tokens.weight") and not config.tie_word_embeddings) or (
            name.endswith((".down", ".up")) and not lora
        ):
            continue
        share = 1.0
        if ".experts." in name:
            share = 1.0 - (1.0 - config.num_experts_per_tok / config.num_experts) ** rows
        weights += parameter.numel() * share
    cached = rows * length * full_layers(config) * 2 * config.num_key_value_heads * config.head_dim
    return 2 * (weights + cached) + 2 * 4 * rows * state_numbers(config)


# --- the three measurements ------------------------------------------------------------------------------------------


def random_data(run: Run, tokens: int, length: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(tokens // length):
        ids = rng.integers(0, run.config.vocab_size, length + 1)
        weights = float_array(np.full(length, 1.0 / tokens))
        data.append(Datum(inputs=int_array(ids[:-1]), targets=int_array(ids[1:]), arrays={"weights": weights}))
    return data


def train(run: Run) -> dict[str, float]:
    tokens, length = (512, 128) if run.tiny else (run.given.tokens, run.given.length)
    lora = not run.given.full
    lm = run.model(lora=lora)
    data = random_data(run, tokens, length)
    backend = TorchBackend(lm, micro_batch_tokens=tokens)
    parts: dict[str, list[float]] = {"forward_backward": [], "optimizer": []}

    def step() -> None:
        began = time.perf_counter()
        backend.forward_backward(data, CROSS_ENTROPY).result()
        run.wait()
        middle = time.perf_counter()
        backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0)).result()
        run.wait()
        parts["forward_backward"].append(middle - began)
        parts["optimizer"].append(time.perf_counter() - middle)

    [first] = run.seconds(step, 1)
    run.seconds(step, 1)
    times = run.seconds(step, run.given.repeats)
    with run.profiled():
        step()
    backend.close()
    median = statistics.median(times)
    operations = (4 if lora else 6) * active_parameters(lm) * tokens + attention_operations(
        lm.model.config, tokens, length
    )
    rate = run.matrix_rate()
    return {
        "seconds": median,
        "first_step_s": first,
        **{f"{name}_s": statistics.median(values[2:]) for name, values in parts.items()},
        "tokens_per_s": tokens / median,
        "active_parameters": active_parameters(lm),
        "share": operations / median / RATE,
        "share_of_measured": operations / median / rate,
        "matrix_tflops": rate / 1e12,
        "peak_gib": run.peak_gib(),
    }


def engine_of(
    run: Run, lm: load.LanguageModel, rows: int, longest: int, worker: ComputeThread | None
) -> EmbeddedEngine:
    kv_tokens = max(rows, 8) * -(-(longest + 1) // 64) * 64
    graphs = None if run.given.graphs else False
    decoder = graph_decoder(lm, max_num_seqs=rows, kv_tokens=kv_tokens, graphs=graphs)
    print("decoding", "step by step" if decoder is None else "in CUDA graphs", flush=True)
    return EmbeddedEngine(
        lm, max_num_seqs=rows, kv_tokens=kv_tokens, worker=worker, decoder=decoder, prefill_tokens=4096
    )


def sample(engine: EmbeddedEngine, prompts: np.ndarray, new: int, seed: int) -> list[Completion]:
    async def play() -> list[Completion]:
        params = [SamplingParams(max_tokens=new, seed=seed * 10_000 + i, stop_tokens=()) for i in range(len(prompts))]
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(
            *(engine.sample(SampleRequest(prompt=int_array(prompt), params=param)) for prompt, param in pairs)
        )

    return asyncio.run(play())


def decode(run: Run) -> dict[str, float]:
    rows, prompt, new = (8, 16, 8) if run.tiny else (run.given.rows, 128, run.given.new)
    lm = run.model(lora=not run.given.full)
    prompts = np.random.default_rng(0).integers(0, run.config.vocab_size, (rows, prompt))
    engine = engine_of(run, lm, rows, prompt + new, None)
    sample(engine, prompts, min(new, 20), 0)
    [prefill] = run.seconds(lambda: sample(engine, prompts + 0, 1, 1), 1)
    seeds = iter(range(2, 100))
    times = run.seconds(lambda: sample(engine, (prompts + 7) % run.config.vocab_size, new, next(seeds)), 2)
    with run.profiled():
        sample(engine, (prompts + 9) % run.config.vocab_size, 8, 99)
    engine.close()
    total = statistics.median(times)
    step = (total - prefill) / max(new - 1, 1)
    bytes_, bandwidth = decode_floor(run, lm, rows, prompt + new // 2, lora=False), run.bandwidth()
    floor = bytes_ / bandwidth
    return {
        "tokens_per_s": rows * new / total,
        "step_ms": 1e3 * step,
        "prefill_s": prefill,
        "floor_ms": 1e3 * floor,
        "floor_tokens_per_s": rows / floor,
        "share_of_floor": rows * new / total / (rows / floor),
        "share_of_floor_steps": floor / step,
        "bandwidth_gb_s": bandwidth / 1e9,
        "peak_gib": run.peak_gib(),
    }


def rl(run: Run) -> dict[str, float]:
    groups, members, prompt, new = (2, 2, 16, 16) if run.tiny else (8, 8, 256, 512)
    lm = run.model(lora=not run.given.full)
    worker = ComputeThread()
    backend = TorchBackend(lm, micro_batch_tokens=run.given.micro_batch, worker=worker)
    engine = engine_of(run, lm, groups * members, prompt + new, worker)
    rng = np.random.default_rng(0)
    parts: dict[str, list[float]] = {"sampling": [], "training": []}
    mismatch = 0.0
    for step in range(run.given.steps):
        distinct = rng.integers(0, run.config.vocab_size, (groups, prompt))
        prompts = np.repeat(distinct, members, axis=0)
        began = time.perf_counter()
        completions = sample(engine, prompts, new, step)
        run.wait()
        middle = time.perf_counter()
        data = [datum_of(*pair, groups * members * new) for pair in zip(prompts, completions, strict=True)]
        out = backend.forward_backward(data, LossSpec(fn="ppo")).result()
        backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0)).result()
        asyncio.run(_publish(engine, step + 1))
        run.wait()
        parts["sampling"].append(middle - began)
        parts["training"].append(time.perf_counter() - middle)
        sampled = zip(out.logprobs, completions, strict=True)
        mismatch = float(np.mean([np.abs(row[prompt - 1 :] - c.sampler_logprobs).mean() for row, c in sampled]))
        print(
            f"step {step}: sampling {parts['sampling'][-1]:.2f} s, training {parts['training'][-1]:.2f} s", flush=True
        )
    engine.close()
    backend.close()
    worker.close()
    medians = {f"{name}_s": statistics.median(values[1:] or values) for name, values in parts.items()}
    return {
        **medians,
        "seconds": sum(medians.values()),
        "sampled_tokens_per_s": groups * members * new / medians["sampling_s"],
        "trained_tokens_per_s": groups * members * (prompt + new) / medians["training_s"],
        "mean_logprob_difference": mismatch,
        "peak_gib": run.peak_gib(),
    }


async def _publish(engine: EmbeddedEngine, version: int) -> None:
    await engine.pause(interrupt=False)
    await engine.load(SharedWeights(fingerprint=""), version)
    await engine.resume()


def datum_of(prompt: np.ndarray, done: Completion, total: int) -> Datum:
    tokens = np.concatenate([prompt, done.tokens])
    sampled = np.arange(1, len(tokens)) >= len(prompt)
    logprobs = np.concatenate([np.zeros(len(prompt) - 1), done.sampler_logprobs])
    advantage = float(np.mean(done.tokens % 2 == 0)) - 0.5
    arrays = {"weights": sampled / total, "advantages": sampled * advantage, "sampler_logprobs": logprobs}
    return Datum(
        inputs=int_array(tokens[:-1]),
        targets=int_array(tokens[1:]),
        arrays={name: float_array(values) for name, values in arrays.items()},
        experts=done.experts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--what", choices=["train", "decode", "rl"], required=True)
    parser.add_argument("--full", action="store_true", help="all weights instead of LoRA")
    parser.add_argument("--recompute", action="store_true", help="keep only each layer's input")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="of rl; the first is not counted")
    parser.add_argument("--micro-batch", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's, for a quick look")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--unlisted", action="store_true", help="types that are not yet listed as compared on CUDA")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this bench needs a GPU, and torch sees no CUDA device")
    if given.unlisted:
        load.check_device = lambda *_: None  # type: ignore[assignment]
    figures = {"train": train, "decode": decode, "rl": rl}[given.what](Run(given))
    named = {"bench": f"gpu_families_{given.model}_{given.what}", "full": given.full, "recompute": given.recompute}
    print(json.dumps({**named, **{name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
