"""A small mixture of experts is trained, resumed to the same bytes, and read by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import wiring
from headrace.model.load import load_model
from headrace.model.tiny import make_tokenizer
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.sinks.jsonl import read_metrics
from headrace.wiring.checked_config import load_checked

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "base"
[checkpoint]
every = 2
[rl]
steps = 4
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


def make_folder(folder: Path) -> Path:
    """Save a mixture whose experts matter, with its tokenizer."""
    (folder / "mine.py").write_text(MINE)
    (folder / "run.toml").write_text(CONFIG)
    tokenizer = make_tokenizer(WORDS)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder


def train(folder: Path, *overrides: str, resume: Path | None = None) -> Path:
    file = folder / "run.toml"
    config = load_checked(file, [f'run.folder="{folder / "runs"}"', *overrides], command="train")
    return wiring.train(config, config_text_path=file, resume=resume).folder


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("model.lora={rank=2, alpha=4.0, targets=['q_proj', 'o_proj']}",), marks=pytest.mark.slow),
        pytest.param(
            ("model.lora={rank=2, alpha=4.0, targets=['q_proj', 'experts', 'router']}",), marks=pytest.mark.slow
        ),
    ],
    ids=["full", "lora", "lora on experts"],
)
def test_a_mixture_is_trained_and_resumes_to_the_same_bytes(overrides: tuple[str, ...], tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    whole = train(folder, *overrides)
    stopped = train(folder, *overrides, "rl.steps=2")
    train(folder, *overrides, resume=stopped)
    last = Path("checkpoints", "rl", "step_000004", "model.safetensors")
    assert (whole / last).read_bytes() == (stopped / last).read_bytes()
    before, after = load_model(folder / "base").model, load_model((whole / last).parent).model
    moved = {name for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
             if not torch.equal(old, new)}  # fmt: skip
    router, expert = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.gate_up_proj"
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert ({router, expert} <= moved) == (not overrides or "experts" in overrides[0])
    metrics = [record.values for record in read_metrics(whole / "metrics.jsonl")]
    assert all(values["routing/differs"] == 0.0 for values in metrics)
    assert metrics
    assert all(abs(values["rollout/mismatch_k3"]) < 1e-9 for values in metrics), (
        "sampler and trainer choose the same experts"
    )


@pytest.mark.parametrize("routing", ["replay", "free"])
def test_saved_episodes_keep_the_experts_that_are_replayed(routing: str, tmp_path: Path) -> None:
    run = train(make_folder(tmp_path), f"rl.routing={routing}", "rl.steps=1")
    (file,) = (run / "rollouts").glob("*.jsonl*")
    steps = [step for saved in load_trajectories(file) for step in saved.scored.episode.steps]
    assert steps
    for step in steps:
        experts = step.completion.experts
        if routing == "free":
            assert experts is None
        else:
            assert experts is not None
            assert experts.shape == (len(step.prompt) + len(step.completion.tokens) - 1, 2, 2)
            assert set(experts.flatten().tolist()) <= {0, 1, 2, 3}


def test_an_auxiliary_loss_is_a_metric_and_moves_the_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    runs = [
        train(folder, "rl.steps=1", f"run.name=aux{weight > 0}", f"model.router_aux_loss={weight}")
        for weight in (0.0, 0.5)
    ]
    without, with_it = ([record.values for record in read_metrics(run / "metrics.jsonl")] for run in runs)
    assert "loss/router_aux" not in without[0]
    assert 0.5 < with_it[0]["loss/router_aux"] < 4.0
    last = Path("checkpoints", "rl", "step_000001", "model.safetensors")
    assert (runs[0] / last).read_bytes() != (runs[1] / last).read_bytes()
