"""Load task definitions of reward-kit (its TaskDefinitionModel), from TOML or JSON, as tasks and their environment.

`resource_type` names the environment: "PythonStateResource" or "SQLResource" (`envs/resources.py`), the name of one of
our environments, or nothing (a question and an answer). Unknown fields are refused by name.
"""

import ast
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.config import find_path
from headrace.data.row_formats import parse_prompt
from headrace.data.rows import rows_of
from headrace.envs import ENVIRONMENTS, environment_tasks
from headrace.envs.resources import EXECUTE_SQL, PythonState, Resource, ResourceEnv, SqliteState, Tool, module_tools
from headrace.envs.single_turn import SingleTurnEnv
from headrace.errors import ConfigError, DataError, boundary
from headrace.protocols import Env
from headrace.types import Message, Task
from headrace.user_code import load_module

RESOURCES = ("PythonStateResource", "SQLResource")
SQL_KEYS = ("db_type", "db_name", "schema_file", "seed_data_file", "schema_sql", "seed_sql")


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CriteriaIn(_Shape):
    final_state_query: str | None = None
    expected_query_result_transform: str | None = None
    ground_truth_function_calls: list[Any] | None = None
    ground_truth_comparable_state: dict[str, Any] | None = None


class DefinitionIn(_Shape):
    """The fields of reward-kit's model. Its `resource_server` is refused: nothing is started here."""

    name: str = Field(min_length=1)
    description: str | None = None
    resource_type: str | None = None
    base_resource_config: dict[str, Any] = Field(default_factory=dict)
    tools_module_path: str | None = None
    reward_function_path: str | None = None
    goal_description: str | None = None
    evaluation_criteria: CriteriaIn | None = None
    initial_user_prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    poc_max_turns: int = Field(default=3, ge=1)
    resource_server: dict[str, Any] | None = None
    num_rollouts: int = Field(default=1, ge=1)
    dataset_path: str | None = None
    num_rollouts_per_sample: int = Field(default=1, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """A task definition that was loaded."""

    name: str
    tasks: tuple[Task, ...]
    make_env: Callable[[], Env]
    reward: str | None  # a function as `rl.rewards` names it; None: what the environment gives
    rollouts: int  # of each task
    max_turns: int


def load_task_definition(path: Path) -> TaskDefinition:
    """Load a task definition; imports the tools' module, if there is one.

    Raises ConfigError with the file and the field that has to change.
    """
    definition = read_definition(path)
    base = path.absolute().parent
    with_data = definition.dataset_path is not None
    make_env, config = _environment(definition, base, str(path))
    return TaskDefinition(
        name=definition.name,
        tasks=_tasks(definition, config, base, str(path)),
        make_env=make_env,
        reward=_reward(definition, base),
        rollouts=definition.num_rollouts_per_sample if with_data else definition.num_rollouts,
        max_turns=definition.poc_max_turns,
    )


def definition_defaults(path: Path) -> dict[str, Any]:
    """Return the keys that [rl] may leave out because the definition sets them: group_size, max_turns, rewards.

    Imports nothing.
    """
    definition = read_definition(path)
    rollouts = definition.num_rollouts_per_sample if definition.dataset_path is not None else definition.num_rollouts
    reward = _reward(definition, path.absolute().parent)
    return {
        "max_turns": definition.poc_max_turns,
        **({"group_size": rollouts} if rollouts > 1 else {}),
        **({} if reward is None else {"rewards": [{"fn": reward}]}),
    }


def task_defaults(rl: Mapping[str, Any], *, base: Path) -> dict[str, Any]:
    """Return the keys that the table [rl] may leave out because its tasks are a definition, if they are one."""
    tasks = rl.get("tasks")
    if not isinstance(tasks, Mapping) or tasks.get("type") != "task" or not isinstance(tasks.get("path"), str):
        return {}
    file = find_path(tasks["path"], base)
    return {} if file is None else definition_defaults(file)


def read_definition(path: Path) -> DefinitionIn:
    """Read and validate a definition, TOML or JSON by its ending."""
    readers: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a task definition is a .toml or a .json file")
    with boundary(ConfigError, f"{path} cannot be read"):
        fields = readers[path.suffix](path.read_text(encoding="utf-8"))
    try:
        definition = DefinitionIn.model_validate(fields)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {_problem(exc)}") from exc
    if definition.resource_server is not None:
        raise ConfigError(
            f"{path}: resource_server is not supported: start the server, and write an environment for it"
        )
    if definition.resource_type == "SQLResource":
        for key in definition.base_resource_config:
            if key not in SQL_KEYS:
                raise ConfigError(f"{path}: base_resource_config has no {key!r}: it may have {', '.join(SQL_KEYS)}")
    if unused := _unused(definition):
        raise ConfigError(
            f"{path}: {unused} means nothing with resource_type {definition.resource_type!r}: leave it out"
        )
    return definition


def _unused(definition: DefinitionIn) -> str | None:
    """Return a field that is set and has no effect, if there is one."""
    criteria = definition.evaluation_criteria or CriteriaIn()
    queries = criteria.final_state_query or criteria.expected_query_result_transform
    if definition.resource_type in ENVIRONMENTS:
        unused = {
            "tools_module_path": definition.tools_module_path,
            "dataset_path": definition.dataset_path,
            "evaluation_criteria": criteria != CriteriaIn(),
        }
        return next((name for name, value in unused.items() if value), None)
    no_database = definition.resource_type in (None, "PythonStateResource")
    return "evaluation_criteria.final_state_query" if queries and no_database else None


def _problem(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{field}: {error['msg']}"
    names = (CriteriaIn if error["loc"][0] == "evaluation_criteria" else DefinitionIn).model_fields
    near = get_close_matches(str(error["loc"][-1]), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(names)}"
    return f"there is no field {field}; {hint}"


# --- tasks -----------------------------------------------------------------------------------------------------------


def _tasks(definition: DefinitionIn, config: Mapping[str, Any], base: Path, file: str) -> tuple[Task, ...]:
    if definition.resource_type is not None and definition.resource_type in ENVIRONMENTS:
        options = {key: value for key, value in definition.base_resource_config.items() if key not in ("size", "seed")}
        size, seed = int(config.get("size", 1)), int(config.get("seed", 0))
        generated = environment_tasks(definition.resource_type, size, seed, options)
        opening = _messages(definition.messages, definition.initial_user_prompt, file)
        return tuple(replace(task, messages=(*opening, *task.messages)) for task in generated)
    criteria = definition.evaluation_criteria or CriteriaIn()
    truth = {
        "function_calls": criteria.ground_truth_function_calls,
        "comparable_state": criteria.ground_truth_comparable_state,
    }
    data = {
        "task_definition_name": definition.name,
        "ground_truth": truth,
        "ground_truth_function_calls": criteria.ground_truth_function_calls,
        "ground_truth_comparable_state": criteria.ground_truth_comparable_state,
        **config,
    }
    opening = _messages(definition.messages, definition.initial_user_prompt, file)
    if definition.dataset_path is None:
        return (Task(id=definition.name, messages=_check_prompt(opening, file), data=data),)
    tasks: list[Task] = []
    ids: set[str] = set()
    for index, row in enumerate(_read_rows(base / definition.dataset_path)):
        messages = _messages(
            row.get("messages"), row.get("prompt") or row.get("initial_user_prompt"), f"{file}, row {index}"
        )
        columns = {key: value for key, value in row.items() if key not in ("messages", "prompt", "initial_user_prompt")}
        id = f"{definition.name}/{row.get('id', index)}"
        if id in ids:
            raise DataError(f"{file}: dataset_path has two rows with the id {id}: make ids unique, or leave them out")
        ids.add(id)
        prompt = _check_prompt(messages or opening, f"{file}, row {index}")
        tasks.append(Task(id=id, messages=prompt, data={**data, **columns}))
    return tuple(tasks)


def _messages(messages: Any, prompt: Any, place: str) -> tuple[Message, ...]:
    """Parse the messages, else the prompt; both may be a text or a conversation, as in any file of tasks."""
    value = messages or prompt
    return parse_prompt(value, place) if value else ()


def _check_prompt(messages: tuple[Message, ...], file: str) -> tuple[Message, ...]:
    if not messages:
        raise ConfigError(f"{file}: there is nothing to ask: add messages or initial_user_prompt")
    if messages[-1].role == "assistant":
        raise ConfigError(f"{file}: messages end with the assistant's turn: leave it out")
    return messages


def _read_rows(path: Path) -> list[Mapping[str, Any]]:
    with boundary(DataError, f"the dataset_path {path} cannot be read"):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise DataError(f"{path} has no rows: there is nothing to play")
    return [row.columns for row in rows_of(rows, str(path))]


def _reward(definition: DefinitionIn, base: Path) -> str | None:
    """Write "package.module.function", "package.module:function" or "file.py:function" as `rl.rewards` takes them."""
    path = definition.reward_function_path
    if path is None:
        return None
    if ".py" in path or "/" in path:
        place, _, function = path.partition(":")
        file = base / place
        return f"{file if file.exists() else place}:{function}" if function else str(file)
    module, _, function = path.rpartition(".")
    return path if ":" in path or not module else f"{module}:{function}"


# --- environments ----------------------------------------------------------------------------------------------------


def _environment(definition: DefinitionIn, base: Path, file: str) -> tuple[Callable[[], Env], Mapping[str, Any]]:
    """Return the constructor of an episode's environment, and the data that its tasks need."""
    config = definition.base_resource_config
    if definition.resource_type is None:
        if definition.tools_module_path is not None:
            raise ConfigError(f'{file}: tools_module_path needs a resource_type: write "PythonStateResource"')
        return SingleTurnEnv, {}
    if definition.resource_type in ENVIRONMENTS:
        return ENVIRONMENTS[definition.resource_type].make_env, config
    if definition.resource_type not in RESOURCES:
        supported = ", ".join((*RESOURCES, *ENVIRONMENTS))
        raise ConfigError(f"{file}: resource_type {definition.resource_type!r} is not supported: it may be {supported}")
    tools: dict[str, Tool] = {}
    described: tuple[Mapping[str, Any], ...] = ()
    if definition.tools_module_path is not None:
        tools, described = module_tools(load_module(definition.tools_module_path, base=base))
    if definition.resource_type == "PythonStateResource":
        return (
            partial(
                ResourceEnv,
                open_resource=_open_state,
                achieved=_state_achieved,
                tools=tools,
                described=described,
            ),
            {"initial_state": dict(config.get("initial_state", {}))},
        )
    return (
        partial(
            ResourceEnv,
            open_resource=_open_database,
            achieved=_sql_criterion(definition.evaluation_criteria or CriteriaIn(), file),
            tools={"execute_sql": _execute_sql, **tools},
            described=(EXECUTE_SQL, *described),
        ),
        {"script": _script(config, base, file)},
    )


def _open_state(task: Task) -> Resource:
    return PythonState(task.data["initial_state"])


def _open_database(task: Task) -> Resource:
    return SqliteState(task.data["script"])


def _execute_sql(query: str, resource: SqliteState, parameters: Any = (), fetch_mode: str | None = None) -> Any:
    return resource.execute(query, parameters, fetch_mode)


def _state_achieved(resource: PythonState, task: Task) -> bool | None:
    """Tell whether every expected entry is there, whatever the other entries; return None if none is expected."""
    expected = task.data.get("ground_truth_comparable_state")
    if expected is None:
        return None
    return all(key in resource.state and resource.state[key] == value for key, value in expected.items())


def _script(config: Mapping[str, Any], base: Path, file: str) -> str:
    if config.get("db_type", "sqlite") != "sqlite":
        raise ConfigError(f'{file}: db_type {config["db_type"]!r} is not supported: write "sqlite"')
    parts = []
    for name, text in (("schema_file", "schema_sql"), ("seed_data_file", "seed_sql")):
        if name in config:
            with boundary(ConfigError, f"{file}: {name} cannot be read"):
                parts.append((base / str(config[name])).read_text(encoding="utf-8"))
        parts.append(str(config.get(text, "")))
    return "\n".join(part for part in parts if part)


def _sql_criterion(criteria: CriteriaIn, file: str) -> Callable[[SqliteState, Task], bool | None]:
    """Return the function that judges a database: `final_state_query` and the author's lambda, which judges its rows.

    Without a lambda, the value of the query has to be true.
    """
    query = criteria.final_state_query
    if query is None:
        return lambda database, task: None
    text = criteria.expected_query_result_transform
    if text is None:
        return lambda database, task: bool(database.execute(query, fetch_mode="val"))
    with boundary(ConfigError, f"{file}: expected_query_result_transform cannot be read"):
        parsed = ast.parse(text.strip(), mode="eval")
    if not isinstance(parsed.body, ast.Lambda):
        raise ConfigError(f'{file}: expected_query_result_transform must be a lambda, such as "lambda rows: len(rows)"')
    judge = eval(compile(parsed, file, "eval"))

    def achieved(database: SqliteState, task: Task) -> bool:
        with boundary(DataError, "expected_query_result_transform failed"):
            return bool(judge(database.execute(query, fetch_mode="all")))

    return achieved
