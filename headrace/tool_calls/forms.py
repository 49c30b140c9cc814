"""The forms in which families of models write calls, and how a chat template's form is read off it.

| kind | written | models |
|---|---|---|
| json | <tool_call>{"name": ..., "arguments": {...}}</tool_call> | Qwen3, Hermes |
| json | [TOOL_CALLS][{"name": ..., "arguments": {...}}] | Mistral until 2024 |
| function | <tool_call><function=name><parameter=a>1</parameter></function></tool_call> | Qwen3.5, Qwen3-Coder |
| pairs | <tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call> | GLM-4.5 and later |
| named | [TOOL_CALLS]name[ARGS]{...} | Mistral since 2025 |
| name_line | name, and {...} on the next line | GLM-4 |
| channels | <|channel|>commentary to=functions.name<|message|>{...} | gpt-oss |

Bare JSON, which Llama writes, needs no form: it is parsed with every template.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from headrace.errors import DataError, ModelError
from headrace.render import Renderer
from headrace.tool_calls.channels import RECIPIENT
from headrace.tool_calls.json_calls import calls_in, decode, parse_marked, parse_name_line, parse_named
from headrace.tool_calls.xml_calls import parse_function, parse_pairs
from headrace.types import Message, ToolCall

Kind = Literal["json", "function", "pairs", "named", "name_line", "channels"]
# (text, position behind the opening mark, closing mark, tools) -> calls and the position behind the closing mark
CallParser = Callable[[str, int, str, Collection[str]], tuple[tuple[ToolCall, ...], int] | None]

PARSERS: Mapping[Kind, CallParser] = {
    "json": parse_marked,
    "function": parse_function,
    "pairs": parse_pairs,
    "named": parse_named,
    "name_line": parse_name_line,
}
# how a call is written, between the marks
WRITTEN: Mapping[Kind, str] = {
    "json": '{"name": ..., "arguments": {...}}',
    "function": "<function=NAME><parameter=ARGUMENT>VALUE</parameter></function>",
    "pairs": "NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value>",
    "named": "NAME[ARGS]{...}",
    "name_line": "NAME and {...} on the next line",
    "channels": "{...} in the channel commentary, to=functions.NAME",
}
_PROBE_NAME, _PROBE_ARGUMENT = "probe_tool", "probe_argument"
# some templates want ids of nine characters
_PROBE = ToolCall(name=_PROBE_NAME, arguments=f'{{"{_PROBE_ARGUMENT}": 17}}', id="abcdefghi")
# of the kinds that are not JSON in marks: what the probe looks like; before it is the opening, after it the closing
_WRITTEN_PROBES: Mapping[Kind, str] = {
    "function": rf"<function={_PROBE_NAME}>\s*<parameter={_PROBE_ARGUMENT}>\s*17\s*</parameter>\s*</function>",
    "pairs": rf"{_PROBE_NAME}\s*<arg_key>{_PROBE_ARGUMENT}</arg_key>\s*<arg_value>17</arg_value>",
    "named": rf'{_PROBE_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*\{{"{_PROBE_ARGUMENT}":\s*17\}}',
    "name_line": rf'{_PROBE_NAME}\n\s*\{{"{_PROBE_ARGUMENT}":\s*17\}}',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """The form in which a chat template writes a call, and the text before and after it, without white space."""

    opening: str  # empty for a call that is the whole reply
    closing: str
    kind: Kind = "json"

    def __post_init__(self) -> None:
        assert self.opening == self.opening.strip()
        assert self.opening or self.kind == "name_line"
        assert self.closing == self.closing.strip()


@lru_cache(maxsize=4)
def find_form(renderer: Renderer) -> ToolForm | None:
    """Find the form in which the chat template writes a call.

    Returns None if it writes calls as bare JSON, in a form that is not in the table, or not at all.
    """
    question = Message(role="user", content="a")
    try:
        plain = _reply(renderer, question, Message(role="assistant", content=""))
        called = _reply(renderer, question, Message(role="assistant", content="", tool_calls=(_PROBE,)))
    except (DataError, ModelError):  # the template takes no calls
        return None
    if f"{RECIPIENT}{_PROBE_NAME}" in called:
        return ToolForm(opening=RECIPIENT, closing="", kind="channels")
    shared = next((index for index, pair in enumerate(zip(plain, called, strict=False)) if len(set(pair)) > 1), None)
    text = called[len(plain) if shared is None else shared :]
    return _find_written(text) or _find_json(text)


def _find_written(text: str) -> ToolForm | None:
    for kind, pattern in _WRITTEN_PROBES.items():
        probe = re.search(pattern, text)
        if probe is None:
            continue
        opening, closing = text[: probe.start()].strip(), text[probe.end() :].strip()
        if opening or kind == "name_line":
            return ToolForm(opening=opening, closing=closing, kind=kind)
    return None


def _find_json(text: str) -> ToolForm | None:
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        decoded = decode(text, start)
        if decoded is None:
            continue
        value, end = decoded
        if [call.name for call in calls_in(value, text[start:end]) or ()] == [_PROBE_NAME]:
            opening, closing = text[:start].strip(), text[end:].strip()
            return ToolForm(opening=opening, closing=closing) if opening else None
    return None


def _reply(renderer: Renderer, question: Message, answer: Message) -> str:
    rendered = renderer.conversation([question, answer])
    assert len(rendered) == 1
    return renderer.spoken(rendered[0].tokens[rendered[0].trained])
