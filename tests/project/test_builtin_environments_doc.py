"""docs/builtin-environments.md is true: its options have their defaults, its sources load, and a run plays each."""

import inspect
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.config import SourceConfig
from headrace.data.task_source import find_overlap
from headrace.envs import ADAPTERS, BUILT_IN, ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.observe.run_folder import RunFolder
from headrace.types import Message
from headrace.wiring.build.data import conversations_of, pairs_of, tasks_of
from headrace.wiring.checked_config import load_checked
from support.paths import DOCS, FOREIGN

DOCUMENT = (DOCS / "builtin-environments.md").read_text(encoding="utf-8")
SOURCES: list[dict[str, Any]] = [
    source
    for block in re.findall(r"^```toml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    for stage in tomllib.loads(block).values()
    for source in (stage["sources"] if "sources" in stage else [stage["tasks"]])
]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_document_has_every_option_with_its_default(name: str) -> None:
    parameters = inspect.signature(ENVIRONMENTS[name].generate_tasks).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    del options["split"]
    rows = re.findall(rf"^\| `{name}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    [row] = [row for row in rows if "`max_" in row]
    told = dict(re.findall(r"`(\w+) = ([^`]+)`", row))
    assert told == {option: json.dumps(default) for option, default in options.items()}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source["name"])
def test_the_sources_of_the_document_load(source: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if source["name"] in ADAPTERS:
        pytest.importorskip(source["name"])
    monkeypatch.chdir(FOREIGN)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    make = environment_demonstrations if "mistake_rate" in source["options"] else environment_tasks
    made: list[Any] = make(source["name"], 3, source.get("seed", 0), source["options"])
    assert len(made) == 3


def test_every_new_environment_has_a_source_in_the_document() -> None:
    assert {source["name"] for source in SOURCES} == set(ENVIRONMENTS) - {"key_door", "add"}


RUN = """
[run]
name = "played"
[model]
path = "tiny"
tiny = {{ width = 16, layers = 1, heads = 2, kv_heads = 1, context = 1024 }}
{sft}
[rl]
steps = 1
groups = 2
group_size = 3
max_turns = 4
max_prompt_tokens = 256
max_episode_tokens = 900
credit = "gigpo"
tasks = {{ type = "env", name = "{name}", size = 20, seed = 2 }}
rewards = [{{ fn = "env" }}]
sampling = {{ max_tokens = 6 }}
optimizer = {{ learning_rate = 1e-3 }}
"""
SFT = """
[sft]
steps = 1
batch_size = 2
max_tokens = 900
sources = [{{ type = "env", name = "{name}", size = 10, seed = 1 }}]
"""


@pytest.mark.parametrize("name", [*sorted(set(BUILT_IN) - {"key_door", "add"}), "gymnasium"])
def test_a_run_plays_the_environment(name: str, tmp_path: Path) -> None:
    if name in ADAPTERS:
        pytest.importorskip(name)
    sft = SFT.format(name=name) if name in BUILT_IN else ""
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(name=name, sft=sft), encoding="utf-8")
    config = load_checked(file, [f"run.folder={json.dumps(str(tmp_path))}"], command="train")
    result = wiring.train(config, config_text_path=file, resume=None)
    lines = RunFolder.open(result.folder).metrics.read_text(encoding="utf-8").splitlines()
    assert "reward/mean" in json.loads(lines[-1])


def test_a_system_message_gives_the_rules_of_an_environment() -> None:
    rules = Message(role="system", content="Answer with one move.")
    source = SourceConfig(type="env", name="frozen_lake", size=3, system=rules.content)
    plain = SourceConfig(type="env", name="frozen_lake", size=3)
    assert [task.messages for task in tasks_of(source)] == [(rules,)] * 3
    assert [talk[1:] for talk in conversations_of(source)] == conversations_of(plain)
    assert all(talk[0] == rules for talk in conversations_of(source))
    assert all(pair.chosen[0] == pair.rejected[0] == rules for pair in pairs_of(source))
    assert find_overlap(tasks_of(source), tasks_of(plain)) == 3
