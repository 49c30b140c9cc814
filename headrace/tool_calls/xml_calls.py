"""Parse calls whose arguments are elements of text: Qwen3.5's <parameter=a> and GLM's <arg_key>.

The text of an argument says its value only with the type in the tool's schema: a string is the text itself, anything
else is JSON. Without a schema, text that is a JSON number, boolean, null, list or object is that.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from headrace.tool_calls.json_calls import after_space, decode_any
from headrace.types import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_NAME = re.compile(r"\s*([\w.-]+)\s*")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}  # as templates without `tojson` write them


def parse_function(
    text: str, start: int, closing: str, tools: Collection[str]
) -> tuple[tuple[ToolCall, ...], int] | None:
    """Parse <function=name><parameter=a>value</parameter></function>; a value's first and last line break are not its.

    Returns the call and where the text behind `closing` begins; None if anything is malformed.
    """
    head = _FUNCTION.match(text, start)
    if head is None or head.group(1) not in tools:
        return None
    arguments: dict[str, str] = {}
    position = head.end()
    while (pair := _PARAMETER.match(text, position)) is not None:
        name, value = pair.groups()
        if name in arguments:
            return None
        arguments[name] = value.removeprefix("\n").removesuffix("\n")
        position = pair.end()
    end = _FUNCTION_END.match(text, position)
    if end is None or not text.startswith(closing, end.end()):
        return None
    return (_call(head.group(1), arguments, tools),), end.end() + len(closing)


def parse_pairs(text: str, start: int, closing: str, tools: Collection[str]) -> tuple[tuple[ToolCall, ...], int] | None:
    """Parse name<arg_key>a</arg_key><arg_value>value</arg_value>.

    Returns the call and where the text behind `closing` begins; None if anything is malformed.
    """
    head = _NAME.match(text, start)
    if head is None or head.group(1) not in tools:
        return None
    arguments: dict[str, str] = {}
    position = head.end()
    while (pair := _PAIR.match(text, position)) is not None:
        name, value = pair.groups()
        if name in arguments:
            return None
        arguments[name] = value
        position = pair.end()
    position = after_space(text, position)
    if not text.startswith(closing, position):
        return None
    return (_call(head.group(1), arguments, tools),), position + len(closing)


def _call(name: str, arguments: Mapping[str, str], tools: Collection[str]) -> ToolCall:
    schema: Any = tools[name] if isinstance(tools, Mapping) else {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    described = properties if isinstance(properties, Mapping) else {}
    values = {key: argument_value(text, described.get(key)) for key, text in arguments.items()}
    return ToolCall(name=name, arguments=json.dumps(values, ensure_ascii=False))


def argument_value(text: str, schema: Any) -> Any:
    """Read the value of an argument from its text; text that is not of the schema's type stays text.

    >>> argument_value("17", {"type": "string"}), argument_value("17", {"type": "integer"}), argument_value("a", None)
    ('17', 17, 'a')
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    if kind is not None and text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    start = after_space(text, 0)
    decoded = decode_any(text, start)
    if decoded is None or text[decoded[1] :].strip() or isinstance(decoded[0], str):
        return text
    return decoded[0]
