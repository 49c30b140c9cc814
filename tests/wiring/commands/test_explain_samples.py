"""`headrace explain` shows the first example, prompt and reward calls, and runs no code of the user for that."""

import doctest
import json
from pathlib import Path

import pytest

from headrace.config import RewardTermConfig
from headrace.model.tiny import save_tiny
from headrace.types import Message, Task
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands import explain_samples
from headrace.wiring.commands.explain_samples import GREEN, PLAIN, reward_call, show_samples

CONFIG = """
[model]
path = "model"
[sft]
steps = 1
max_tokens = 40
[[sft.sources]]
type = "jsonl"
path = "talks.jsonl"
[rl]
steps = 1
max_prompt_tokens = 24
max_episode_tokens = 64
tasks = { type = "jsonl", path = "tasks.jsonl" }
rewards = [{ fn = "mine.py:score" }, { fn = "exact_match", weight = 0.5 }]
[rl.sampling]
max_tokens = 4
"""
NEVER_RUN = "raise SystemExit('this code must not run')\n"
TASK = Task(id="7", messages=(Message(role="user", content="1 + 2 ="),), data={"answer": "3", "level": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = (*"0123456789", "+", "=", "add", "sum")
    save_tiny(tmp_path / "model", words=words, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(NEVER_RUN + "def score(text, truth):\n    return 0.5\n")
    (tmp_path / "talks.jsonl").write_text(json.dumps({"prompt": "add 1 + 2 =", "answer": "3 sum"}) + "\nno JSON\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "sum 4 + 5 =", "answer": "9"}) + "\nno JSON\n")
    return tmp_path


def samples(folder: Path, *overrides: str, color: bool = False) -> str:
    return show_samples(load_checked(folder / "run.toml", list(overrides), command="train"), color=color)


def test_the_first_row_of_each_source_is_shown_and_no_other_is_read(folder: Path) -> None:
    assert samples(folder).splitlines() == [
        "",
        "The first example of [sft], as it is trained",
        f"  from {folder / 'talks.jsonl'}; tokens that are trained are between ⟦ and ⟧",
        "  12 tokens, 3 of them trained",
        "  | <|begin|> <|user|> add 1 + 2 = <|end|> <|assistant|>⟦3 sum <|end|>⟧",
        "",
        "The first task, as the model sees it",
        f"  task 0 of {folder / 'tasks.jsonl'}",
        "  9 tokens",
        "  | <|begin|> <|user|> sum 4 + 5 = <|end|> <|assistant|>",
        "",
        "The first reward calls",
        f"  score (weight 1): {folder / 'mine.py'}, line 2, called once for each episode:",
        "    score(text=\"<the model's answer>\", truth='9')",
        "  exact_match (weight 0.5): fn = 'exact_match', called with the episode; the task's answer is '9'",
    ]


def test_a_message_of_weight_0_is_not_shown_as_trained(folder: Path) -> None:
    talk = [
        {"role": "user", "content": "1 + 2 ="},
        {"role": "assistant", "content": "4", "weight": 0},
        {"role": "user", "content": "sum 1 + 2 ="},
        {"role": "assistant", "content": "3"},
    ]
    (folder / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    shown = samples(folder)
    assert "2 of them trained" in shown
    assert "<|assistant|> 4 <|end|>" in shown
    assert "<|assistant|>⟦3 <|end|>⟧" in shown


def test_on_a_terminal_the_mask_is_a_colour(folder: Path) -> None:
    shown = samples(folder, "sft.max_tokens=11", color=True)
    assert f"<|assistant|>{GREEN}3 sum{PLAIN}\n" in shown
    assert "11 tokens, 2 of them trained, cut at sft.max_tokens = 11" in shown
    assert "⟦" not in shown


def test_text_that_would_act_on_a_terminal_is_escaped(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "1", "answer": "\x1b[2J", "id": "\x1b[31m"}) + "\n")
    assert "\x1b" not in samples(folder)


def test_what_cannot_be_shown_is_said(folder: Path) -> None:
    (folder / "rows.py").write_text(NEVER_RUN + "def rows(): ...\n")
    (folder / "talks.jsonl").write_text("no JSON\n")
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    shown = samples(folder, 'rl.tasks={type="python", path="rows.py:rows"}')
    assert "  not shown: the tokenizer in " in shown
    assert shown.count(f"  not shown: the rows come from {folder / 'rows.py'}:rows, which is not run here") == 2


def test_a_source_that_is_wrong_is_said_too(folder: Path) -> None:
    (folder / "talks.jsonl").write_text("")
    (folder / "tasks.jsonl").write_text("no JSON\n")
    shown = samples(folder)
    assert "  not shown: " + str(folder / "talks.jsonl") + " has no rows" in shown
    assert f"  not shown: {folder / 'tasks.jsonl'}, line 1: not JSON" in shown


def test_an_environment_of_ours_is_asked_for_its_first_observation(folder: Path) -> None:
    (folder / "run.toml").write_text(
        'model.path = "tiny"\n[sft]\nsteps = 1\nmax_tokens = 256\n'
        '[[sft.sources]]\ntype = "env"\nname = "key_door"\n'
        "[rl]\nsteps = 1\nmax_prompt_tokens = 200\nmax_episode_tokens = 512\n"
        'tasks = {type = "env", name = "key_door"}\nrewards = [{fn = "env"}]\n'
    )
    shown = samples(folder)
    assert "not shown" not in shown
    assert "⟦" in shown
    assert "<|user|>" in shown.partition("The first task")[2]


def test_both_sides_of_the_first_pair_are_shown(folder: Path) -> None:
    dpo = '[dpo]\nsteps = 1\nmax_tokens = 11\n[[dpo.sources]]\ntype = "jsonl"\npath = "pairs.jsonl"\n'
    (folder / "run.toml").write_text('model.path = "model"\n' + dpo)
    row = {"prompt": "add 1 + 2 =", "chosen": "3", "rejected": "4 sum"}
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\nno JSON\n")
    assert samples(folder).splitlines()[3:] == [
        "  chosen: 11 tokens, 2 of them trained",
        "  | <|begin|> <|user|> add 1 + 2 = <|end|> <|assistant|>⟦3 <|end|>⟧",
        "  rejected: 12 tokens, 3 of them trained, left out because of dpo.max_tokens = 11",
        "  | <|begin|> <|user|> add 1 + 2 = <|end|> <|assistant|>⟦4 sum <|end|>⟧",
    ]
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2", "label": False}) + "\n")
    assert "  bad: 7 tokens, 2 of them trained" in samples(folder, "dpo.loss=kto")


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("def f(text, truth): ...", "f(text=\"<the model's answer>\", truth='3')"),
        (
            "def f(completions: list[str], answer, **kwargs): ...",
            "f(completions=[\"<the model's answer>\"], answer=['3'], ",
        ),
        (
            "def f(completions, level): ...",
            "f(completions=[[{'role': 'assistant', 'content': \"<the model's answer>\"}]], level=[2])",
        ),
        (
            "async def f(data_source, solution_str, ground_truth, extra_info=undefined_name()): ...",
            "f(data_source='', solution_str=\"<the model's answer>\", ground_truth='3', extra_info={'num_turns': 2})",
        ),
        ("@unknown\ndef f(episode): ...", "f(episode=<the episode>)"),
    ],
)
def test_a_reward_function_is_shown_with_the_arguments_that_it_will_get(tmp_path: Path, code: str, call: str) -> None:
    (tmp_path / "mine.py").write_text(f"{NEVER_RUN}{code}\n")
    where, shown = reward_call(RewardTermConfig(fn=f"{tmp_path / 'mine.py'}:f"), TASK)
    assert f"{tmp_path / 'mine.py'}, line {2 + code.startswith('@')}" in where
    assert shown.strip().startswith(call)


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(explain_samples).failed == 0
