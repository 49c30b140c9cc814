"""Play the resources of reward-kit's task definitions as environments with tools: a dictionary, a SQLite database.

Each episode has a copy of its own, so the episodes of a group start alike. Tools are functions of the author's module,
with the resource in a parameter of that name; a database also has `execute_sql`. A turn without a call is the last.
The reward is 1 when the state becomes the expected one and -1 when it stops being so, so that an episode's sum is 1 if
it ends in the expected state. Tools are the author's code and run in this process, on threads.
"""

import asyncio
import copy
import hashlib
import inspect
import json
import sqlite3
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from headrace.envs.tool_env import arguments_of, describe_tool, tool_message
from headrace.errors import ConfigError, DataError, EpisodeError, boundary
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall

RESOURCE_PARAMETERS = ("resource", "db_resource")
JSON_TYPES: Mapping[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
MAX_ROWS, MAX_SQL_STEPS = 1000, 10_000_000
_DENIED = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)  # a query must not reach other files
Tool = Callable[..., Any]


class Resource(Protocol):
    """The state that tools change. Two keys are equal if and only if the states are."""

    def key(self) -> str: ...

    def close(self) -> None: ...


class PythonState:
    """A dictionary. Tools read a copy and set it back, or work on `state` itself."""

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self.state: dict[str, Any] = copy.deepcopy(dict(initial))

    def get_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.state = copy.deepcopy(dict(state))

    def key(self) -> str:
        return json.dumps(self.state, sort_keys=True, ensure_ascii=False, default=str)

    def close(self) -> None:
        self.state = {}


class SqliteState:
    """SQLite in memory, filled by a script. A query reaches nothing but this database and ends after a while."""

    def __init__(self, script: str) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        with boundary(DataError, "the database cannot be set up"):
            self._db.executescript(script)
        self._steps = 0
        self._watch_queries(True)

    def _watch_queries(self, on: bool) -> None:
        self._db.set_authorizer(_allowed if on else None)
        self._db.set_progress_handler(self._over_limit if on else None, 1000)

    def _over_limit(self) -> int:
        self._steps += 1000
        return int(self._steps > MAX_SQL_STEPS)

    def execute(self, query: str, parameters: Any = (), fetch_mode: str | None = None) -> Any:
        """Run a query; return rows as dicts ("all", "one"), one value ("val"), or how many rows changed."""
        self._steps = 0
        cursor = self._db.execute(query, parameters or ())
        if fetch_mode is None:
            return {"rowcount": cursor.rowcount}
        names = [column[0] for column in cursor.description or ()]
        if fetch_mode == "all":
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchmany(MAX_ROWS)]
        row = cursor.fetchone()
        if fetch_mode == "val":
            return row[0] if row else None
        return dict(zip(names, row, strict=True)) if row else None

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> Any:
        """Run a query as reward-kit's tools request it."""
        assert action_name == "execute_sql"
        return self.execute(action_params["query"], action_params.get("parameters"), action_params.get("fetch_mode"))

    def key(self) -> str:
        self._watch_queries(False)  # Python's dump asks for pragmas that no query may, and may take longer than a query
        try:
            dump = "\n".join(self._db.iterdump())
        finally:
            self._watch_queries(True)
        return hashlib.blake2b(dump.encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        self._db.close()


def _allowed(code: int, first: str | None, *_: str | None) -> int:
    denied = code in _DENIED or (code == sqlite3.SQLITE_PRAGMA and first != "table_info")
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


EXECUTE_SQL = describe_tool(
    "execute_sql",
    'Run a SQL query. fetch_mode: "all" rows, "one" row, one value ("val"); without it, the number of changed rows.',
    {
        "query": {"type": "string"},
        "parameters": {"type": "array", "items": {}},
        "fetch_mode": {"type": "string", "enum": ["one", "all", "val"]},
    },
    required=["query"],
)


# --- the environment -------------------------------------------------------------------------------------------------


class ResourceEnv:
    """Plays a task with tools that change a resource.

    `open_resource(task)` makes an episode's resource, and `achieved(resource, task)` judges it; it returns None if the
    task has no criterion. `tools` are functions by name, `described` the descriptions that the policy is shown.
    """

    blocking = True

    def __init__(
        self,
        *,
        open_resource: Callable[[Task], Resource],
        achieved: Callable[[Any, Task], bool | None],
        tools: Mapping[str, Tool],
        described: tuple[Mapping[str, Any], ...],
    ) -> None:
        self._open, self._achieved, self._tools, self._described = open_resource, achieved, tools, described
        self._resource: Resource | None = None
        self._task: Task | None = None
        self._paid = 0.0

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._resource, self._task, self._paid = self._open(task), task, 0.0
        return self._observe()

    def step(self, action: str) -> StepResult:
        """End the episode: without tools, any text is the answer."""
        return self._result(done=True)

    def call(self, action: Action) -> StepResult:
        if action.problem is not None:
            return self._result(Message(role="user", content=action.problem), valid=False)
        if not action.calls:
            return self._result(done=True)
        answers = [self._make_call(call) for call in action.calls]
        messages = [tool_message(call, text) for call, (text, _) in zip(action.calls, answers, strict=True)]
        return self._result(*messages, valid=all(possible for _, possible in answers))

    def close(self) -> None:
        if self._resource is not None:
            self._resource.close()
        self._resource = None

    def _make_call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; return its result as JSON and whether the arguments fit; an error of the tool is a result."""
        tool, arguments = self._tools[call.name], arguments_of(call)
        resources = {name: self._resource for name in RESOURCE_PARAMETERS if name in inspect.signature(tool).parameters}
        try:
            inspect.signature(tool).bind(**arguments, **resources)
        except TypeError as exc:
            return json.dumps({"error": str(exc)}), False
        try:
            with boundary(EpisodeError, call.name):
                returned = tool(**arguments, **resources)
                if inspect.isawaitable(returned):
                    returned = asyncio.run(_awaited(returned))
        except EpisodeError as exc:
            return json.dumps({"error": str(exc)}, ensure_ascii=False), True
        return json.dumps(returned, ensure_ascii=False, default=str), True

    def _result(self, *messages: Message, done: bool = False, valid: bool = True) -> StepResult:
        assert self._task is not None
        achieved = self._achieved(self._resource, self._task)
        value = float(bool(achieved))
        reward, self._paid = value - self._paid, value
        return StepResult(observation=self._observe(*messages), reward=reward, done=done, valid=valid, success=achieved)

    def _observe(self, *messages: Message) -> Observation:
        assert self._resource is not None, "the episode is over"
        return Observation(messages=messages, state=self._resource.key(), tools=self._described)


async def _awaited(value: Any) -> Any:
    return await value


# --- tools of a module -----------------------------------------------------------------------------------------------


def module_tools(module: ModuleType) -> tuple[dict[str, Tool], tuple[Mapping[str, Any], ...]]:
    """Return the functions of a module that take a resource, or those of a registry in it, and their descriptions.

    A registry is an object that has `get_tools` and `get_openai_tools`.
    """
    for registry in vars(module).values():
        if not isinstance(registry, type) and all(
            hasattr(registry, verb) for verb in ("get_tools", "get_openai_tools")
        ):
            return dict(registry.get_tools()), tuple(map(_as_tool, registry.get_openai_tools()))
    tools: dict[str, Tool] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
        and set(RESOURCE_PARAMETERS) & set(inspect.signature(value).parameters)
    }
    if not tools:
        raise ConfigError(
            f"{module.__name__} has no tools: let it have functions with a parameter named resource, or a registry"
        )
    return tools, tuple(_described(name, tool) for name, tool in tools.items())


def _as_tool(described: Mapping[str, Any]) -> Mapping[str, Any]:
    return described if "function" in described else {"type": "function", "function": described}


def _described(name: str, tool: Tool) -> Mapping[str, Any]:
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(tool).parameters.values()
        if parameter.name not in RESOURCE_PARAMETERS
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    properties = {key: _schema(parameter.annotation) for key, parameter in parameters.items()}
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    summary = (inspect.getdoc(tool) or name).splitlines()[0]
    return describe_tool(name, summary, properties, required=required)


def _schema(annotation: Any) -> dict[str, str]:
    json_type = JSON_TYPES.get(getattr(annotation, "__origin__", annotation))
    return {} if json_type is None else {"type": json_type}
