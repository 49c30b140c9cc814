"""A PEFT adapter folder is a model: trained further or merged, sampled and scored; ours are loaded by the real peft."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace import wiring
from headrace.errors import ConfigError
from headrace.model.load import load_model
from headrace.model.tiny import save_tiny
from headrace.observe.sinks.jsonl import read_metrics, reproducible_bytes
from headrace.wiring.checked_config import load_checked

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "base"
lora = { rank = 2, alpha = 4.0, targets = ["q_proj", "v_proj"] }
[checkpoint]
every = 2
keep_last = 9
"""
SFT = """
[sft]
steps = 3
batch_size = 4
max_tokens = 32
sources = [{ type = "env", name = "add", size = 8, options = { max_number = 9 } }]
optimizer = { learning_rate = 1e-2 }
"""
RL = """
[rl]
steps = 3
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "env", name = "add", size = 8, options = { max_number = 9 } }
rewards = [{ fn = "mine.py:score" }]
reward_runner = { type = "inprocess" }
loss = "ppo + reference_kl_k3"
loss_params = { kl_coef = 0.1 }
sampling = { max_tokens = 4 }
optimizer = { learning_rate = 1e-2 }
"""
MINE = "def score(episode):\n    return sum(int(t) for t in episode.steps[0].completion.tokens) % 7 / 7\n"


class Bench:
    """A folder with a base model and an SFT run that trained an adapter on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(MINE)
        save_tiny(folder / "base", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
        self.checkpoint = self.train(SFT) / "checkpoints" / "sft" / "step_000003"

    def train(self, stages: str, *overrides: str, resume: Path | None = None) -> Path:
        file = self.folder / "run.toml"
        file.write_text(CONFIG + stages)
        config = load_checked(file, [f'run.folder="{self.folder / "runs"}"', *overrides], command="train")
        return wiring.train(config, config_text_path=file, resume=resume).folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("adapters"))


def logits(model: object) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 11)[None]).logits[0].float().numpy()  # type: ignore[no-any-return,operator]


def adapter_config(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "adapter" / "adapter_config.json").read_text()))


def test_the_real_peft_loads_our_adapters_on_the_base_that_they_name(bench: Bench) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    assert adapter_config(bench.checkpoint)["base_model_name_or_path"] == str(bench.folder / "base")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(bench.checkpoint / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(bench.checkpoint)
    assert logits(theirs) == pytest.approx(logits(merged), abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(bench.folder / "base")
    assert np.abs(logits(theirs) - logits(base)).max() > 1e-3


def test_an_adapter_folder_loads_merged_into_its_base(bench: Bench) -> None:
    merged, adapted = load_model(bench.checkpoint), load_model(bench.checkpoint / "adapter")
    ours, theirs = merged.model.state_dict(), adapted.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)
    assert adapted.tokenizer.get_vocab() == merged.tokenizer.get_vocab()


@pytest.mark.parametrize("part", ["", "adapter"])
def test_rl_continues_an_adapter_of_the_same_shape(bench: Bench, part: str, caplog: pytest.LogCaptureFixture) -> None:
    path = bench.checkpoint / part
    with caplog.at_level(logging.INFO):
        run = bench.train(RL, f"model.path={path}")
    assert f"the adapter in {bench.checkpoint / 'adapter'}, of rank 2, is continued on its base" in caplog.text
    first = run / "checkpoints" / "rl" / "step_000002"
    assert adapter_config(first)["base_model_name_or_path"] == str(bench.folder / "base")
    before = load_file(bench.checkpoint / "adapter" / "adapter_model.safetensors")
    after = load_file(first / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 0.05, "it goes on from there"
    divergence = [record.values["loss/kl_reference_k3"] for record in read_metrics(run / "metrics.jsonl")]
    assert divergence[0] < 1e-8 < divergence[-1], "the reference is the adapted model that the stage started from"
    cut = run.with_name(f"{run.name}_cut")
    shutil.copytree(run, cut)
    shutil.rmtree(cut / "checkpoints" / "rl" / "step_000003")
    (cut / "checkpoints" / "rl" / "latest").write_text("step_000002\n")
    bench.train(RL, f"model.path={path}", resume=cut)
    assert reproducible_bytes(cut / "metrics.jsonl") == reproducible_bytes(run / "metrics.jsonl")


def test_an_adapter_of_another_shape_is_merged_and_a_new_one_trained(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    path, rank = f"model.path={bench.checkpoint / 'adapter'}", "model.lora.rank=3"
    with caplog.at_level(logging.INFO):
        run = bench.train(RL, path, rank)
    assert "is merged into its base, and a new one is trained: 'model.lora.rank' is 3, and the adapter's is 2" in (
        caplog.text
    )
    checkpoint = run / "checkpoints" / "rl" / "step_000003"
    assert adapter_config(checkpoint)["base_model_name_or_path"] == str(run / "start")
    assert adapter_config(checkpoint)["r"] == 3
    merged = load_model(bench.checkpoint).model.state_dict()
    for name, tensor in load_model(run / "start").model.state_dict().items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)
    bench.train(RL, path, rank, resume=run)  # finished already


def test_without_lora_all_weights_of_the_merged_model_are_trained(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    everything = CONFIG.replace("lora = { rank", "# lora = { rank")
    file = bench.folder / "full.toml"
    file.write_text(everything + SFT)
    overrides = [f'run.folder="{bench.folder / "runs"}"', f"model.path={bench.checkpoint / 'adapter'}"]
    with caplog.at_level(logging.INFO):
        config = load_checked(file, overrides, command="train")
        run = wiring.train(config, config_text_path=file, resume=None).folder
    assert "is merged into its base" in caplog.text
    assert "there is no table [model.lora]" in caplog.text
    assert not (run / "checkpoints" / "sft" / "step_000003" / "adapter").exists()


def broken(bench: Bench, name: str, **changes: object) -> Path:
    folder = bench.folder / name
    shutil.copytree(bench.checkpoint / "adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "gone",
            {"base_model_name_or_path": "/nowhere/model"},
            "is for the base model /nowhere/model, which is no",
        ),
        ("dora", {"use_dora": True}, r"uses use_dora, which is not known here: merge it with peft"),
        ("ia3", {"peft_type": "IA3"}, "an adapter of the kind IA3: only LORA is known here"),
        ("nameless", {"base_model_name_or_path": None}, "names no base model"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_told_before_anything_is_loaded(
    bench: Bench, name: str, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bench.train(RL, f"model.path={broken(bench, name, **changes)}")


def test_an_adapter_plays_in_an_evaluation(bench: Bench) -> None:
    source = 'eval.source={type="env", name="add", size=4, options={max_number=9}}'
    file = bench.folder / "run.toml"
    file.write_text(CONFIG + RL)
    of_adapter, of_merged = (
        load_checked(file, [source, f"model.path={path}"], command="eval")
        for path in (bench.checkpoint / "adapter", bench.checkpoint)
    )
    assert wiring.evaluate(of_adapter) == wiring.evaluate(of_merged)
