"""docs/environments.md is true: its environments play, its task definition loads, its tables say what there is."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.envs.task_definitions import DefinitionIn, load_task_definition
from headrace.rollout.episode import BY_ITSELF, run_sampled_episode
from headrace.types import EndReason, Episode, Message, SamplingParams, Task
from headrace.user_code import load_module
from headrace.wiring.build.data import make_env_of, tasks_of
from headrace.wiring.checked_config import load_checked
from support.agent_programs import heard_spans, scripted, trained_spans
from support.paths import DOCS

TEXT = (DOCS / "environments.md").read_text(encoding="utf-8")


def block(name: str, language: str) -> str:
    """The fenced block whose first line is a comment with this file's name."""
    [found] = re.findall(rf"^```{language}\n# {re.escape(name)}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("countdown.py", "library.py"):
        (tmp_path / name).write_text(block(name, "python"))
    return tmp_path


async def play(module: ModuleType, name: str, task: Task, *texts: str) -> Episode:
    sampler, renderer = scripted(*texts)
    episode = await run_sampled_episode(
        id="0/0",
        task=task,
        env=getattr(module, name)(),
        sampler=sampler,
        renderer=renderer,
        sampling=SamplingParams(max_tokens=120),
        seed=0,
        env_seed=0,
        max_turns=6,
        max_episode_tokens=4000,
        timeout_s=20.0,
    )
    assert isinstance(episode, Episode), episode
    assert trained_spans(episode) == heard_spans(sampler)
    return episode


async def test_the_first_example_plays(folder: Path) -> None:
    module = load_module("countdown.py", base=folder)
    episode = await play(module, "Countdown", Task(id="t", data={"from": 2}), "down", "up", "down")
    assert (episode.success, [step.valid for step in episode.steps]) == (True, [True, False, True])


async def test_the_example_with_tools_plays(folder: Path) -> None:
    module = load_module("library.py", base=folder)
    asked = (Message(role="user", content="Who wrote Emma?"),)
    task = Task(id="t", messages=asked, data={"shelves": {"Emma": "Jane Austen"}})
    call = '<tool_call>\n{"name": "look_up", "arguments": {"title": "Emma"}}\n</tool_call>'
    episode = await play(module, "Library", task, "<tool_call>Emma</tool_call>", call, "Jane Austen")
    assert [message.content for message in episode.messages if message.role == "tool"] == ["Jane Austen"]
    assert [step.valid for step in episode.steps] == [False, True, True]
    assert episode.ended is EndReason.DONE


def test_an_environment_of_ones_own_is_named_in_a_run(folder: Path) -> None:
    [tasks] = re.findall(r"^tasks = .*env = .*$", TEXT, re.MULTILINE)
    run = '[model]\npath = "tiny"\n[sft]\nsteps = 1\nmax_tokens = 100\nsources = [{type="env", name="add"}]\n[rl]\n'
    (folder / "run.toml").write_text(f"{run}steps = 1\nmax_prompt_tokens = 100\nmax_episode_tokens = 400\n{tasks}\n")
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "Count down.", "from": 3}))
    config = load_checked(folder / "run.toml", [], command="train")
    assert config.rl is not None
    [task] = tasks_of(config.rl.tasks[0])
    assert make_env_of(config.rl.tasks[0])().reset(task, 0).state == "3"


def test_the_task_definition_loads(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(block("task.toml", "toml"))
    (tmp_path / "tools.py").write_text("def up(resource):\n    resource.state['counter'] += 1\n")
    definition = load_task_definition(tmp_path / "task.toml")
    assert (definition.rollouts, definition.max_turns, definition.tasks[0].id) == (8, 4, "two_items")


def table(heading: str) -> list[list[str]]:
    section = TEXT[TEXT.index(f"## {heading}\n") :].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]


def test_every_way_to_end_is_in_the_table_with_what_it_means() -> None:
    rows = table("How an episode ends")
    assert [row[0].strip("`") for row in rows] == [end.value for end in EndReason]
    told = {row[0].strip("`"): row[2] for row in rows}
    assert {name for name, cut in told.items() if cut == "no"} == {end.value for end in BY_ITSELF}


def test_every_field_of_a_definition_is_in_the_table() -> None:
    named: set[Any] = {name for row in table("Task definitions") for name in re.findall(r"`(\w+)`", row[0])}
    unsaid = {"name", "description", "goal_description"}  # for people
    assert set(DefinitionIn.model_fields) - named == unsaid
