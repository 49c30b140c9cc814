"""One RL step with pictures on one GPU: its parts, the speed of the vision tower, and TRL's GRPOTrainer beside it.

    PYTHONPATH=.gpu_site:. python bench/gpu/vision.py [--trl-steps 3] [--steps 4] [--profile]
    python bench/gpu/vision.py --ours          # without TRL
    python bench/gpu/vision.py --tiny          # a small model on the CPU, to try the bench

A model of the shape of Qwen3-VL-2B-Instruct with random weights in bfloat16 and a frozen tower, LoRA of rank 16 on the
text half: 16 prompts x 4 samples, each prompt a new picture of 448 x 448 (196 tokens) and 64 of text, 256 sampled
tokens, GRPO's advantages, clipped surrogate averaged over tokens, AdamW. TRL has the same model, adapter and sizes,
micro-batches of 16 sequences, `generate` with its dynamic cache and no activation recomputation; nothing prepares
pictures on either side.

The tower is measured on 64 pictures that differ: its operations are products and attention, and the seconds are those
with and without the upload of the pixels. Sampler and trainer are compared by their log-probs. The last line is JSON.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora
from headrace.model.vision.tower import encode_images
from headrace.pictures import ModelImage, PlacedImage
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    LossSpec,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)

LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA, RATE = 16, 32.0, 1e-5
PATCH, MERGE = 16, 2
TRL_MICRO_BATCH = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    prompts: int = 16
    samples: int = 4
    side: int = 448  # pixels
    text: int = 64
    sampled: int = 256
    vocabulary: int = 151_936
    tiny: bool = False

    @property
    def patches(self) -> int:
        return (self.side // PATCH) ** 2

    @property
    def image_tokens(self) -> int:
        return self.patches // MERGE**2

    @property
    def prompt(self) -> int:
        return self.text + self.image_tokens

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def marks(self) -> dict[str, int]:
        """The last tokens of the vocabulary that random texts do not have."""
        names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        return {name: self.vocabulary - 1 - index for index, name in enumerate(names)}

    @property
    def image_token(self) -> int:
        return self.marks["<|image_pad|>"]


TINY = Sizes(prompts=2, samples=2, side=64, text=8, sampled=6, vocabulary=300, tiny=True)


def config_of(sizes: Sizes) -> Qwen3VLConfig:
    text: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": 64 if sizes.tiny else 2048,
        "intermediate_size": 128 if sizes.tiny else 6144,
        "num_hidden_layers": 3 if sizes.tiny else 28,
        "num_attention_heads": 4 if sizes.tiny else 16,
        "num_key_value_heads": 2 if sizes.tiny else 8,
        "head_dim": 16 if sizes.tiny else 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [4, 2, 2] if sizes.tiny else [24, 20, 20],
            "mrope_interleaved": True,
        },
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    tower: dict[str, Any] = {
        "depth": 3 if sizes.tiny else 24,
        "hidden_size": 32 if sizes.tiny else 1024,
        "intermediate_size": 64 if sizes.tiny else 4096,
        "num_heads": 2 if sizes.tiny else 16,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64 if sizes.tiny else 2304,
        "deepstack_visual_indexes": [0, 1, 2] if sizes.tiny else [5, 11, 17],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=sizes.image_token,
        video_token_id=sizes.marks["<|video_pad|>"],
        vision_start_token_id=sizes.marks["<|vision_start|>"],
        vision_end_token_id=sizes.marks["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_model(sizes: Sizes) -> Qwen3VLForConditionalGeneration:
    """The same weights at every call, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if sizes.tiny else torch.bfloat16)
    try:
        with torch.device(sizes.device):
            return Qwen3VLForConditionalGeneration._from_config(config_of(sizes), attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def make_tokenizer(sizes: Sizes) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, sizes.vocabulary - len(sizes.marks))}
    level = Tokenizer(models.WordLevel(words | sizes.marks, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="<eos>")


def images_of(sizes: Sizes, count: int) -> list[ModelImage]:
    """Random pixels, as the processor of Qwen3-VL lays them out: a row for each patch."""
    side = sizes.side // PATCH
    rng = np.random.default_rng(3)
    return [
        ModelImage(
            digest=f"random {index}",
            pixels=rng.standard_normal((sizes.patches, 3 * 2 * PATCH**2), dtype=np.float32),
            grid=(1, side, side),
            num_tokens=sizes.image_tokens,
        )
        for index in range(count)
    ]


def texts_of(sizes: Sizes) -> list[list[int]]:
    high = sizes.vocabulary - len(sizes.marks)
    return np.random.default_rng(1).integers(2, high, (sizes.prompts, sizes.text)).tolist()  # type: ignore[no-any-return]


def evenness(ids: Sequence[int]) -> float:
    """A reward that differs between samples: the share of even token ids."""
    return sum(index % 2 == 0 for index in ids) / max(len(ids), 1)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    for _ in range(2):
        run()
    return statistics.median(seconds(run) for _ in range(repeats))


# --- ours ----------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        lm = prepare(make_model(sizes), make_tokenizer(sizes), source="bench", vision="frozen")
        if not sizes.tiny:
            from headrace.model.cuda.layers import fuse_layers  # needs Triton

            fuse_layers(lm.model)
        add_lora(lm.model, rank=RANK, alpha=ALPHA, targets=LORA, seed=0)
        self.lm: LanguageModel = lm
        self.worker = ComputeThread()
        self.rows = sizes.prompts * sizes.samples
        self.backend = TorchBackend(lm, micro_batch_tokens=16_384, worker=self.worker)
        room = -(-(sizes.prompt + sizes.sampled + 1) // 64) * 64
        kv_tokens = max(self.rows, 16) * room
        decoder = graph_decoder(lm, max_num_seqs=self.rows, kv_tokens=kv_tokens)
        print(f"decoding {'in CUDA graphs' if decoder else 'by the modules'}", flush=True)
        self.engine = EmbeddedEngine(
            lm,
            max_num_seqs=self.rows,
            kv_tokens=kv_tokens,
            prefill_chunk_tokens=sizes.prompt,
            prefill_tokens=4096,
            worker=self.worker,
            decoder=decoder,
        )
        self.images = images_of(sizes, sizes.prompts)
        self.version, self.seed = 0, 0
        self.new_prompts()

    def new_prompts(self) -> None:
        """The same pixels under other names: no features are kept from one step to the next."""
        self.images = [replace(image, digest=f"{image.digest}'") for image in self.images]
        pairs = zip(texts_of(self.sizes), self.images, strict=True)
        self.prompts = [self._placed(text, image) for text, image in pairs]

    def _placed(self, text: list[int], image: ModelImage) -> tuple[Any, tuple[PlacedImage, ...]]:
        tokens = [*text[:4], *[self.sizes.image_token] * image.num_tokens, *text[4:]]
        at = np.arange(4, 4 + image.num_tokens, dtype=np.int32)
        return int_array(tokens), (PlacedImage(image=image, at=at),)

    async def sample(self, max_tokens: int) -> list[list[Completion]]:
        async def group(tokens: Any, images: tuple[PlacedImage, ...]) -> list[Completion]:
            self.seed += self.sizes.samples
            params = [
                SamplingParams(max_tokens=max_tokens, seed=self.seed + index, stop_tokens=())
                for index in range(self.sizes.samples)
            ]
            requests = [SampleRequest(prompt=tokens, images=images, params=one) for one in params]
            return list(await asyncio.gather(*(self.engine.sample(request) for request in requests)))

        return list(await asyncio.gather(*(group(*prompt) for prompt in self.prompts)))

    def data(self, groups: Sequence[Sequence[Completion]]) -> list[Datum]:
        total = sum(len(one.tokens) for group in groups for one in group)
        data = []
        for (tokens, images), group in zip(self.prompts, groups, strict=True):
            rewards = np.array([evenness(one.tokens.tolist()) for one in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for one, advantage in zip(group, advantages, strict=True):
                whole = np.concatenate([tokens, one.tokens])
                sampled = np.arange(1, len(whole)) >= len(tokens)
                logprobs = np.zeros(len(sampled))
                logprobs[sampled] = one.sampler_logprobs
                arrays = {"weights": sampled / total, "advantages": sampled * advantage, "sampler_logprobs": logprobs}
                data.append(
                    Datum(
                        inputs=int_array(whole[:-1]),
                        targets=int_array(whole[1:]),
                        arrays={name: float_array(values) for name, values in arrays.items()},
                        images=images,
                    )
                )
        return data

    async def step(self) -> dict[str, float]:
        """One RL step; seconds of its parts, and the mean difference of sampler's and trainer's log-probs."""
        self.new_prompts()
        began = time.perf_counter()
        groups = await self.sample(self.sizes.sampled)
        sampled = time.perf_counter()
        data = self.data(groups)
        out = await asyncio.wrap_future(self.backend.forward_backward(data, LossSpec(fn="ppo")))
        await asyncio.wrap_future(self.backend.optim_step(Adam(learning_rate=RATE, clip_norm=1.0)))
        synchronize()
        trained = time.perf_counter()
        handle = await asyncio.wrap_future(self.backend.export_weights())
        await self.engine.pause(interrupt=True)
        self.version += 1
        await self.engine.load(handle, self.version)
        await self.engine.resume()
        synchronize()
        ended = time.perf_counter()
        flat = [one for group in groups for one in group]
        differences = [
            np.abs(values[-len(one.tokens) :] - one.sampler_logprobs)
            for values, one in zip(out.logprobs, flat, strict=True)
        ]
        return {
            "sampling_s": sampled - began,
            "training_s": trained - sampled,
            "publishing_s": ended - trained,
            "step_s": ended - began,
            "mismatch": float(np.concatenate(differences).mean()),
        }

    def tower(self) -> dict[str, float]:
        """Seconds and TFLOP/s of the tower on 64 pictures: from host arrays, and computation alone."""
        images = images_of(self.sizes, self.rows)
        vision, text = self.lm.model.config.vision_config, self.lm.model.config.text_config
        width, inner = vision.hidden_size, vision.intermediate_size
        patches, merged = self.sizes.patches, self.sizes.image_tokens
        block = 2 * (4 * width**2 + 2 * width * inner) + 4 * patches * width  # of a patch: products and attention
        wide = width * MERGE**2
        mergers = (1 + len(vision.deepstack_visual_indexes)) * 2 * (wide**2 + wide * text.hidden_size)
        embedding = 2 * width * 3 * 2 * PATCH**2
        operations = len(images) * (patches * (vision.depth * block + embedding) + merged * mergers)
        with torch.no_grad():
            whole = median_seconds(lambda: encode_images(self.lm.model, images))
            pixels = torch.from_numpy(np.concatenate([image.pixels for image in images]))
            pixels = pixels.to(self.lm.device, self.lm.dtype)
            grids = torch.tensor([image.grid for image in images], device=self.lm.device)
            base = self.lm.model.base_model
            alone = median_seconds(lambda: base.get_image_features(pixels, grids, return_dict=True))
        return {
            "tower_s": whole,
            "tower_tflops": operations / whole / 1e12,
            "tower_without_upload_s": alone,
            "tower_without_upload_tflops": operations / alone / 1e12,
        }

    def parts(self) -> dict[str, float]:
        """Seconds of the tower's pictures of a step, of prefill behind them, and of the forward and backward pass."""
        run = asyncio.Runner()
        with run:

            def prefill() -> float:
                """One token of each sequence, with pictures that are new."""
                self.new_prompts()
                return seconds(lambda: run.run(self.sample(1)))

            prefill_s = statistics.median([prefill() for _ in range(3)])
            with torch.no_grad():
                features_s = median_seconds(lambda: encode_images(self.lm.model, self.images), repeats=3)
            data = self.data(run.run(self.sample(self.sizes.sampled)))  # whose features the trainer computes once
        forward_s = statistics.median(
            [seconds(lambda: self.backend.forward(data, CROSS_ENTROPY).result()) for _ in range(3)]
        )
        return {"step_tower_s": features_s, "prefill_with_tower_s": prefill_s, "forward_s": forward_s}

    def close(self) -> None:
        self.engine.close()
        self.backend.close()
        self.worker.close()


def run_ours(sizes: Sizes, steps: int, *, profile: bool) -> dict[str, float]:
    ours = Ours(sizes)
    gc.collect()
    gc.freeze()  # as `headrace train` does
    rows = []
    with asyncio.Runner() as runner:
        for number in range(steps):
            rows.append(runner.run(ours.step()))
            print(f"ours {number + 1}:", {name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
        if profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                runner.run(ours.step())
            print_profile(seen)
    figures = {f"ours_{name}": statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    if torch.cuda.is_available():
        figures["ours_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    figures |= ours.parts() | ours.tower()
    if profile:
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            encode_images(ours.lm.model, images_of(sizes, ours.rows))
        print_profile(seen)
    ours.close()
    return figures


def print_profile(seen: Any) -> None:
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
    total = sum(row.self_device_time_total for row in seen.key_averages()) / 1e3
    print(f"device time {total:.1f} ms")
    for row in rows:
        print(f"{row.self_device_time_total / 1e3:8.2f} ms {row.count:5d} x  {row.key[:100]}")


# --- TRL -----------------------------------------------------------------------------------------------------------


def make_processor(sizes: Sizes) -> Any:
    """What TRL asks of a processor, for pictures that are numbered instead of decoded.

    transformers' own needs torchvision; here TRL gets the pixels that we have, without the time to prepare them.
    """
    from transformers import ProcessorMixin
    from transformers.feature_extraction_utils import BatchFeature

    images = images_of(sizes, sizes.prompts)

    class ImageProcessor:
        merge_size = MERGE

    class NumberedPictures(ProcessorMixin):  # type: ignore[misc]
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer, self.image_processor, self.chat_template = tokenizer, ImageProcessor(), "numbered"

        def _ids(self, conversation: Any) -> list[int]:
            [message] = conversation
            ids: list[int] = []
            for part in message["content"]:
                if part["type"] == "image":
                    ids += [sizes.image_token] * sizes.image_tokens
                else:
                    ids += self.tokenizer(part["text"])["input_ids"]
            return ids

        def apply_chat_template(self, conversation: Any, tokenize: bool = False, **_: Any) -> Any:
            if not tokenize:
                return json.dumps(
                    [[part["type"], part.get("text", "")] for message in conversation for part in message["content"]]
                )
            ids = [self._ids(one) for one in conversation]
            numbers = [
                picture_number(part["image"]) for one in conversation for part in one[0]["content"] if "image" in part
            ]
            return {"input_ids": ids, **self._fields(ids, numbers)}

        def _fields(self, ids: list[list[int]], numbers: list[int]) -> dict[str, Any]:
            pixels = np.concatenate([images[number].pixels for number in numbers])
            grids = torch.tensor([images[number].grid for number in numbers])
            kinds = [[int(token == sizes.image_token) for token in row] for row in ids]
            return {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": grids, "mm_token_type_ids": kinds}

        def __call__(self, images: Any = None, text: Any = None, **_: Any) -> Any:
            numbers = [picture_number(one) for row in images for one in row]
            ids = []
            for parts in map(json.loads, text):
                content = [{"type": kind, "text": words} for kind, words in parts]
                ids.append(self._ids([{"content": content}]))
            fields = self._fields(ids, numbers)
            fields["mm_token_type_ids"] = torch.tensor(fields["mm_token_type_ids"])  # all prompts are equally long
            return BatchFeature({"input_ids": torch.tensor(ids), **fields})

        def batch_decode(self, *args: Any, **named: Any) -> Any:
            return self.tokenizer.batch_decode(*args, **named)

        def decode(self, *args: Any, **named: Any) -> Any:
            return self.tokenizer.decode(*args, **named)

        def save_pretrained(self, *_: Any, **__: Any) -> list[str]:
            return []

    return NumberedPictures(make_tokenizer(sizes))


def picture(number: int) -> Any:
    """A picture that says its number in the colour of its pixels."""
    from PIL import Image

    return Image.new("RGB", (8, 8), (number % 256, number // 256, 0))


def picture_number(image: Any) -> int:
    red, green, _ = image.getpixel((0, 0))
    return int(red + 256 * green)


def run_trl(sizes: Sizes, steps: int) -> dict[str, float]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[tuple[float, float]] = []
    state = {"generation": 0.0, "began": 0.0}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [evenness(ids) for ids in completion_ids]

    messages = [[{"role": "user", "content": " ".join(f"w{index}" for index in text)}] for text in texts_of(sizes)]
    prompts = {"prompt": messages, "image": [picture(number) for number in range(sizes.prompts)]}
    rows = sizes.prompts * sizes.samples
    micro = min(TRL_MICRO_BATCH, rows)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            bf16=not sizes.tiny,
            use_cpu=sizes.tiny,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=sizes.samples,
            max_completion_length=sizes.sampled,
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            temperature=1.0,
            top_k=0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=make_model(sizes),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict(prompts),
            processing_class=make_processor(sizes),
            peft_config=LoraConfig(
                r=RANK,
                lora_alpha=int(ALPHA),
                target_modules=rf".*language_model.*\.({'|'.join(LORA)})",
                lora_dropout=0.0,
            ),
        )
        generate = trainer._generate

        def timed_generate(*args: Any, **named: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            state["began"] = state["began"] or began
            try:
                return generate(*args, **named)
            finally:
                synchronize()
                state["generation"] += time.perf_counter() - began

        trainer._generate = timed_generate

        class Watch(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                state["began"] = state["began"] or time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                synchronize()
                spent = time.perf_counter() - state["began"]
                times.append((state["generation"], spent - state["generation"]))
                print(f"trl {len(times)}: generation {times[-1][0]:.2f} s, rest {times[-1][1]:.2f} s", flush=True)
                state["generation"], state["began"] = 0.0, time.perf_counter()

        trainer.add_callback(Watch())
        trainer.train()
    figures = {
        "trl_generation_s": statistics.median(row[0] for row in times[1:]),
        "trl_rest_s": statistics.median(row[1] for row in times[1:]),
        "trl_step_s": statistics.median(sum(row) for row in times[1:]),
    }
    if torch.cuda.is_available():
        figures["trl_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="of ours; the first is not counted")
    parser.add_argument("--trl-steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--ours", action="store_true", help="without TRL")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not given.tiny and not torch.cuda.is_available():
        raise SystemExit("this bench needs a GPU, and torch sees no CUDA device; --tiny tries it on the CPU")
    sizes = TINY if given.tiny else Sizes()
    figures = run_ours(sizes, given.steps, profile=given.profile)
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if not given.ours:
        print({name: round(value, 4) for name, value in figures.items()}, flush=True)  # in case that TRL fails
        figures |= run_trl(sizes, given.trl_steps)
        figures["ratio"] = figures["trl_step_s"] / figures["ours_step_s"]
    print(json.dumps({"bench": "gpu_vision", **{name: round(value, 5) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
