"""A run that trains in a world with tools: shown by the template, called in sampled text, trained, saved, resumed."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import wiring
from headrace.data.conversations import ToolConversation, load_conversations
from headrace.data.rows import DataSource
from headrace.observe.rollouts.records import read_lines
from headrace.observe.run_folder import RunFolder
from headrace.wiring.checked_config import load_checked, model_override
from support.agent_programs import make_tokenizer

RUN = """
[run]
name = "tools"
[model]
path = "model"
device = "cpu"
[sft]
steps = 3
batch_size = 4
max_tokens = 1200
optimizer = { learning_rate = 1e-3 }
sources = [{ type = "env", name = "calculator", size = 4, options = { operations = 1, tools = true } }]
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 2
end_tool = "give_up"
end_pattern = "ZZZ"
max_prompt_tokens = 900
max_episode_tokens = 1200
sampling = { max_tokens = 16 }
truncated_reward = "keep"
tasks = { type = "env", name = "calculator", size = 4, options = { operations = 1, tools = true } }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A byte-level model whose chat template shows tools."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def test_a_run_teaches_and_trains_with_tools(folder: Path) -> None:
    config = load_checked(folder / "run.toml", [], command="train")
    result = wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    run = RunFolder.open(result.folder)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rl = [record for record in records if record["stage"] == "rl"]
    assert len(rl) == 2
    ended = {name: value for name, value in rl[-1].items() if name.startswith("rollout/ended_")}
    assert sum(ended.values()) == pytest.approx(1.0)
    assert ended["rollout/ended_max_turns"] > 0  # a model that knows nothing never answers
    lines = read_lines(run.step_rollouts(1))
    assert len(lines) == 4
    assert all(step.num_prompt > 300 for line in lines for step in line.steps)  # the tools are in the prompt
    assert {line.ended for line in lines} <= {"max_turns", "done", "end_tool", "end_pattern", "max_tokens"}
    again = wiring.train(config, config_text_path=folder / "run.toml", resume=run.path)
    assert again.folder == run.path


def test_a_model_here_demonstrates_what_sft_reads_with_its_tools(folder: Path) -> None:
    config = load_checked(folder / "run.toml", [model_override("model")], command="demonstrate")
    done = wiring.demonstrate(config, folder / "demos.jsonl", tasks=2, samples=1, keep_all=True)
    assert (done.written, done.played) == (2, 2)
    talks = load_conversations(DataSource(type="jsonl", path=str(folder / "demos.jsonl")))
    for talk in talks:
        assert isinstance(talk, ToolConversation)
        assert [tool["function"]["name"] for tool in talk.tools] == ["calculate", "answer"]
        assert talk.messages[-1].role == "assistant"
