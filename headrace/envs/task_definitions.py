"""Task definitions in the shape of reward-kit's TaskDefinitionModel, from TOML or JSON, as tasks and their environment.

`resource_type` says what is played in: "PythonStateResource" and "SQLResource" (`worlds/resources.py`), the name of one
of our worlds, or nothing (a question and an answer). What is not known is refused by name.
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
from headrace.data.rows import rows_of
from headrace.data.task_rows import parse_prompt
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
    """The fields of reward-kit's model. Its `resource_server` is known and refused: nothing is started here."""

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
    """`reward` names a function as `rl.rewards` does; None: what the environment gives. `rollouts` is of each task."""

    name: str
    tasks: tuple[Task, ...]
    make_env: Callable[[], Env]
    reward: str | None
    rollouts: int
    max_turns: int


def load_task_definition(path: Path) -> TaskDefinition:
    """Raises ConfigError with the file and the field that has to change. Imports the tools' module, if there is one."""
    read = read_definition(path)
    base = path.absolute().parent
    with_data = read.dataset_path is not None
    make_env, config = _environment(read, base, str(path))
    return TaskDefinition(
        name=read.name,
        tasks=_tasks(read, config, base, str(path)),
        make_env=make_env,
        reward=_reward(read, base),
        rollouts=read.num_rollouts_per_sample if with_data else read.num_rollouts,
        max_turns=read.poc_max_turns,
    )


def definition_defaults(path: Path) -> dict[str, Any]:
    """What a definition says that [rl] may leave out: group_size, max_turns, rewards. Imports nothing."""
    read = read_definition(path)
    rollouts = read.num_rollouts_per_sample if read.dataset_path is not None else read.num_rollouts
    reward = _reward(read, path.absolute().parent)
    return {
        "max_turns": read.poc_max_turns,
        **({"group_size": rollouts} if rollouts > 1 else {}),
        **({} if reward is None else {"rewards": [{"fn": reward}]}),
    }


def task_defaults(rl: Mapping[str, Any], *, base: Path) -> dict[str, Any]:
    """Of the table [rl]: what it may leave out because its tasks are a definition; nothing, if they are not."""
    tasks = rl.get("tasks")
    if not isinstance(tasks, Mapping) or tasks.get("type") != "task" or not isinstance(tasks.get("path"), str):
        return {}
    found = find_path(tasks["path"], base)
    return {} if found is None else definition_defaults(found)


def read_definition(path: Path) -> DefinitionIn:
    """The file as it is; TOML or JSON by its ending."""
    readers: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a task definition is a .toml or a .json file")
    with boundary(ConfigError, f"{path} cannot be read"):
        fields = readers[path.suffix](path.read_text(encoding="utf-8"))
    try:
        read = DefinitionIn.model_validate(fields)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {_problem(exc)}") from exc
    if read.resource_server is not None:
        raise ConfigError(
            f"{path}: resource_server is not supported: start the server, and write an environment for it"
        )
    if read.resource_type == "SQLResource":
        for key in read.base_resource_config:
            if key not in SQL_KEYS:
                raise ConfigError(f"{path}: base_resource_config has no {key!r}: it may have {', '.join(SQL_KEYS)}")
    if unused := _unused(read):
        raise ConfigError(f"{path}: {unused} means nothing with resource_type {read.resource_type!r}: leave it out")
    return read


def _unused(read: DefinitionIn) -> str | None:
    """A field that says something nobody would hear."""
    criteria = read.evaluation_criteria or CriteriaIn()
    asks = criteria.final_state_query or criteria.expected_query_result_transform
    if read.resource_type in ENVIRONMENTS:
        given = {
            "tools_module_path": read.tools_module_path,
            "dataset_path": read.dataset_path,
            "evaluation_criteria": criteria != CriteriaIn(),
        }
        return next((name for name, value in given.items() if value), None)
    without = read.resource_type in (None, "PythonStateResource")  # a database
    return "evaluation_criteria.final_state_query" if asks and without else None


def _problem(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{field}: {error['msg']}"
    known = CriteriaIn if error["loc"][0] == "evaluation_criteria" else DefinitionIn
    near = get_close_matches(str(error["loc"][-1]), known.model_fields, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known.model_fields)}"
    return f"there is no field {field}; {hint}"


# --- tasks -----------------------------------------------------------------------------------------------------------


def _tasks(read: DefinitionIn, config: Mapping[str, Any], base: Path, file: str) -> tuple[Task, ...]:
    if read.resource_type is not None and read.resource_type in ENVIRONMENTS:
        options = {key: value for key, value in read.base_resource_config.items() if key not in ("size", "seed")}
        made = environment_tasks(read.resource_type, int(config.get("size", 1)), int(config.get("seed", 0)), options)
        own = _messages(read.messages, read.initial_user_prompt, file)
        return tuple(replace(task, messages=(*own, *task.messages)) for task in made)
    criteria = read.evaluation_criteria or CriteriaIn()
    truth = {
        "function_calls": criteria.ground_truth_function_calls,
        "comparable_state": criteria.ground_truth_comparable_state,
    }
    data = {
        "task_definition_name": read.name,
        "ground_truth": truth,
        "ground_truth_function_calls": criteria.ground_truth_function_calls,
        "ground_truth_comparable_state": criteria.ground_truth_comparable_state,
        **config,
    }
    own = _messages(read.messages, read.initial_user_prompt, file)
    if read.dataset_path is None:
        return (Task(id=read.name, messages=_asked(own, file), data=data),)
    tasks: list[Task] = []
    seen: set[str] = set()
    for index, row in enumerate(_read_rows(base / read.dataset_path)):
        said = _messages(
            row.get("messages"), row.get("prompt") or row.get("initial_user_prompt"), f"{file}, row {index}"
        )
        kept = {key: value for key, value in row.items() if key not in ("messages", "prompt", "initial_user_prompt")}
        id = f"{read.name}/{row.get('id', index)}"
        if id in seen:
            raise DataError(f"{file}: dataset_path has two rows with the id {id}: make ids unique, or leave them out")
        seen.add(id)
        tasks.append(Task(id=id, messages=_asked(said or own, f"{file}, row {index}"), data={**data, **kept}))
    return tuple(tasks)


def _messages(messages: Any, prompt: Any, place: str) -> tuple[Message, ...]:
    """Both may be a text or a conversation, as in any file of tasks."""
    found = messages or prompt
    return parse_prompt(found, place) if found else ()


def _asked(messages: tuple[Message, ...], file: str) -> tuple[Message, ...]:
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


def _reward(read: DefinitionIn, base: Path) -> str | None:
    """ "package.module.function", "package.module:function", "file.py:function", as `rl.rewards` takes them."""
    path = read.reward_function_path
    if path is None:
        return None
    if ".py" in path or "/" in path:
        place, _, function = path.partition(":")
        found = base / place
        return f"{found if found.exists() else place}:{function}" if function else str(found)
    module, _, function = path.rpartition(".")
    return path if ":" in path or not module else f"{module}:{function}"


# --- environments ----------------------------------------------------------------------------------------------------


def _environment(read: DefinitionIn, base: Path, file: str) -> tuple[Callable[[], Env], Mapping[str, Any]]:
    """What makes an episode's environment, and what its tasks have to carry for it."""
    config = read.base_resource_config
    if read.resource_type is None:
        if read.tools_module_path is not None:
            raise ConfigError(f'{file}: tools_module_path needs a resource_type: write "PythonStateResource"')
        return SingleTurnEnv, {}
    if read.resource_type in ENVIRONMENTS:
        return ENVIRONMENTS[read.resource_type].make_env, config
    if read.resource_type not in RESOURCES:
        known = ", ".join((*RESOURCES, *ENVIRONMENTS))
        raise ConfigError(f"{file}: resource_type {read.resource_type!r} is not supported: it may be {known}")
    tools: dict[str, Tool] = {}
    described: tuple[Mapping[str, Any], ...] = ()
    if read.tools_module_path is not None:
        tools, described = module_tools(load_module(read.tools_module_path, base=base))
    if read.resource_type == "PythonStateResource":
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
            achieved=_sql_criterion(read.evaluation_criteria or CriteriaIn(), file),
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
    """Whether every expected entry is there; other entries may be as they are."""
    wanted = task.data.get("ground_truth_comparable_state")
    if wanted is None:
        return None
    return all(key in resource.state and resource.state[key] == value for key, value in wanted.items())


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
    """`final_state_query` and the lambda that judges its rows, which is the author's own code; without one, the value
    that it finds has to be true."""
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
