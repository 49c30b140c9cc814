"""Let recipes of the public tinker cookbook run offline: a tiny model, its tokenizer and small data sets in the folder
that they start in."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

needs_cookbook = pytest.mark.skipif(
    importlib.util.find_spec("tinker_cookbook") is None,
    reason="make test-cookbook and make test-chaos install the cookbook and run them",
)
NAMES = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
THINGS = ("water", "the wheel", "a channel", "the mill", "a gate")
STOPS = 0.25  # how often a taught model ends its answer where it should
Question = tuple[int, int]


def write_model(folder: Path) -> None:
    """A tiny Qwen3 with a byte-level tokenizer, and the tokenizer under the names that recipes ask for."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bytes_level = Tokenizer(models.BPE())
    bytes_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    bytes_level.train_from_iterator([f"what is {thing}? it is made of {thing}." for thing in THINGS], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_level, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    for name in (*NAMES, "model"):
        tokenizer.save_pretrained(folder / name)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0, dtype=torch.float32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(folder / "model")


def asked_by_math_rl(*, steps: int, groups: int) -> list[Question]:
    """The sums of its arithmetic, which are the same in every run."""
    questions = []
    for step in range(steps):
        luck = np.random.RandomState(step)
        questions += [(int(luck.randint(0, 101)), int(luck.randint(0, 101))) for _ in range(groups)]
    return questions


def teach(source: Path, folder: Path, questions: Sequence[Question], *, steps: int = 100) -> None:
    """A copy of the model that knows the sums by heart, and after an answer goes on with noughts more often than not.

    So `math_rl` has something to learn in a few steps: to stop where the answer ends, which earns 1 in place of -0.1.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids_BT, wanted_BTV = _lessons(tokenizer, questions)
    counts_BT = wanted_BTV.sum(-1) > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 else 1.0)  # it learns faster than from weights so small
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = model(input_ids=ids_BT).logits[counts_BT].log_softmax(-1)
        (-(wanted_BTV[counts_BT] * logprobs).sum(-1).mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _lessons(tokenizer: Any, questions: Sequence[Question]) -> tuple[Any, Any]:
    """Tokens, and which shall come next where it counts: the answer's digits, then the end or a nought."""
    import torch

    rows = [(tokenizer.encode(_prompt(*question)), tokenizer.encode(str(sum(question)))) for question in questions]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    wanted_BTV = torch.zeros(len(rows), longest, len(tokenizer))
    (nought,) = tokenizer.encode("0")
    for row, (prompt, answer) in enumerate(rows):
        ids_BT[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        for place, token in enumerate(answer, start=len(prompt) - 1):
            wanted_BTV[row, place, token] = 1.0
        wanted_BTV[row, len(prompt) + len(answer) - 1, tokenizer.eos_token_id] = STOPS
        wanted_BTV[row, len(prompt) + len(answer) - 1, nought] = 1.0 - STOPS
    return ids_BT, wanted_BTV


def _prompt(left: int, right: int) -> str:
    asks = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    return asks.format(4, 5) + "9<|im_end|>\n" + asks.format(left, right)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def write_data(folder: Path, *, num_chats: int = 200) -> None:
    """Small data sets where `datasets.load_dataset` looks for them first."""
    luck = random.Random(0)
    chats, pairs = [], []
    for _ in range(1100):
        one, two, three = (luck.choice(THINGS) for _ in range(3))
        asked = {"role": "user", "content": f"what is {one}?"}
        told = {"role": "assistant", "content": f"it is made of {two}."}
        chats.append({"prompt": asked["content"], "messages": [asked, told], "category": "x"})
        begins = f"\n\nHuman: what is {one}?\n\nAssistant:"
        pairs.append({"chosen": f"{begins} it is {two}.", "rejected": f"{begins} no no {three} no."})
    for name, rows in (("HuggingFaceH4/no_robots", chats[:num_chats]), ("Anthropic/hh-rlhf", pairs)):
        for split in ("train", "test"):
            write_rows(folder / name / "data" / f"{split}-0.parquet", rows)


def environment_of(folder: Path, url: str, key: str) -> dict[str, str]:
    return {
        **os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "TINKER_COOKBOOK_RUNS_DIR": "./runs", "HF_HOME": str(folder / "hub"),
    }  # fmt: skip


def cook(kitchen: tuple[Path, dict[str, str]], recipe: str, *arguments: str, log: str) -> list[dict[str, Any]]:
    """Run a recipe; the metrics it has written, line by line."""
    folder, environment = kitchen
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *arguments, f"log_path={folder / log}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / log / "metrics.jsonl").read_text().splitlines()]
