"""Describe tools, read calls and answer them, for authors of environments with tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.render import Tools
from headrace.tool_calls import call_problem, parse_reply, tool_names, with_ids
from headrace.types import Action, Message, ToolCall


def describe_tool(
    name: str,
    description: str,
    properties: Mapping[str, Any] | None = None,
    *,
    required: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Describe a tool as OpenAI does; `properties` are JSON schemas of its arguments, by default all required."""
    arguments = dict(properties or {})
    required_names = list(arguments if required is None else required)
    schema = {"type": "object", "properties": arguments, "required": required_names}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call.

    >>> arguments_of(ToolCall(name="add", arguments='{"a": 1}'))
    {'a': 1}
    """
    arguments = json.loads(call.arguments)
    assert isinstance(arguments, dict), "an Action's calls have a JSON object for arguments"
    return arguments


def tool_message(call: ToolCall, content: str) -> Message:
    """Make the message that answers a call, under its id."""
    return Message(role="tool", content=content, name=call.name, tool_call_id=call.id)


def write_call(name: str, **arguments: Any) -> str:
    """Write a call as JSON, the form in which `Observation.actions` lists calls and solvers make them."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def read_action(text: str, tools: Tools, *, number: int = 0) -> Action:
    """Parse a text of JSON calls into an action, without a model; `number` is that of the turn."""
    names = tool_names(tools)
    parsed = parse_reply(text, None, names)
    calls = with_ids(parsed.calls, 0, number)
    problem = None if calls else call_problem(text, None, names)
    return Action(text=text, content=parsed.content, calls=calls, problem=problem)
