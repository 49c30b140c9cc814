"""Parse calls that are JSON, in OpenAI's shapes: {"name": ..., "arguments": {...}}, a list of them, or one per mark.

Nothing is repaired, and NaN, infinities and lone surrogates, which a tool could not read, make a call malformed.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from headrace.types import ToolCall

PYTHON_TAG = "<|python_tag|>"  # which Llama may put before its calls
_ARGUMENTS = ("arguments", "parameters")
_SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> float:
    """Refuse NaN and infinities, which Python reads and JSON lacks: a tool could not read them."""
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def is_object(arguments: str) -> bool:
    """Tell whether a call's arguments are a JSON object, as they have to be.

    >>> is_object('{"a": 1}'), is_object('[1]'), is_object('{"a"')
    (True, False, False)
    """
    decoded = decode(arguments, after_space(arguments, 0))
    return decoded is not None and isinstance(decoded[0], dict) and not arguments[decoded[1] :].strip()


def parse_bare(text: str, tools: Collection[str]) -> tuple[ToolCall, ...] | None:
    """Parse a text that is only JSON, as Llama writes calls; several are separated by semicolons."""
    position = after_space(text, 0)
    if text.startswith(PYTHON_TAG, position):
        position = after_space(text, position + len(PYTHON_TAG))
    calls: list[ToolCall] = []
    while True:
        decoded = decode(text, position)
        if decoded is None:
            return None
        parsed = of_known_tools(calls_in(decoded[0], text[position : decoded[1]]), tools)
        if parsed is None:
            return None
        calls += parsed
        position = after_space(text, decoded[1])
        if position == len(text):
            return tuple(calls)
        if text[position] != ";":
            return None
        position = after_space(text, position + 1)


def parse_marked(
    text: str, start: int, closing: str, tools: Collection[str]
) -> tuple[tuple[ToolCall, ...], int] | None:
    """Parse the JSON behind an opening mark; return its calls and where the text behind the closing mark begins."""
    start = after_space(text, start)
    decoded = decode(text, start)
    if decoded is None:
        return None
    value, end = decoded
    calls = of_known_tools(calls_in(value, text[start:end]), tools)
    position = after_space(text, end)
    if calls is None or not text.startswith(closing, position):
        return None
    return calls, position + len(closing)


_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*")


def parse_named(text: str, start: int, closing: str, tools: Collection[str]) -> tuple[tuple[ToolCall, ...], int] | None:
    """Parse a name and its arguments behind Mistral's mark: name[ARGS]{...}."""
    head = _NAMED.match(text, start)
    if head is None:
        return None
    return _with_object(text, head.group(1), head.end(), closing, tools)


_NAME_LINE = re.compile(r"\s*([\w.-]+)\n\s*")


def parse_name_line(
    text: str, start: int, closing: str, tools: Collection[str]
) -> tuple[tuple[ToolCall, ...], int] | None:
    """Parse a name on a line of its own, and its arguments below, as GLM-4 writes them."""
    head = _NAME_LINE.match(text, start)
    if head is None:
        return None
    return _with_object(text, head.group(1), head.end(), closing, tools)


def _with_object(
    text: str, name: str, start: int, closing: str, tools: Collection[str]
) -> tuple[tuple[ToolCall, ...], int] | None:
    decoded = decode(text, start)
    if decoded is None or not isinstance(decoded[0], dict) or name not in tools:
        return None
    position = after_space(text, decoded[1])
    if not text.startswith(closing, position):
        return None
    return (ToolCall(name=name, arguments=text[start : decoded[1]]),), position + len(closing)


def of_known_tools(calls: Iterable[ToolCall] | None, tools: Collection[str]) -> tuple[ToolCall, ...] | None:
    """Return the calls if there are any and all are of known tools, else None."""
    calls = tuple(calls or ())
    return calls if calls and all(call.name in tools for call in calls) else None


def calls_in(value: Any, written: str) -> tuple[ToolCall, ...] | None:
    """Read a call, a list of calls, or {"tool_calls": [...]}; returns None if anything in it is not a call."""
    if isinstance(value, dict) and list(value) == ["tool_calls"]:
        value = value["tool_calls"]
    items = value if isinstance(value, list) else [value]
    calls = [_call(item, written) for item in items]
    return tuple(call for call in calls if call is not None) if calls and None not in calls else None


def _call(item: Any, written: str) -> ToolCall | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    key = next((key for key in _ARGUMENTS if key in item), None)
    arguments = item[key] if key is not None else {}
    if isinstance(arguments, str):  # OpenAI's own shape: JSON in a string
        return ToolCall(name=item["name"], arguments=arguments) if is_object(arguments) else None
    if not isinstance(arguments, dict):
        return None
    text = next(_written(arguments, written), json.dumps(arguments, ensure_ascii=False))
    return ToolCall(name=item["name"], arguments=text)


def _written(arguments: dict[str, Any], written: str) -> Iterator[str]:
    """Find the arguments as the model wrote them, spaces and all."""
    for key in re.finditer(r'"(?:arguments|parameters)"\s*:\s*', written):
        decoded = decode(written, key.end())
        if decoded is not None and decoded[0] == arguments:
            yield written[key.end() : decoded[1]]


def decode(text: str, start: int) -> tuple[Any, int] | None:
    """Decode the JSON object or list at `start`, and return it with its end; None if it is malformed.

    A lone surrogate, which JSON can write and UTF-8 cannot, counts as malformed: a tool or a template would fail on it.
    """
    if text[start : start + 1] not in ("{", "["):
        return None
    return decode_any(text, start)


def decode_any(text: str, start: int) -> tuple[Any, int] | None:
    """Decode JSON of any kind at `start`, as `decode` does objects and lists."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value, end


def after_space(text: str, start: int) -> int:
    """Return the position of the next character that is no white space."""
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()
