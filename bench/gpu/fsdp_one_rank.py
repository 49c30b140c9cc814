"""One training step on one GPU by `TorchBackend` and by `FsdpBackend` with one rank, on the same model and data.

    python bench/gpu/fsdp_one_rank.py [--tokens 16384] [--length 1024] [--recompute] [--layers 28] [--rounds 15]

With one rank nothing is exchanged, so the difference is what the machinery of sharding costs: weights copied for every
layer, gradients copied back, commands and results. The model has the shape of Qwen2.5-1.5B with random weights, in
bfloat16, with fused layers as in a run. Both are in memory at once and take turns, a step each, so that the clock of
the card is the same for both; it takes about 45 GiB more than one alone. Losses and gradient norms are printed beside
the times.

The last line is JSON: `ratio` is the median time of a step of `FsdpBackend` over that of `TorchBackend`.
"""

import argparse
import json
import statistics
import time
from functools import partial

import torch
from train import QWEN_1_5B, random_data
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.fsdp.rank_backend import BackendOptions, Model
from headrace.train.fsdp.ranks import Ranks
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum


def build(layers: int, recompute: bool) -> Model:
    """Make the same model at every call."""
    torch.manual_seed(0)
    config = Qwen2Config.from_dict(QWEN_1_5B.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    lm: LanguageModel = prepare(model, None, source="random")
    fuse_layers(lm.model)
    if recompute:
        recompute_layers(lm.model)
    return Model(lm=lm)


class Side:
    """One of the two backends: its times, its last loss and gradient norm, and its largest memory."""

    def __init__(self, backend: TorchBackend | FsdpBackend, data: list[Datum]) -> None:
        self.backend, self._data = backend, data
        self.times: list[float] = []
        self.peak_bytes = 0
        self.last: dict[str, float] = {}

    def step(self) -> None:
        """Time a step; a learning rate of 1e-6 hardly moves loss or norm."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        forward = self.backend.forward_backward(self._data, CROSS_ENTROPY)
        update = self.backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0)).result()
        torch.cuda.synchronize()
        self.times.append(time.perf_counter() - began)
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        self.last = {"loss": forward.result().loss, "norm": update.grad_norm}

    def figures(self, *, others_bytes: int) -> dict[str, float]:
        milliseconds = 1000 * statistics.median(self.times)
        return {"ms": round(milliseconds, 2), "GiB": round((self.peak_bytes - others_bytes) / 2**30, 2), **self.last}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    data = random_data(arguments.tokens, arguments.length)

    torch.cuda.init()
    single = TorchBackend(build(arguments.layers, arguments.recompute).lm, micro_batch_tokens=arguments.tokens)
    plain = Side(single, data)
    for _ in range(3):
        plain.step()
    plain_bytes = torch.cuda.memory_allocated()

    ranks = Ranks(1, device="cuda")
    backend = FsdpBackend(
        ranks,
        partial(build, arguments.layers, arguments.recompute),
        BackendOptions(micro_batch_tokens=arguments.tokens),
    )
    sharded = Side(backend, data)
    for _ in range(3):
        sharded.step()
    sharded_bytes = torch.cuda.memory_allocated() - plain_bytes

    for side in (plain, sharded):
        side.times, side.peak_bytes = [], 0
    for _ in range(arguments.rounds):
        plain.step()
        sharded.step()
    figures = {
        "torch": plain.figures(others_bytes=sharded_bytes),
        "fsdp": sharded.figures(others_bytes=plain_bytes),
    }
    for name, values in figures.items():
        print(f"{name}: {values}", flush=True)
    backend.close()
    ranks.close()
    single.close()
    print(json.dumps({"ratio": round(figures["fsdp"]["ms"] / figures["torch"]["ms"], 4), **figures}))


if __name__ == "__main__":
    main()
