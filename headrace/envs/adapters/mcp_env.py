"""Play with tool servers of the Model Context Protocol (MCP): questions from a file, answered with the server's tools.

Each episode has a server process of its own, or a session of its own with the server at a URL, so what a server keeps
belongs to one episode; `shared = true` gives all episodes of this process one server or session, which is right for a
server that keeps nothing. A turn without a call is the answer and ends the episode. A server gives no rewards and shows
no state, unless tools of it do so: `reward_tool` and `state_tool` are called by the environment and never offered to
the model.
"""

import atexit
import json
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.data.rows import DataSource
from headrace.data.task_rows import load_tasks
from headrace.envs.adapters.mcp_client import McpClient, Tool, connect_server, start_server
from headrace.envs.adapters.optional_package import choose_tasks
from headrace.envs.task_generation import digest_of
from headrace.envs.tool_env import arguments_of, tool_message
from headrace.errors import ConfigError, DataError, EpisodeError, boundary
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall


class McpEnv:
    """Answers questions with the tools of a server.

    `valid` means calls of existing tools with arguments that fit them; others cost a turn, and the server does not see
    them. The model is told what a tool refuses or fails to do.
    """

    deterministic = False  # nothing is known of what a server does
    blocking = True

    def __init__(self) -> None:
        self._server: McpClient | None = None
        self._settings: Mapping[str, Any] = {}
        self._offered: Mapping[str, Tool] = {}
        self._turns_left = 0
        self._lock = threading.Lock()
        self._closed_count = 0  # an episode may be given up on one thread while its server starts on another

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the server, with HEADRACE_SEED and HEADRACE_TASK (the task's data as JSON) in its environment, or
        connect to its URL.

        Raises DataError when the task is not one of this environment, EpisodeError when the server cannot be started.
        """
        if "mcp" not in task.data:
            raise DataError(f"task {task.id} is not of the environment mcp: its data need `mcp`")
        self.close()
        closed_count = self._closed_count
        self._settings = task.data["mcp"]
        self._turns_left = int(self._settings["max_turns"])
        task_json = json.dumps({key: value for key, value in task.data.items() if key != "mcp"})
        if self._settings["shared"]:
            server = SHARED.get(self._settings)
        else:
            server = open_server(self._settings, env={"HEADRACE_SEED": str(seed), "HEADRACE_TASK": task_json})
        with self._lock:
            given_up = self._closed_count != closed_count
            self._server = None if given_up else server
        if given_up:
            if not self._settings["shared"]:
                server.close()
            raise EpisodeError("the environment was closed while its MCP server was starting up")
        self._offered = offered_tools(server.tools, self._settings)
        return self._observe(())

    def step(self, action: str) -> StepResult:
        """End the episode: where there is no tool, any action is the answer."""
        return self.call(Action(text=action, content=action))

    def call(self, action: Action) -> StepResult:
        assert self._turns_left > 0, "the episode is over"
        self._turns_left -= 1
        messages, valid = self._make_calls(action)
        done = valid and not action.calls
        truncated = not done and self._turns_left == 0
        reward = self._reward(action.content) if done or truncated else None
        return StepResult(
            observation=self._observe(messages),
            reward=reward or 0.0,
            done=done,
            truncated=truncated,
            valid=valid,
            success=None if reward is None else done and reward >= 1.0,
        )

    def _make_calls(self, action: Action) -> tuple[tuple[Message, ...], bool]:
        """Make the calls; return the answers and whether all calls are well-formed. If one is not, none is made."""
        if action.problem is not None:
            return (Message(role="user", content=action.problem),), False
        problems = [self._problem(call) for call in action.calls]
        if any(problems):
            other = "not called, because another call of this turn is wrong"
            answers = zip(action.calls, problems, strict=True)
            return tuple(tool_message(call, problem or other) for call, problem in answers), False
        return tuple(self._make_call(call) for call in action.calls), True

    def _problem(self, call: ToolCall) -> str | None:
        return argument_problem(self._offered[call.name].schema, arguments_of(call))

    def _make_call(self, call: ToolCall) -> Message:
        return tool_message(call, self._call_tool(call.name, arguments_of(call)))

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        assert self._server is not None, "reset comes before call"
        return self._server.call(name, arguments, float(self._settings["call_timeout_s"]))

    def _reward(self, answer: str) -> float | None:
        """Call the server's reward tool, with the answer if the tool takes it; return None if there is no such tool."""
        name = self._settings["reward_tool"]
        if not name:
            return None
        assert self._server is not None
        schema = next(tool.schema for tool in self._server.tools if tool.name == name)
        text = self._call_tool(name, {"answer": answer} if "answer" in schema.get("properties", {}) else {})
        with boundary(EpisodeError, f"the reward tool {name} answered {text[:60]!r}, which is not a number"):
            return float(text)

    def _observe(self, messages: tuple[Message, ...]) -> Observation:
        name = self._settings["state_tool"]
        return Observation(
            messages=messages,
            state=digest_of(self._call_tool(name, {})) if name else None,
            tools=tuple(_described(tool) for tool in self._offered.values()),
        )

    def close(self) -> None:
        with self._lock:
            self._closed_count += 1
            server, self._server = self._server, None
        if server is not None and not self._settings["shared"]:
            server.close()


class SharedServers:
    """Keeps one server for each command or URL, opened when first used and again if it has ended."""

    def __init__(self) -> None:
        self._servers: dict[str | tuple[str, ...], McpClient] = {}
        self._lock = threading.Lock()

    def get(self, settings: Mapping[str, Any]) -> McpClient:
        key = settings.get("url") or tuple(settings["command"])
        with self._lock:
            server = self._servers.get(key)
            if server is None or not server.alive:
                if server is not None:
                    server.close()
                server = self._servers[key] = open_server(settings)
            return server

    def close(self) -> None:
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()


SHARED = SharedServers()
atexit.register(SHARED.close)


def open_server(settings: Mapping[str, Any], env: Mapping[str, str] | None = None) -> McpClient:
    """Connect to the URL of the settings, or start their command with `env`; raises EpisodeError if that fails."""
    url = settings.get("url")
    return connect_server(url) if url else start_server(settings["command"], env=env)


def offered_tools(tools: Sequence[Tool], settings: Mapping[str, Any]) -> dict[str, Tool]:
    """Return the tools that the model may call; raises ConfigError if one that the settings name is missing."""
    private = [settings[key] for key in ("reward_tool", "state_tool") if settings[key]]
    names = [tool.name for tool in tools]
    for name in private:
        if name not in names:
            raise ConfigError(f"the MCP server has no tool {name}: it has {', '.join(names) or 'none'}")
    return {tool.name: tool for tool in tools if tool.name not in private}


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a call's arguments by their names and plain types; the server checks the rest.

    >>> add = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
    >>> [argument_problem(add, call) for call in ({"a": 1, "b": "x"}, {"b": 1}, {"a": True})]
    [None, 'the argument a is missing', 'the argument a must be of type integer']
    """
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name} is missing"
    properties = schema.get("properties", {})
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name}: there are {', '.join(properties) or 'none'}"
        json_type = properties[name].get("type")
        allowed = _TYPES.get(json_type) if isinstance(json_type, str) else None
        if allowed is not None and (
            not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        ):
            return f"the argument {name} must be of type {json_type}"
    return None


def _described(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": function}


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    command: list[str] = [],  # noqa: B006 - never changed; its type says what the option takes
    url: str = "",
    tasks: str = "",
    shared: bool = False,
    reward_tool: str = "",
    state_tool: str = "",
    call_timeout_s: float = 30.0,
    max_turns: int = 10,
) -> list[Task]:
    """Choose `size` of the questions in the JSONL file `tasks`, for the server that `command` starts or `url` names.

    The server is opened once, to see that it is there and has the tools. Raises ConfigError if not.
    """
    if not (command or url) or not tasks:
        raise ConfigError(
            'the environment mcp needs the options command (or url) and tasks: command = ["python", "server.py"], '
            'tasks = "questions.jsonl", say'
        )
    if command and url:
        raise ConfigError("the environment mcp has both command and url: leave one of the two options out")
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]}: correct the option command of the environment mcp")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"the option url of the environment mcp is {url!r}: write http://HOST:PORT/mcp, say")
    settings = {
        **({"url": url} if url else {"command": command}),
        "shared": shared,
        "reward_tool": reward_tool,
        "state_tool": state_tool,
        "call_timeout_s": call_timeout_s,
        "max_turns": max_turns,
    }
    try:
        server = open_server(settings)
    except EpisodeError as exc:
        remedy = (
            "correct the option url of the environment mcp" if url else f"try the command {shlex.join(command)} by hand"
        )
        raise ConfigError(f"{exc}: {remedy}") from exc
    server.close()
    offered_tools(server.tools, settings)
    questions = load_tasks(DataSource(type="jsonl", path=tasks))
    return choose_tasks("mcp", questions, size, seed, split=split, settings=settings, what=tasks)
