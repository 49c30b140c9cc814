"""Unmodified recipes of the public tinker cookbook against `headrace serve` of a tiny model, offline.

The cookbook pins an older transformers than headrace needs, so `make test-cookbook` puts it beside the environment.
"""

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.service.access import HashedKey, hash_key
from headrace.service.server import serving
from headrace.service.settings import Listen, ServeConfig, ServedModel
from headrace.wiring.serve import open_service
from service.killing import KEY as CHAOS_KEY
from service.killing import PLACES, SIGKILL, Parent, Point, Servers, ask_on, audit
from service.sdk import tinker
from service.served import KEY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("tinker_cookbook") is None,
        reason="make test-cookbook installs the cookbook and runs them",
    ),
]
NAMES = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
THINGS = ("water", "the wheel", "a channel", "the mill", "a gate")


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


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def write_data(folder: Path) -> None:
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
    for name, rows in (("HuggingFaceH4/no_robots", chats[:200]), ("Anthropic/hh-rlhf", pairs)):
        for split in ("train", "test"):
            write_rows(folder / name / "data" / f"{split}-0.parquet", rows)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder that recipes start in, and their environment."""
    folder = tmp_path_factory.mktemp("kitchen")
    write_model(folder)
    write_data(folder)
    config = replace(
        ServeConfig(),
        serve=Listen(folder=str(folder / "served")),
        model=ServedModel(path=str(folder / "model"), name="tiny", aliases=NAMES),
        keys=(HashedKey(owner="cook", sha256=hash_key(KEY)),),
    )
    with open_service(config) as opened, serving(opened.app) as url:
        yield folder, environment_of(folder, url, KEY)


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


def test_sl_loop_falls_and_resumes_exactly(kitchen: tuple[Path, dict[str, str]]) -> None:
    arguments = (f"model_name={NAMES[1]}", "batch_size=16", "max_steps=6", "save_every=3", "learning_rate=0.003")
    first = [row["train_mean_nll"] for row in cook(kitchen, "sl_loop", *arguments, log="sl")]
    assert len(first) == 6
    assert first == sorted(first, reverse=True)
    checkpoints = kitchen[0] / "sl" / "checkpoints.jsonl"
    checkpoints.write_text("".join(checkpoints.read_text().splitlines(keepends=True)[:-1]))
    again = [row["train_mean_nll"] for row in cook(kitchen, "sl_loop", *arguments, log="sl")]
    assert again == [*first, *first[3:]]


@pytest.mark.parametrize(
    "how", [("loss_fn=ppo", "num_substeps=2", "compute_post_kl=True"), ("loss_fn=cispo", "max_steps_off_policy=2")]
)
def test_math_rl_samples_with_the_trainers_logprobs(kitchen: tuple[Path, dict[str, str]], how: tuple[str, ...]) -> None:
    arguments = (
        "env=arithmetic", f"model_name={NAMES[0]}", "group_size=4", "groups_per_batch=6", "max_tokens=4",
        "max_steps=2", "behavior_if_log_dir_exists=delete",
    )  # fmt: skip
    rows = cook(kitchen, "math_rl.train", *arguments, *how, log=how[0])
    assert [abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows] == [True] * 2
    assert [row["env/all/total_episodes"] for row in rows] == [24, 24]


def test_guess_number_plays_its_turns(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "multiplayer_rl.guess_number.train", f"model_name={NAMES[0]}", "max_tokens=6", "max_steps=2",
        "renderer_name=qwen3_disable_thinking", "batch_size=4", "group_size=4", "eval_every=0",
        "behavior_if_log_dir_exists=delete", log="guess",
    )  # fmt: skip
    assert len(rows) == 2
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows)
    assert all(row["env/all/turns_per_episode"] > 1 for row in rows)


def test_dpo_starts_at_ln_2_and_falls(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "preference.dpo.train", "dataset=hhh", f"model_name={NAMES[1]}", "batch_size=8", "max_length=128",
        "max_steps=3", "learning_rate=0.01", "behavior_if_log_dir_exists=delete", log="dpo",
    )  # fmt: skip
    losses = [row["dpo_loss"] for row in rows]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert "surrogate_loss:sum" in rows[0]


def test_chat_sl_evaluates_and_keeps_rolling_checkpoints(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "chat_sl.train", "dataset=no_robots", f"model_name={NAMES[1]}", "batch_size=16", "max_length=256",
        "max_steps=5", "learning_rate=0.003", "eval_every=3", "save_every=2", "rolling_save_every=1",
        "behavior_if_log_dir_exists=delete", log="chat",
    )  # fmt: skip
    losses = [row["train_mean_nll"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    tested = [row["test/nll"] for row in rows if "test/nll" in row]
    assert tested[-1] < tested[0]


# --- killed twenty times ---------------------------------------------------------------------------------------------

SL = (f"model_name={NAMES[1]}", "batch_size=8", "max_steps=12", "save_every=4", "learning_rate=0.003")
RL = (
    "env=arithmetic", f"model_name={NAMES[0]}", "group_size=4", "groups_per_batch=4", "max_tokens=4", "max_steps=6",
    "behavior_if_log_dir_exists=delete",
)  # fmt: skip
ASKED_TO_END: Point = ("headrace.service.evaluation:Evaluator.evaluate", 1)  # no recipe asks for it


SEEDED = """
import functools, tinker
make = tinker.ServiceClient.create_lora_training_client
tinker.ServiceClient.create_lora_training_client = functools.partialmethod(make, seed=7)
"""  # recipes ask for no seed, and then every model has its own


def both(kitchen: tuple[Path, dict[str, str]], name: str) -> tuple[list[float], list[dict[str, Any]]]:
    """`sl_loop` and `math_rl` at once: losses of every step of the one, metrics of the other."""
    folder, environment = kitchen
    (folder / "seeded").mkdir(exist_ok=True)
    (folder / "seeded" / "sitecustomize.py").write_text(SEEDED)
    path = f"{folder / 'seeded'}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    with ThreadPoolExecutor() as threads:
        seeded = (folder, {**environment, "PYTHONPATH": path})
        supervised = threads.submit(cook, seeded, "sl_loop", *SL, log=f"sl-{name}")
        reinforced = threads.submit(cook, kitchen, "math_rl.train", *RL, log=f"rl-{name}")
    return [row["train_mean_nll"] for row in supervised.result()], reinforced.result()


@pytest.mark.timeout(3000)
def test_recipes_go_on_as_their_server_is_killed_twenty_times(kitchen: tuple[Path, dict[str, str]]) -> None:
    calm, _ = both(kitchen, "calm")
    assert len(calm) == 12
    assert calm == sorted(calm, reverse=True)
    folder = kitchen[0]
    luck = random.Random(2)
    points = [(luck.choice(PLACES), luck.randint(1, 12)) for _ in range(20)]
    more = f'[model]\npath = "{folder / "model"}"\nname = "tiny"\naliases = {json.dumps(NAMES)}\n'
    (folder / "killed").mkdir()
    with contextlib.closing(Parent()) as parent:
        servers = Servers(parent, folder / "killed", points, last=ASKED_TO_END, more=more)
        url = f"http://127.0.0.1:{servers.port}"
        losses, rows = both((folder, environment_of(folder, url, CHAOS_KEY)), "killed")
        client = tinker.ServiceClient(base_url=url, api_key=CHAOS_KEY)
        model = client.create_lora_training_client(base_model=NAMES[0], rank=4)
        ask_on(model, lambda: len(servers.exits) < len(points))
        with contextlib.suppress(httpx.RequestError):
            httpx.post(
                f"{url}/runs/{model._guaranteed_model_id()}/evaluate",
                json={"prompts": [{"tokens": [9]}]},
                headers={"X-API-Key": CHAOS_KEY},
            )
        servers.join()
    assert servers.exits == [-SIGKILL] * 21
    audit(folder / "killed" / "data" / "journal.sqlite", models=3)
    assert losses == pytest.approx(calm, rel=1e-6)
    assert [row["env/all/total_episodes"] for row in rows] == [16] * 6
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows)
