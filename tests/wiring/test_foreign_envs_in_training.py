"""Runs that train in worlds others have written: verifiers' environments, OpenEnv's, and a tool server of MCP.

Each is taught by a few demonstrations, so that its episodes really move, call tools and are paid; then trained.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import wiring
from headrace.infer.engine import EmbeddedEngine
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.records import read_lines
from headrace.observe.run_folder import RunFolder
from headrace.train.torch_backend import TorchBackend
from headrace.types import Completion, Datum, ForwardOut, LossSpec, SampleRequest
from headrace.wiring.checked_config import load_checked
from support.agent_programs import make_tokenizer
from support.paths import FOREIGN

pytestmark = pytest.mark.slow

Call = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, what was sampled after it

RUN = """
[run]
folder = "runs"
tensorboard = false
[model]
path = "model"
device = "cpu"
[sft]
steps = {sft_steps}
batch_size = 4
max_tokens = {tokens}
optimizer = {{ learning_rate = {sft_rate}, schedule = {{ type = "cosine", warmup_steps = 5, final = 0.1 }} }}
sources = [{{ type = "jsonl", path = "demos.jsonl" }}]
[rl]
steps = 2
groups = {groups}
group_size = {group_size}
max_turns = 5
max_prompt_tokens = {prompt}
max_episode_tokens = {tokens}
credit = "{credit}"
sampling = {{ max_tokens = {max_tokens} }}
optimizer = {{ learning_rate = 1e-3 }}
tasks = {{ type = "env", name = "{world}", size = {groups}, options = {{ {options} }} }}
"""


class Seen:
    """What the engine was asked and sampled while [rl] ran, and what was trained on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampled: Counter[Call] = Counter()
        self.trained: Counter[Call] = Counter()
        sample, forward_backward = EmbeddedEngine.sample, TorchBackend.forward_backward

        async def spied_sample(engine: EmbeddedEngine, request: SampleRequest) -> Completion:
            done = await sample(engine, request)
            assert request.continue_from is None
            self.sampled[tuple(request.prompt.tolist()), tuple(done.tokens.tolist())] += 1
            return done

        def spied_training(backend: TorchBackend, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
            if loss.fn != "cross_entropy":
                self.trained.update(call for datum in data for call in turns_of(datum))
            return forward_backward(backend, data, loss)

        monkeypatch.setattr(EmbeddedEngine, "sample", spied_sample)
        monkeypatch.setattr(TorchBackend, "forward_backward", spied_training)


def turns_of(datum: Datum) -> list[Call]:
    """Every run of tokens that have a weight, with all that stands before it."""
    tokens = [int(datum.inputs[0]), *datum.targets.tolist()]
    weighed = [False, *(datum.arrays["weights"] != 0).tolist(), False]
    starts = [place for place in range(1, len(weighed)) if weighed[place] and not weighed[place - 1]]
    ends = [next(place for place in range(start, len(weighed)) if not weighed[place]) for start in starts]
    return [(tuple(tokens[:start]), tuple(tokens[start:end])) for start, end in zip(starts, ends, strict=True)]


def train(folder: Path, demos: Sequence[dict[str, Any]], **values: Any) -> tuple[list[dict[str, Any]], RunFolder]:
    (folder / "demos.jsonl").write_text("".join(f"{json.dumps(demo)}\n" for demo in demos))
    (folder / "run.toml").write_text(RUN.format(**values))
    config = load_checked(folder / "run.toml", [], command="train")
    run = RunFolder.open(wiring.train(config, config_text_path=folder / "run.toml", resume=None).folder)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record for record in records if record["stage"] == "rl"], run


def check(rl: Sequence[dict[str, Any]], run: RunFolder, seen: Seen) -> None:
    """Every sampled token was trained on once, after the very tokens the engine had seen, and nothing else was."""
    assert len(rl) == 2
    assert [record["rollout/failed_episodes"] for record in rl] == [0.0, 0.0]
    assert seen.trained == seen.sampled
    saved = [line for step in (1, 2) for line in read_lines(run.step_rollouts(step))]
    assert sum(len(line.steps) for line in saved) == seen.sampled.total()
    assert any(record["reward/mean"] != 0.0 for record in rl), "the world paid for something"
    assert all(line.reward.parts == {"env": line.reward.total} for line in saved)


def chat(*turns: str) -> dict[str, Any]:
    """User and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(turns)]}


def word_model(folder: Path, words: str) -> None:
    shape = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 128}
    save_tiny(folder / "model", words=words.split(), **shape, seed=0)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_game_of_verifiers_is_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="pip install 'verifiers>=0.3,<0.4'")
    word_model(folder, "a number from to higher lower what found 0 1 2 3 4 5 6 7")
    asked = "a number from 0 to 7"
    demos = [chat(asked, "3", "higher", "5", "lower", "4"), chat(asked, "4", "lower", "1"), chat(asked, "2")]
    options = f'env = "{FOREIGN / "games_of_verifiers.py"}:hunt", state = ["low", "high"]'
    seen = Seen(monkeypatch)
    size = {
        "sft_steps": 30,
        "sft_rate": 1e-2,
        "group_size": 4,
        "prompt": 60,
        "tokens": 120,
        "max_tokens": 3,
        "groups": 4,
    }
    rl, run = train(folder, demos, world="verifiers", credit="gigpo", options=options, **size)
    check(rl, run, seen)
    lines = read_lines(run.step_rollouts(1))
    assert any(len(line.steps) > 1 for line in lines)
    found = [line for line in lines if line.reward.total]
    assert all(line.reward.total == 1 / len(line.steps) for line in found), "what its rubric says"
    assert any(step.credit is not None and (step.credit.peers or 0) > 1 for line in lines for step in line.steps)


def test_an_environment_of_openenv_is_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openenv", reason="pip install openenv")
    word_model(folder, "left right -3 -2 -1 0 1 2 3 4 5")
    demos = [chat("0", "right", "1", "right", "2", "left"), chat("0", "left", "-1", "right"), chat("0", "right")]
    line = f'env = "{FOREIGN / "games_of_openenv.py"}:Line", settings = {{ length = 2 }}'
    options = f'{line}, field = "direction", show = "place"'
    seen = Seen(monkeypatch)
    size = {
        "sft_steps": 30,
        "sft_rate": 1e-2,
        "group_size": 4,
        "prompt": 60,
        "tokens": 120,
        "max_tokens": 3,
        "groups": 4,
    }
    rl, run = train(folder, demos, world="openenv", credit="graphgpo", options=options, **size)
    check(rl, run, seen)
    lines = read_lines(run.step_rollouts(1))
    assert {line.verdict for line in lines} >= {True}
    for line in lines:  # 1 at the goal and -0.1 for every other move that it understood
        moves = [step.reward for step in line.steps if step.valid]
        assert moves == [-0.1] * (len(moves) - bool(line.verdict)) + [1.0] * bool(line.verdict)


def test_a_tool_server_is_trained_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools are called in sampled text, its answers are in the next prompts, and its own tool gives the reward: 1
    for the count, which is 0 before a call."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    ).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "questions.jsonl").write_text('{"prompt": "Count."}\n')
    tools = [
        {
            "type": "function",
            "function": {
                "name": "count",
                "description": "Count on.",
                "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
            },
        }
    ]
    called = {"id": "c", "type": "function", "function": {"name": "count", "arguments": '{"by": 1}'}}
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "1"},
    ]
    server = json.dumps([sys.executable, "-S", str(FOREIGN / "plain_server.py")])
    options = f'command = {server}, tasks = "questions.jsonl", reward_tool = "judge", state_tool = "where"'
    seen = Seen(monkeypatch)
    size = {
        "sft_steps": 150,
        "sft_rate": 4e-3,
        "group_size": 8,
        "prompt": 800,
        "tokens": 900,
        "max_tokens": 80,
        "groups": 1,
    }
    counted = {"messages": messages, "tools": tools}
    at_once = {"messages": [messages[0], {"role": "assistant", "content": "0"}], "tools": tools}
    demos = [counted, counted, at_once]
    rl, run = train(folder, demos, world="mcp", credit="gigpo", options=options, **size)
    check(rl, run, seen)
    lines = [line for step in (1, 2) for line in read_lines(run.step_rollouts(step))]
    told = [[message.role for message in line.messages] for line in lines]
    assert ["user", "assistant", "tool", "assistant"] in told
    assert all(line.verdict == (line.reward.total == 1.0) for line in lines)
    for line in lines:  # the server pays for the count it has
        told_back = [message.content for message in line.messages if message.role == "tool"]
        counts = [text for text in told_back if text.lstrip("-").isdigit()]
        said = line.messages[-1].content.strip()
        if line.ended == "done":
            assert line.reward.total == float(said == ["0", *counts][-1])
