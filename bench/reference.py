"""What few bits save of a reference model's memory, and what they cost in its log-probs.

    python bench/reference.py [--model smollm2-135m] [--tokens 64] [--texts 8] [--device cpu] [--width 256]

Each text is sampled from the model itself, from a prompt of its own, so its log-probs are those that training compares
with. They are scored by the model in float32 (what is true), in bfloat16 (what a reference model has on a GPU), and
with int8 and int4 weights over bfloat16 and over float32, quantised by plain torch and by each installed package that
can (`headrace/model/quantized.py`; a line says why another cannot). `mean_error`, `max_error` and `k3` are
against float32, `bf16_mean_error` is against bfloat16, and so is `saved`, the share of the memory that is saved.
`ratio` is the memory of plain int8 over bfloat16, embedding and head included, over that of bfloat16; `auto` is what a
server would choose. Without --model: a random Llama, so wide.
"""

import argparse
import asyncio
import json
import tempfile
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headrace.errors import ModelError
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import LanguageModel, load_model
from headrace.model.quantized import PACKAGES, Quantization, Quantizer, choose_quantizer
from headrace.model.tiny import make_model, make_tokenizer
from headrace.train.frozen_cache import ReferenceModels
from headrace.types import Datum, FloatArray, SampleRequest, SamplingParams, float_array, int_array

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
QUANTIZERS: tuple[Quantizer, ...] = ("plain", *PACKAGES)


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    dtype: torch.dtype
    quantization: Quantization | None


def kinds(device: torch.device) -> list[Kind]:
    """List what can be measured on this machine."""
    possible = [Kind("float32", torch.float32, None), Kind("bfloat16", torch.bfloat16, None)]
    wanted = [Quantization(bits=bits, quantizer=each) for bits in (8, 4) for each in QUANTIZERS]  # type: ignore[arg-type]
    for name, dtype in DTYPES.items():
        for quantization in wanted:
            try:
                choose_quantizer(quantization, device=device, dtype=dtype)
            except ModelError as exc:
                print(f"not measured over {name}: {exc}")
            else:
                possible.append(
                    Kind(f"int{quantization.bits} over {name}, {quantization.quantizer}", dtype, quantization)
                )
    return possible


def save_random(folder: str, width: int) -> None:
    make_model(vocab_size=8192, width=width, layers=6, heads=4, kv_heads=2, context=512, seed=0).save_pretrained(folder)
    make_tokenizer(()).save_pretrained(folder)


def own_texts(lm: LanguageModel, count: int, tokens: int) -> list[Datum]:
    engine = EmbeddedEngine(lm, max_num_seqs=8, kv_tokens=16 * (tokens + 64))
    rng = np.random.default_rng(0)
    prompts = [int_array(rng.integers(0, lm.vocabulary, 4)) for _ in range(count)]

    async def sample() -> list[Datum]:
        params = [SamplingParams(max_tokens=tokens, seed=seed, stop_tokens=()) for seed in range(count)]
        asked = [SampleRequest(prompt=prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]
        done = await asyncio.gather(*(engine.sample(each) for each in asked))
        made = []
        for prompt, completion in zip(prompts, done, strict=True):
            text = int_array([*prompt, *completion.tokens])
            weights = float_array([0.0] * (len(prompt) - 1) + [1.0] * len(completion.tokens))
            made.append(Datum(inputs=text[:-1], targets=text[1:], arrays={"weights": weights}))
        return made

    texts = asyncio.run(sample())
    engine.close()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            save_random(folder, options.width)
        measure(options.model or folder, torch.device(options.device), options.texts, options.tokens)


def measure(path: str, device: torch.device, num_texts: int, num_tokens: int) -> None:
    texts = own_texts(load_model(path), num_texts, num_tokens)
    scored = np.concatenate([datum.arrays["weights"] for datum in texts]) != 0
    sizes: dict[str, int] = {}
    logprobs: dict[str, FloatArray] = {}
    measured = kinds(device)
    for kind in measured:
        load = partial(load_model, device=device.type, dtype=kind.dtype, quantization=kind.quantization)
        references = ReferenceModels(load)
        logprobs[kind.name] = np.concatenate(references.score(path, texts))[scored]
        sizes[kind.name] = references.size_bytes
    found = {}
    for kind in measured[1:]:
        difference = logprobs[kind.name].astype(np.float64) - logprobs["float32"]
        found[kind.name] = {
            "mib": round(sizes[kind.name] / 2**20, 1),
            "mean_error": round(float(np.abs(difference).mean()), 5),
            "max_error": round(float(np.abs(difference).max()), 4),
            "k3": float(f"{(np.exp(difference) - 1 - difference).mean():.3g}"),
            "saved": round(1 - sizes[kind.name] / sizes["bfloat16"], 3),
            "bf16_mean_error": round(float(np.abs(logprobs[kind.name] - logprobs["bfloat16"]).mean()), 5),
        }
        print(kind.name, found[kind.name])
    ratio = sizes["int8 over bfloat16, plain"] / sizes["bfloat16"]
    auto = {
        f"int{bits} over {name}": choose_quantizer(Quantization(bits=bits), device=device, dtype=dtype)  # type: ignore[arg-type]
        for name, dtype in DTYPES.items()
        for bits in (8, 4)
    }
    told = {"ratio": round(ratio, 3), "device": device.type, "float32_mib": round(sizes["float32"] / 2**20, 1)}
    print(json.dumps({**told, "auto": auto, **found}))


if __name__ == "__main__":
    main()
