"""What few bits save of a model large enough that its embedding and head do not decide it.

    python bench/reference_memory.py [--width 2048] [--layers 12] [--vocabularies 32000 128256]

A random Llama in main memory, never on disk: its weights in float32, bfloat16, and with int8 and int4 weights by plain
torch over bfloat16 (`headrace/model/quantized.py`). `mib` counts every parameter and buffer once. Embedding and head
keep their precision, so `kept` is the share of the bfloat16 bytes that no quantizer touches, and the ratio to bfloat16
cannot be below it. `peak_mib` is what the process needed at most by then. The last line has `ratio`: int8 over
bfloat16, for the first vocabulary.
"""

import argparse
import copy
import json
import resource
import time

import numpy as np
import torch

from headrace.model.load import prepare
from headrace.model.quantized import model_bytes, quantize_model
from headrace.model.tiny import make_model, make_tokenizer
from headrace.train.frozen_model import FrozenScorer
from headrace.types import Datum, FloatArray, float_array, int_array

TOKENS = 48


def text(vocabulary: int) -> list[Datum]:
    tokens = int_array(np.random.default_rng(0).integers(0, vocabulary, TOKENS + 1))
    ones = float_array(np.ones(TOKENS))
    return [Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": ones})]


def score(model: torch.nn.Module, data: list[Datum]) -> FloatArray:
    return FrozenScorer(prepare(model, make_tokenizer(()), source="random")).score(data)[0]


def measure(width: int, layers: int, vocabulary: int) -> dict[str, object]:
    heads = width // 128 if width >= 256 else 2
    model: torch.nn.Module = make_model(
        vocab_size=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=max(heads // 4, 1),
        context=256,
        seed=0,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    data = text(vocabulary)
    sizes = {"float32": model_bytes(model)}
    model = model.to(torch.bfloat16)
    sizes["bfloat16"] = model_bytes(model)
    kept = sum(p.numel() * 2 for name, p in model.named_parameters() if "embed_tokens" in name or "lm_head" in name)
    exact, seconds = score(model, data), {}
    errors = {}
    for bits in (8, 4):
        few = copy.deepcopy(model) if bits == 8 else model  # the last one may change it
        began = time.perf_counter()
        quantize_model(few, bits)  # type: ignore[arg-type]
        seconds[f"int{bits}"] = round(time.perf_counter() - began, 1)
        sizes[f"int{bits}"] = model_bytes(few)
        errors[f"int{bits}"] = round(float(np.abs(score(few, data) - exact).mean()), 4)
        del few
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "vocabulary": vocabulary,
        "parameters": parameters,
        "mib": {name: round(size / 2**20) for name, size in sizes.items()},
        "kept": round(kept / sizes["bfloat16"], 3),
        "over_bfloat16": {name: round(sizes[name] / sizes["bfloat16"], 3) for name in ("int8", "int4")},
        "over_float32": {name: round(sizes[name] / sizes["float32"], 3) for name in ("int8", "int4")},
        "mean_error": errors,
        "quantize_s": seconds,
        "peak_mib": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 128256])
    options = parser.parse_args()
    measured = []
    for vocabulary in options.vocabularies:
        measured.append(measure(options.width, options.layers, vocabulary))
        print(json.dumps(measured[-1]))
    ratios: object = measured[0]["over_bfloat16"]
    assert isinstance(ratios, dict)
    print(json.dumps({"width": options.width, "layers": options.layers, "ratio": ratios["int8"]}))


if __name__ == "__main__":
    main()
