"""One training step on one GPU by `TorchBackend` and by `FsdpBackend` with one rank, on the same model and data.

    python bench/gpu/fsdp_one_rank.py [--tokens 16384] [--length 1024] [--recompute] [--layers 28]

With one rank nothing is exchanged, so the difference is what the machinery of sharding costs: weights copied for every
layer, gradients copied back, commands and results. The model has the shape of Qwen2.5-1.5B with random weights, in
bfloat16, with fused layers as in a run. Losses and gradient norms of both are printed beside the times.

The last line is JSON: `ratio` is the time of a step of `FsdpBackend` over that of `TorchBackend`.
"""

import argparse
import gc
import json
import statistics
from functools import partial

import torch
from train import QWEN_1_5B, random_data, seconds
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


def measure(backend: TorchBackend | FsdpBackend, data: list[Datum], repeats: int) -> dict[str, float]:
    """Time a step, and keep its loss and gradient norm; a learning rate of 1e-6 hardly moves either."""
    last: dict[str, float] = {}

    def step() -> None:
        forward = backend.forward_backward(data, CROSS_ENTROPY)
        update = backend.optim_step(Adam(learning_rate=1e-6, clip_norm=1.0)).result()
        last.update(loss=forward.result().loss, norm=update.grad_norm)

    torch.cuda.reset_peak_memory_stats()
    times = seconds(step, repeats=repeats, warmup=3)
    return {"ms": 1000 * statistics.median(times), "GiB": torch.cuda.max_memory_allocated() / 2**30, **last}


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    data = random_data(arguments.tokens, arguments.length)

    torch.cuda.init()
    single = TorchBackend(build(arguments.layers, arguments.recompute).lm, micro_batch_tokens=arguments.tokens)
    plain = measure(single, data, arguments.repeats)
    single.close()
    del single
    free()
    print(f"TorchBackend: {plain}", flush=True)

    ranks = Ranks(1, device="cuda")
    backend = FsdpBackend(
        ranks,
        partial(build, arguments.layers, arguments.recompute),
        BackendOptions(micro_batch_tokens=arguments.tokens),
    )
    sharded = measure(backend, data, arguments.repeats)
    backend.close()
    ranks.close()
    print(f"FsdpBackend:  {sharded}", flush=True)
    print(json.dumps({"ratio": round(sharded["ms"] / plain["ms"], 4), "torch": plain, "fsdp": sharded}))


if __name__ == "__main__":
    main()
