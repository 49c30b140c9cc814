"""Task definitions in reward-kit's shape: tasks, an environment with tools, a reward and a number of rollouts."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.envs.resources import PythonState, SqliteState
from headrace.envs.task_definitions import TaskDefinition, load_task_definition
from headrace.envs.tool_env import read_action
from headrace.errors import ConfigError, DataError
from headrace.protocols import ToolEnv
from headrace.reward.episode_json import episode_to_row
from headrace.reward.user_function import available_arguments
from headrace.tool_calls import tool_names
from headrace.types import Episode, Message, Observation, StepResult
from headrace.wiring.build.data import make_env_of, tasks_of
from headrace.wiring.checked_config import load_checked

TOOLS = '''
"""Tools of a list and a counter."""

def add_item(item: str, resource):
    """Add an item to the list."""
    state = resource.get_state()
    state["items"].append(item)
    resource.set_state(state)
    return {"status": "success", "message": f"Added item: {item}"}

async def count_up(resource, by: int = 1):
    """Add to the counter."""
    if by < 0:
        raise ValueError("only upwards")
    resource.state["counter"] += by
    return resource.state["counter"]

def _hidden(resource):
    pass

def helper(text):
    return text
'''
STATE = """
name = "two_items"
description = "A list and a counter"
resource_type = "PythonStateResource"
tools_module_path = "tools.py"
reward_function_path = "reward.py:evaluate"
goal_description = "both are right"
poc_max_turns = 4
num_rollouts = 3

[base_resource_config.initial_state]
counter = 0
items = []
status = "initialized"

[evaluation_criteria.ground_truth_comparable_state]
counter = 2
items = ["a"]

[[messages]]
role = "user"
content = "Add the item a and count to 2."
"""
SQL: dict[str, Any] = {
    "name": "flights",
    "resource_type": "SQLResource",
    "base_resource_config": {
        "db_type": "sqlite",
        "schema_file": "schema.sql",
        "seed_sql": "INSERT INTO flights VALUES (1, 'SFO', 2), (2, 'JFK', 0);",
    },
    "evaluation_criteria": {
        "final_state_query": "SELECT seats FROM flights WHERE id = 1",
        "expected_query_result_transform": "lambda rows: len(rows) == 1 and rows[0]['seats'] == 1",
    },
    "initial_user_prompt": "Book a seat to SFO.",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "task.toml").write_text(STATE)
    (tmp_path / "schema.sql").write_text("CREATE TABLE flights (id INTEGER, city TEXT, seats INTEGER);")
    (tmp_path / "reward.py").write_text("def evaluate(messages, **kwargs):\n    return 1.0\n")
    return tmp_path


def write_json(folder: Path, **changes: Any) -> Path:
    path = folder / "task.json"
    path.write_text(json.dumps({**SQL, **changes}))
    return path


def opened(definition: TaskDefinition) -> tuple[ToolEnv, Observation]:
    env: Any = definition.make_env()
    return env, env.reset(definition.tasks[0], 0)


def call(env: ToolEnv, shown: Observation, name: str, **arguments: Any) -> StepResult:
    return env.call(read_action(json.dumps({"name": name, "arguments": arguments}), shown.tools))


def said(result: StepResult) -> Any:
    return json.loads(result.observation.messages[0].content)


# --- a dictionary ----------------------------------------------------------------------------------------------------


def test_a_definition_gives_tasks_a_world_a_reward_and_a_number_of_rollouts(folder: Path) -> None:
    definition = load_task_definition(folder / "task.toml")
    [task] = definition.tasks
    assert (task.id, task.messages[0].content) == ("two_items", "Add the item a and count to 2.")
    assert (definition.rollouts, definition.max_turns) == (3, 4)
    assert definition.reward == f"{folder / 'reward.py'}:evaluate"
    assert task.data["ground_truth_comparable_state"] == {"counter": 2, "items": ["a"]}
    assert task.data["ground_truth"] == {"function_calls": None, "comparable_state": {"counter": 2, "items": ["a"]}}


def test_tools_are_those_functions_of_the_module_that_take_the_resource(folder: Path) -> None:
    _, shown = opened(load_task_definition(folder / "task.toml"))
    assert tool_names(shown.tools) == ("add_item", "count_up")
    assert shown.tools[0]["function"] == {
        "name": "add_item",
        "description": "Add an item to the list.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    }
    assert shown.tools[1]["function"]["parameters"]["required"] == []


def test_calls_change_the_state_and_the_reward_says_how_it_stands(folder: Path) -> None:
    env, shown = opened(load_task_definition(folder / "task.toml"))
    added = call(env, shown, "add_item", item="a")
    assert said(added) == {"status": "success", "message": "Added item: a"}
    assert (added.reward, added.success, added.done) == (0.0, False, False)
    counted = call(env, shown, "count_up", by=2)
    assert (said(counted), counted.reward, counted.success) == (2, 1.0, True)
    assert json.loads(counted.observation.state or "") == {"counter": 2, "items": ["a"], "status": "initialized"}
    spoilt = call(env, shown, "count_up")
    assert (spoilt.reward, spoilt.success) == (-1.0, False)  # taken back: the sum is how it stands
    ended = env.call(read_action("I am done.", shown.tools))
    assert (ended.done, ended.reward, ended.success) == (True, 0.0, False)


def test_what_a_tool_raises_is_told_and_wrong_arguments_are_invalid(folder: Path) -> None:
    env, shown = opened(load_task_definition(folder / "task.toml"))
    raised = call(env, shown, "count_up", by=-1)
    assert (said(raised), raised.valid) == ({"error": "count_up: ValueError: only upwards"}, True)
    wrong = call(env, shown, "count_up", much=1)
    assert wrong.valid is False
    assert "unexpected keyword argument 'much'" in said(wrong)["error"]
    no_call = env.call(read_action('{"name": "sing"}', shown.tools))
    assert (no_call.valid, no_call.done) == (False, False)


def test_every_episode_has_a_state_of_its_own(folder: Path) -> None:
    definition = load_task_definition(folder / "task.toml")
    (one, shown), (other, fresh) = opened(definition), opened(definition)
    call(one, shown, "add_item", item="a")
    assert call(other, fresh, "count_up").observation.state == '{"counter": 1, "items": [], "status": "initialized"}'
    assert one.reset(definition.tasks[0], 0) == fresh


def test_a_registry_in_the_module_is_used_as_it_is(folder: Path) -> None:
    (folder / "tools.py").write_text(
        "class Registry:\n"
        "    def get_tools(self):\n        return {'ping': lambda resource: 'pong'}\n"
        "    def get_openai_tools(self):\n        return [{'name': 'ping', 'parameters': {'type': 'object'}}]\n"
        "R = Registry()\n"
    )
    env, shown = opened(load_task_definition(folder / "task.toml"))
    assert tool_names(shown.tools) == ("ping",)
    assert said(call(env, shown, "ping")) == "pong"


# --- a database ------------------------------------------------------------------------------------------------------


def test_a_database_is_filled_asked_and_judged(folder: Path) -> None:
    env, shown = opened(load_task_definition(write_json(folder)))
    assert tool_names(shown.tools) == ("execute_sql",)
    rows = call(
        env, shown, "execute_sql", query="SELECT * FROM flights WHERE seats > ?", parameters=[0], fetch_mode="all"
    )
    assert said(rows) == [{"id": 1, "city": "SFO", "seats": 2}]
    assert rows.observation.state == shown.state  # asking changes nothing
    booked = call(env, shown, "execute_sql", query="UPDATE flights SET seats = seats - 1 WHERE id = 1")
    assert (said(booked), booked.success, booked.reward) == ({"rowcount": 1}, True, 1.0)
    assert booked.observation.state != shown.state
    assert (
        said(call(env, shown, "execute_sql", query="SELECT city FROM flights WHERE id = 2", fetch_mode="val")) == "JFK"
    )
    assert "no such table" in said(call(env, shown, "execute_sql", query="DELETE FROM planes"))["error"]
    env.close()


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH DATABASE '{file}' AS other",
        "VACUUM INTO '{file}'",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('{file}')",
    ],
)
def test_a_query_reaches_nothing_but_its_database(tmp_path: Path, query: str) -> None:
    file = tmp_path / "other.sqlite"
    database = SqliteState("CREATE TABLE t (a)")
    with pytest.raises(Exception, match=r"not authorized|authorization denied|no such function"):
        database.execute(query.format(file=file))
    assert not file.exists()
    database.close()


def test_a_query_without_end_is_stopped() -> None:
    database = SqliteState("")
    with pytest.raises(Exception, match="interrupted"):
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n", (), "val"
        )
    assert database.execute("SELECT 7", (), "val") == 7
    database.close()


def test_the_state_of_a_database_is_known_after_a_query_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    database, other = (SqliteState("CREATE TABLE t (a); INSERT INTO t VALUES (1)") for _ in range(2))
    grow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000) INSERT INTO t SELECT i FROM n"
    database.execute(grow)
    other.execute(grow)
    monkeypatch.setattr("headrace.envs.resources.MAX_SQL_STEPS", 2000)
    with pytest.raises(Exception, match="interrupted"):
        database.execute("UPDATE t SET a = a + 1")
    assert database.key() == other.key()
    with pytest.raises(Exception, match="interrupted"):
        database.execute("SELECT max(a) FROM t", (), "val")  # queries are watched as before
    for one in (database, other):
        one.close()


def test_the_state_of_a_database_is_known_whatever_pragmas_python_dumps_it_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11's has table_info, which queries may ask for as well; Python 3.13's has foreign_key_check besides."""
    assert SqliteState("CREATE TABLE t (a)").execute("PRAGMA table_info(t)", (), "one")["name"] == "a"
    monkeypatch.setattr(
        "headrace.envs.resources._allowed",
        lambda code, *_: sqlite3.SQLITE_DENY if code == sqlite3.SQLITE_PRAGMA else sqlite3.SQLITE_OK,
    )
    database = SqliteState("CREATE TABLE t (a)")
    empty = database.key()
    database.execute("INSERT INTO t VALUES (1)")
    assert database.key() != empty
    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
        database.execute("PRAGMA table_info(t)")
    database.close()


# --- other shapes ----------------------------------------------------------------------------------------------------


def test_rows_of_a_dataset_are_tasks_each(folder: Path) -> None:
    rows = [{"id": "x", "seed": 4, "prompt": "Go to JFK."}, {"seed": 5, "ground_truth": "other"}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = write_json(folder, dataset_path="rows.jsonl", num_rollouts_per_sample=6)
    definition = load_task_definition(path)
    assert [(task.id, task.messages[0].content) for task in definition.tasks] == [
        ("flights/x", "Go to JFK."),
        ("flights/1", "Book a seat to SFO."),
    ]
    assert [task.data["seed"] for task in definition.tasks] == [4, 5]
    assert definition.tasks[1].data["ground_truth"] == "other"
    assert definition.rollouts == 6


def test_a_row_may_ask_with_a_conversation(folder: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go to JFK."}]
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": asked}))
    [task] = load_task_definition(write_json(folder, dataset_path="rows.jsonl")).tasks
    assert [(message.role, message.content) for message in task.messages] == [
        ("system", "Be brief."),
        ("user", "Go to JFK."),
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"id": 1}, {"id": 0}, {"id": 1}], "two rows with the id flights/1"),
        ([{}, {"id": 0}], "two rows with the id flights/0"),
        ([{}, {"prompt": 7}], "row 1: a prompt must be a text or a list of messages, this is 7"),
    ],
)
def test_rows_that_cannot_be_tasks_are_named(folder: Path, rows: list[dict[str, Any]], told: str) -> None:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        load_task_definition(write_json(folder, dataset_path="rows.jsonl"))
    assert told in str(caught.value)


def test_a_file_as_reward_kits_model_writes_itself_has_nulls_for_what_is_not_said(folder: Path) -> None:
    """What `TaskDefinitionModel(...).model_dump_json()` of reward-kit 0.4.1 gives."""
    text = (
        '{"name":"x","description":null,"resource_type":"PythonStateResource",'
        '"base_resource_config":{"initial_state":{"a":1}},"tools_module_path":null,"reward_function_path":"reward.py:f",'
        '"goal_description":null,"evaluation_criteria":null,"initial_user_prompt":"go","messages":null,'
        '"poc_max_turns":3,"resource_server":null,"num_rollouts":1,"dataset_path":null,"num_rollouts_per_sample":1}'
    )
    (folder / "dump.json").write_text(text)
    definition = load_task_definition(folder / "dump.json")
    [task] = definition.tasks
    assert (task.messages[0].content, task.data["initial_state"], definition.max_turns) == ("go", {"a": 1}, 3)
    flights = load_task_definition(write_json(folder, evaluation_criteria=None))
    env, shown = opened(flights)
    assert call(env, shown, "execute_sql", query="SELECT 1").success is None, "nothing says what is a success"


def test_one_of_our_worlds_can_be_the_resource(folder: Path) -> None:
    config = {"size": 2, "seed": 3, "operations": 1, "tools": True}
    path = write_json(folder, resource_type="calculator", base_resource_config=config, evaluation_criteria={})
    definition = load_task_definition(path)
    assert [task.data["tools"] for task in definition.tasks] == [True, True]
    assert [task.messages[0].content for task in definition.tasks] == ["Book a seat to SFO."] * 2
    _, shown = opened(definition)
    assert tool_names(shown.tools) == ("calculate", "answer")


def test_a_question_needs_no_resource(folder: Path) -> None:
    (folder / "plain.json").write_text('{"name": "q", "initial_user_prompt": "2 + 2?"}')
    definition = load_task_definition(folder / "plain.json")
    env = definition.make_env()
    env.reset(definition.tasks[0], 0)
    assert env.step("4").done


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"initial_user_promt": "x"}, "there is no field initial_user_promt; did you mean initial_user_prompt?"),
        ({"generation": {}}, "there is no field generation; the fields are name, description"),
        ({"evaluation_criteria": {"final_query": "x"}}, "there is no field evaluation_criteria.final_query"),
        ({"poc_max_turns": 0}, "poc_max_turns: Input should be greater than or equal to 1"),
        ({"resource_type": "DockerResource"}, "resource_type 'DockerResource' is not supported: it may be Python"),
        ({"resource_server": {"start_command": "x"}}, "resource_server is not supported"),
        ({"base_resource_config": {"db_type": "postgres"}}, "db_type 'postgres' is not supported"),
        ({"base_resource_config": {"seeds": ""}}, "base_resource_config has no 'seeds'"),
        ({"initial_user_prompt": None}, "there is nothing to ask"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages end with the assistant's turn"),
        (
            {"evaluation_criteria": {"final_state_query": "x", "expected_query_result_transform": "print"}},
            "must be a lambda",
        ),
        ({"tools_module_path": "schema.sql"}, "cannot be imported"),
        ({"resource_type": "add", "base_resource_config": {}}, "evaluation_criteria means nothing with resource_type"),
        (
            {"resource_type": "add", "evaluation_criteria": None, "dataset_path": "rows.jsonl"},
            "dataset_path means nothing with resource_type 'add': leave it out",
        ),
        ({"resource_type": "PythonStateResource"}, "evaluation_criteria.final_state_query means nothing with"),
        (
            {"resource_type": None, "tools_module_path": "tools.py", "evaluation_criteria": None},
            "tools_module_path needs a resource_type",
        ),
    ],
)
def test_what_cannot_work_is_named_with_its_field(folder: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task_definition(write_json(folder, **changes))
    assert told in str(caught.value)


def test_other_files_are_refused(folder: Path) -> None:
    (folder / "task.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"a task definition is a \.toml or a \.json file"):
        load_task_definition(folder / "task.yaml")
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read"):
        load_task_definition(write_json(folder, dataset_path="rows.jsonl"))


# --- in a run --------------------------------------------------------------------------------------------------------

RUN = """
[model]
path = "tiny"
tiny = { context = 2048 }
[sft]
steps = 1
sources = [{ type = "env", name = "add" }]
[rl]
steps = 1
tasks = { type = "task", path = "task.toml" }
"""


def test_a_run_takes_from_the_definition_what_it_does_not_say_itself(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN)
    config = load_checked(folder / "run.toml", [], command="train")
    assert config.rl is not None
    assert (config.rl.group_size, config.rl.max_turns) == (3, 4)
    assert [term.fn for term in config.rl.rewards] == [f"{folder / 'reward.py'}:evaluate"]
    assert [task.id for task in tasks_of(config.rl.tasks[0])] == ["two_items"]
    assert tool_names(make_env_of(config.rl.tasks[0])().reset(tasks_of(config.rl.tasks[0])[0], 0).tools)
    own = load_checked(folder / "run.toml", ["rl.group_size=5", "rl.max_turns=2"], command="train")
    assert own.rl is not None
    assert (own.rl.group_size, own.rl.max_turns) == (5, 2)


def test_the_resources_can_be_used_by_themselves() -> None:
    state = PythonState({"a": [1]})
    state.get_state()["a"].append(2)
    assert state.key() == '{"a": [1]}'
    state.set_state({"b": 1})
    assert state.key() == '{"b": 1}'


async def test_a_reward_function_of_reward_kits_kind_sees_the_final_state(folder: Path) -> None:
    definition = load_task_definition(folder / "task.toml")
    [task] = definition.tasks
    episode = Episode(
        id="0/0",
        task=task,
        seed=0,
        steps=(),
        messages=(*task.messages, Message(role="assistant", content="done")),
        temperature=1.0,
        final_state='{"counter": 2, "items": ["a"], "status": "initialized"}',
    )

    def evaluate(messages: list[Any], *, state: Any, ground_truth_comparable_state: Any, **kwargs: Any) -> float:
        found = state["resource"].get_state()
        found["counter"] -= 2  # a copy, so the next caller sees what it was
        kept = state["resource"].get_state()
        return float(all(kept[key] == value for key, value in ground_truth_comparable_state.items()))

    values = available_arguments(episode_to_row(episode, with_tokens=False))
    wanted = {name: values[name] for name in ("messages", "state", "ground_truth_comparable_state")}
    assert evaluate(**wanted) == 1.0
    assert available_arguments(episode_to_row(replace(episode, final_state=None), with_tokens=False))["state"] == {}
