"""Sampling from adapters through `headrace serve` and the tinker SDK on one GPU, against the engine alone.

    python bench/gpu/service_adapters.py [--shape 0.6B] [--rows 128] [--tokens 1024] [--repeats 3]

A model of the shape of Qwen3-0.6B with random weights, served by `headrace serve` in a process of its own; the SDK
creates an adapter of rank 32, saves its weights for a sampler, and asks for `--rows` samples of `--tokens` tokens
behind prompts of 128. The engine with the same shape and such an adapter comes first, in this process.

The last line is JSON; `ratio` is the SDK's tokens a second over the engine's (medians).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import adapters as engine_bench
import numpy as np
import torch
from qwen import timed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.multi_lora import AdapterTable, install_hooks
from headrace.service.http.auth import hash_key, new_key

PROMPT, READY_S = engine_bench.PROMPT, 120.0
SERVE = """
[model]
path = "{folder}/model"
name = "bench/model"
device = "cuda"
[engine]
max_num_seqs = {rows}
kv_tokens = {kv_tokens}
[serve]
port = {port}
folder = "{folder}/served"
[[keys]]
owner = "bench"
sha256 = "{sha256}"
quota = {{requests_per_s = 1e6, burst = 1000000}}
"""


def engine_times(lm: object, rows: int, tokens: int, repeats: int) -> list[float]:
    table = AdapterTable(lm.model)  # type: ignore[attr-defined]
    install_hooks(lm.model, table)  # type: ignore[attr-defined]
    kv_tokens = rows * -(-(PROMPT + tokens + 1) // 64) * 64
    decoder = graph_decoder(lm, max_num_seqs=rows, kv_tokens=kv_tokens, graphs=True, adapters=table)  # type: ignore[arg-type]
    key = table.put(engine_bench.random_adapter(table, 32, 0))
    engine = EmbeddedEngine(lm, max_num_seqs=rows, kv_tokens=kv_tokens, decoder=decoder, adapters=table)  # type: ignore[arg-type]
    engine_bench.sample(engine, rows, 40, [key], 0)
    seeds = iter(range(1, repeats + 1))
    times = timed(lambda: engine_bench.sample(engine, rows, tokens, [key], next(seeds)), repeats)
    engine.close()
    return times


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for every token."""
    words = {f"w{token}": token for token in range(engine_bench.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1")


@contextmanager
def server(folder: Path, rows: int, kv_tokens: int, sha256: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / "serve.toml"
    file.write_text(SERVE.format(folder=folder, port=port, rows=rows, kv_tokens=kv_tokens, sha256=sha256))
    command = [sys.executable, "-m", "headrace.cli", "serve", str(file)]
    process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + READY_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2)
                break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise SystemExit("the server does not answer") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def sdk_times(url: str, key: str, rows: int, tokens: int, repeats: int) -> list[float]:
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model="bench/model", rank=32)
    sampler = training.save_weights_and_get_sampling_client(name="bench")
    rng = np.random.default_rng(0)

    def sample(count: int, seed: int) -> None:
        futures = [
            sampler.sample(
                prompt=tinker.ModelInput.from_ints(rng.integers(2, engine_bench.VOCABULARY, PROMPT).tolist()),
                num_samples=1,
                sampling_params=tinker.SamplingParams(max_tokens=count, seed=seed * rows + row, stop=[]),
            )
            for row in range(rows)
        ]
        drawn = sum(len(future.result().sequences[0].tokens) for future in futures)
        assert drawn == rows * count, f"{drawn} tokens were sampled"

    sample(40, 0)
    seeds = iter(range(1, repeats + 1))
    return timed(lambda: sample(tokens, next(seeds)), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=engine_bench.SHAPES, default="0.6B")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lm = engine_bench.make(given.shape)
        lm.model.save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        own = engine_times(lm, given.rows, given.tokens, given.repeats)
        print("engine:", " ".join(f"{each:.3f}" for each in own), "s", flush=True)
        del lm
        torch.cuda.empty_cache()
        key = new_key()
        kv_tokens = given.rows * (PROMPT + given.tokens + 64)
        with server(folder, given.rows, kv_tokens, hash_key(key)) as url:
            sdk = sdk_times(url, key, given.rows, given.tokens, given.repeats)
    print("through the SDK:", " ".join(f"{each:.3f}" for each in sdk), "s", flush=True)
    total = given.rows * given.tokens
    rates = {"engine": total / statistics.median(own), "sdk": total / statistics.median(sdk)}
    ratio = rates["sdk"] / rates["engine"]
    print(
        json.dumps({**{f"{name}_tokens_per_s": round(rate) for name, rate in rates.items()}, "ratio": round(ratio, 3)})
    )


if __name__ == "__main__":
    main()
