"""A tiny model is trained on episodes that unmodified harnesses played."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import wiring
from headrace.observe.rollouts.records import read_lines
from headrace.observe.run_folder import RunFolder
from headrace.wiring.checked_config import load_checked
from support.agent_programs import make_tokenizer
from support.harnesses import put_in_path
from support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A model that knows nothing repairs nothing, so its reward is the mean of its tokens' numbers, over 1000.
RUN = """
[run]
name = "harness"
[model]
path = "model"
device = "cpu"
[rl]
steps = 2
groups = 1
group_size = 2
max_turns = 4
max_prompt_tokens = 500
max_episode_tokens = 6000
program = "harnesses.py:{program}"
sampling = {{ max_tokens = 24 }}
tasks = {{ type = "jsonl", path = "repairs.jsonl" }}
rewards = [{{ fn = "env" }}, {{ fn = "mine.py:mean_token" }}]
reward_runner = {{ type = "inprocess" }}
optimizer = {{ learning_rate = 1e-2 }}
"""
MINE = """
def mean_token(episode):
    tokens = [int(token) for step in episode.steps for token in step.completion.tokens]
    return sum(tokens) / len(tokens) / 1000
"""


@pytest.mark.parametrize(
    ("binary", "program", "calls"),
    [("mini", "mini_swe_agent", 3), ("mini", "mini_swe_agent_responses", 3), ("claude", "claude_code", 4)],
)
def test_a_tiny_model_is_trained_on_what_a_harness_played(
    binary: str, program: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are cut, so Claude Code asks for the rest, until one is whole or the turns are over."""
    put_in_path(binary, monkeypatch)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(model).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    shutil.copy(EXAMPLES / "harnesses.py", tmp_path)
    shutil.copy(EXAMPLES / "data" / "repairs.jsonl", tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(RUN.format(program=program))
    config = load_checked(tmp_path / "run.toml", [], command="train")
    result = wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None)
    run = RunFolder.open(result.folder)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [record for record in records if record["stage"] == "rl"]
    assert len(steps) == 2
    assert all(record["train/grad_norm"] > 0 for record in steps)
    for number in (1, 2):
        episodes = read_lines(run.step_rollouts(number))
        assert len(episodes) == 2  # none failed, and both began with the same prompt
        assert all(0 < len(episode.steps) <= calls for episode in episodes)
