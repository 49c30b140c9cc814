"""One training step on one GPU: forward, backward and AdamW over packed tokens, ours and a naive one.

    python bench/gpu/train.py [--tokens 16384] [--length 1024] [--compile] [--recompute] [--profile]
    python bench/gpu/train.py --long     # one sequence of 32,768 tokens, ours only

A model of the shape of Qwen2.5-1.5B with random weights, in bfloat16. The card's matrix rate is measured in the same
run (a product of 8192 x 8192 x 8192 on random numbers), and a step's share of it counts 6 N operations a token, N all
parameters. The naive step is what transformers and torch give without further work: sequences of one length as rows of
a batch, so that nothing is padded, flash attention through sdpa, logits of the whole batch, cross entropy, and torch's
fused AdamW over float32 masters.

The last line is JSON: `ratio` is ours against the naive one in tokens a second, `share` is of the card's matrix rate.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from qwen import VOCABULARY
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.model.cuda.compile import compile_layers
from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array

QWEN_1_5B = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_theta=1e6,
    tie_word_embeddings=True,
)


def random_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen2ForCausalLM(QWEN_1_5B).to(torch.bfloat16)


def matrix_rate(size: int = 8192, repeats: int = 20) -> float:
    """Operations a second of a large bfloat16 product on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = seconds(lambda: a @ b, repeats=repeats, warmup=5)
    return 2 * size**3 / statistics.median(times)


def seconds(run: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times


def random_data(tokens: int, length: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(tokens // length):
        ids = rng.integers(0, QWEN_1_5B.vocab_size, length + 1)
        weights = np.full(length, 1.0 / tokens)
        data.append(
            Datum(inputs=int_array(ids[:-1]), targets=int_array(ids[1:]), arrays={"weights": float_array(weights)})
        )
    return data


def ours(
    data: list[Datum], *, compiled: bool, recompute: bool, fused: bool
) -> tuple[TorchBackend, Callable[[], float]]:
    """A backend and its step, which returns the loss."""
    lm: LanguageModel = prepare(random_model(), None, source="random")
    if fused:
        fuse_layers(lm.model)
    if compiled:
        compile_layers(lm.model)
    if recompute:
        recompute_layers(lm.model)
    backend = TorchBackend(lm, micro_batch_tokens=sum(datum.num_tokens for datum in data))

    def step() -> float:
        forward = backend.forward_backward(data, CROSS_ENTROPY)
        update = backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0))
        update.result()
        return forward.result().loss

    return backend, step


def naive(data: list[Datum]) -> Callable[[], float]:
    model = random_model()
    model.config._attn_implementation = "sdpa"
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    inputs, targets = (
        torch.from_numpy(np.stack([getattr(datum, name) for datum in data])).long().cuda()
        for name in ("inputs", "targets")
    )

    def step() -> float:
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        del logits
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return float(loss)

    return step


def profile(step: Callable[[], object]) -> str:
    """Device time of one step by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1e3
    lines = [f"{row.self_device_time_total / 1e3:8.2f} ms {row.count:5d} x  {row.key[:110]}" for row in rows[:45]]
    return "\n".join([f"device time {total:.1f} ms", *lines])


def measure(data: list[Datum], given: argparse.Namespace, rate: float) -> dict[str, float]:
    """Ours: median of the repeats, its share of the matrix rate, its peak memory and its start-up."""
    torch.cuda.reset_peak_memory_stats()
    backend, step = ours(data, compiled=given.compile, recompute=given.recompute, fused=not given.plain)
    began = time.perf_counter()
    loss = step()
    start_s = time.perf_counter() - began
    times = seconds(step, repeats=given.repeats, warmup=2)
    if given.profile:
        print(profile(step))
    backend.close()
    tokens = sum(datum.num_tokens for datum in data)
    operations = 6 * sum(parameter.numel() for parameter in backend.lm.model.parameters()) * tokens
    median = statistics.median(times)
    return {
        "seconds": median,
        "tokens_per_s": tokens / median,
        "share": operations / median / rate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": start_s,
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="decoder layers through torch.compile")
    parser.add_argument("--recompute", action="store_true", help="keep only each layer's input")
    parser.add_argument("--plain", action="store_true", help="without the fused norms and activations")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    parser.add_argument("--long", action="store_true", help="one sequence of 32,768 tokens, ours only")
    parser.add_argument("--no-baseline", action="store_true")
    given = parser.parse_args()
    if given.long:
        given.tokens = given.length = 32768
    data = random_data(given.tokens, given.length)
    rate = matrix_rate()
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.0f} TFLOP/s in a bfloat16 product")
    figures = measure(data, given, rate)
    print({name: round(value, 4) for name, value in figures.items()})
    result: dict[str, float | str] = {"bench": "gpu_train", "matrix_tflops": rate / 1e12, **figures}
    if not (given.long or given.no_baseline):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = naive(data)
        loss = step()
        median = statistics.median(seconds(step, repeats=2, warmup=1))
        result |= {
            "naive_seconds": median,
            "naive_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "naive_loss": loss,
            "ratio": median / figures["seconds"],
        }
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
