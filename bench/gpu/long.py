"""Train on long sequences on one GPU: seconds, tokens a second, share of the card's matrix rate, and peak memory.

    python bench/gpu/long.py                              # the four cases of prime-rl's baselines
    python bench/gpu/long.py --cases 4b-lora-131072       # any of CASES, by name
    python bench/gpu/long.py --cases 0.6b-16384 --profile # and the device time by kernel
    python bench/gpu/long.py --kernels                    # cuDNN against the variable-length kernel, by length
    python bench/gpu/long.py --decode                     # 16 rows x 32,768 cached tokens, against its floor

Qwen3-0.6B, 4B and 8B shapes with random weights in bfloat16, fused layers, PPO's clipped loss on all tokens, one
sequence in a micro-batch, AdamW. A share is 6 N + attention operations a token (6 L T Q W: causal, forward and
backward) over 989 TFLOP/s; with LoRA that counts gradients of frozen weights, which nobody computes, so `needed` counts
what is: 4 N. Recomputation counts nothing. The last line is JSON.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if not torch.cuda.is_available():  # before the kernels are imported: Triton may not be here either
    raise SystemExit("this bench needs a GPU, and torch sees no CUDA device")

from headrace.errors import BackendError
from headrace.infer.cuda.graphs import GraphDecoder
from headrace.infer.multistep import DecodeRow
from headrace.model.attention import PromptChunk, make_packed
from headrace.model.cuda import cudnn_attention
from headrace.model.cuda.fp16_matmul import attention_fp16, view_as_bf16
from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import add_lora
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, Datum, LossSpec, float_array, int_array

PEAK = 989e12  # operations a second of bfloat16 products, as NVIDIA states it for H100 and H200
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    tokens: int
    rank: int = 0
    recompute: bool = False


CASES = {
    "0.6b-16384": Case("0.6b", 16_384),
    "0.6b-65536": Case("0.6b", 65_536),
    "4b-lora-16384": Case("4b", 16_384, rank=16),
    "4b-lora-65536": Case("4b", 65_536, rank=16, recompute=True),
    "4b-lora-131072": Case("4b", 131_072, rank=16, recompute=True),
    "8b-lora-16384": Case("8b", 16_384, rank=32),
    "8b-lora-16384-recomputed": Case("8b", 16_384, rank=32, recompute=True),
}
PUBLISHED = ("0.6b-16384", "0.6b-65536", "4b-lora-16384", "4b-lora-65536")


def make_model(shape: str) -> Qwen3ForCausalLM:
    """The same weights at every call, in bfloat16 on the device."""
    config = Qwen3Config(
        **{
            "vocab_size": 151_936,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_073,
            "tie_word_embeddings": True,
            **SHAPES[shape],
        }
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_datum(tokens: int) -> Datum:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 151_936, tokens + 1)
    arrays = {
        "weights": np.full(tokens, 1.0 / tokens),
        "advantages": rng.normal(size=tokens),
        "sampler_logprobs": np.full(tokens, -11.9),
    }
    named = {name: float_array(values) for name, values in arrays.items()}
    return Datum(inputs=int_array(ids[:-1]), targets=int_array(ids[1:]), arrays=named)


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def train(case: Case, *, repeats: int, profile: bool) -> dict[str, float]:
    lm: LanguageModel = prepare(make_model(case.shape), None, source="random")
    parameters = sum(parameter.numel() for parameter in lm.model.parameters())
    fuse_layers(lm.model)
    if case.rank:
        add_lora(lm.model, rank=case.rank, alpha=32.0, targets=LORA, seed=0)
    if case.recompute:
        recompute_layers(lm.model)
    backend = TorchBackend(lm, micro_batch_tokens=case.tokens)
    data = [random_datum(case.tokens)]

    def step() -> None:
        backend.forward_backward(data, LossSpec(fn="ppo"))
        backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0)).result()

    try:
        first_s = seconds(step)
        torch.cuda.reset_peak_memory_stats()
        median = statistics.median(seconds(step) for _ in range(repeats))
        if profile:
            print_profile(step)
    finally:
        backend.close()
    config = lm.model.config
    attention = 6 * config.num_hidden_layers * case.tokens * config.num_attention_heads * config.head_dim
    return {
        "seconds": median,
        "tokens_per_s": case.tokens / median,
        "share": (6 * parameters + attention) * case.tokens / median / PEAK,
        "needed": ((4 if case.rank else 6) * parameters + attention) * case.tokens / median / PEAK,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": first_s,
    }


def print_profile(step: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        wall = seconds(step)
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1e3
    print(f"device time {total:.1f} ms of {1e3 * wall:.1f} ms")
    for row in rows[:40]:
        print(f"{row.self_device_time_total / 1e3:8.2f} ms {row.count:5d} x  {row.key[:100]}")


def kernels() -> dict[str, float]:
    """Forward and backward through `attention_fp16`, by length: milliseconds with cuDNN and without.

    16,384 tokens (or one longer sequence) of 16 query and 8 key heads of 128, as Qwen3-0.6B has.
    """
    figures: dict[str, float] = {}
    for length in (512, 1024, 2048, 4096, 16_384, 65_536):
        rows = max(1, 16_384 // length)
        states = [
            view_as_bf16(torch.randn(rows * length, heads, 128, device="cuda").half()).requires_grad_()
            for heads in (16, 8, 8)
        ]
        lengths = (length,) * rows
        whole = make_packed(lengths, torch.device("cuda"))
        for name, long in (("cudnn", 1), ("varlen", 10**9)):
            context = with_long(lengths, long) if name == "cudnn" else whole_only(whole)

            def both(context: Any = context, states: Any = states) -> None:
                out, _ = attention_fp16(*states, context, 128**-0.5, None, bf16_copy=False)
                out.backward(out.detach())

            for _ in range(3):
                both()
            median = statistics.median(seconds(both) for _ in range(7))
            operations = 6 * 16 * 128 * length * rows * length
            figures[f"{name}_{length}_ms"] = 1e3 * median
            figures[f"{name}_{length}_tflops"] = operations / median / 1e12
            print(
                f"{name} {rows} x {length}: {1e3 * median:.2f} ms, {operations / median / 1e12:.0f} TFLOP/s", flush=True
            )
    return figures


def with_long(lengths: tuple[int, ...], long: int) -> Any:
    """The context of a batch whose segments are all long."""
    from headrace.model import attention

    before, attention.LONG = attention.LONG, long
    try:
        return make_packed(lengths, torch.device("cuda"))
    finally:
        attention.LONG = before


def whole_only(context: Any) -> Any:
    from dataclasses import replace

    return replace(context, parts=None)


def decode(rows: int = 16, cached: int = 32_768, steps: int = 32) -> dict[str, float]:
    """Decode behind that many cached tokens; the floor reads weights and keys and values once."""
    lm = prepare(make_model("0.6b"), None, source="random")
    fuse_layers(lm.model)
    room = cached + 4 * steps + 64
    decoder = GraphDecoder(lm, max_num_seqs=rows, kv_tokens=rows * room, prompt_tokens=8192)
    cache = decoder.cache(rows, room)
    for store in (*cache.keys, *cache.values):
        store.normal_(std=0.5)
    config = lm.model.config
    decode_rows = [
        DecodeRow(slot=index, token=index, position=cached, count=0, limit=room, seed=index, temperature=1.0, stops=())
        for index in range(rows)
    ]

    def run() -> None:
        decoder.start(decode_rows, steps)
        decoder.finish()

    run()
    step_s = statistics.median(seconds(run) for _ in range(5)) / steps
    prompt = np.random.default_rng(0).integers(0, 151_936, 8192).tolist()
    prefill_s = seconds(lambda: decoder.prefill([PromptChunk(0, cached - 8192, 8192)], prompt))
    weights = 2 * sum(parameter.numel() for parameter in lm.model.parameters())
    keys = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (cached + steps / 2) * rows
    rate = bandwidth()
    floor_s = (weights + keys) / rate
    return {
        "decode_step_ms": 1e3 * step_s,
        "decode_floor_ms": 1e3 * floor_s,
        "decode_share": floor_s / step_s,
        "decode_tokens_per_s": rows / step_s,
        "bandwidth_tb": rate / 1e12,
        "prefill_8192_behind_24576_s": prefill_s,
        "decode_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source, target = (torch.empty(2**32, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    return 2 * 2**32 / statistics.median([seconds(lambda: target.copy_(source)) for _ in range(7)][2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--varlen", action="store_true", help="without cuDNN, to compare")
    given = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True
    )
    if given.varlen:
        cudnn_attention.HALF = ()
    result: dict[str, Any] = {"bench": "gpu_long", "cases": {}}
    if given.kernels:
        result |= kernels()
    if given.decode:
        result |= decode()
    alone = given.kernels or given.decode
    names = given.cases if given.cases is not None else () if alone else PUBLISHED
    for name in names:
        try:
            figures = train(CASES[name], repeats=given.repeats, profile=given.profile)
        except (BackendError, torch.OutOfMemoryError) as exc:  # a case without room leaves the others
            print(f"{name}: {exc}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        result["cases"][name] = {key: round(value, 4) for key, value in figures.items()}
        print(name, result["cases"][name], flush=True)
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
