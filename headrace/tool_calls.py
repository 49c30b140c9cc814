"""Parse tool calls in a model's text: in the form of its chat template, or as plain JSON in OpenAI's shapes.

The form is read off the template: the text around the JSON of a call that it renders. Anything but a well-formed call
of a known tool leaves the whole reply as text; nothing is repaired. In the other direction, `extended_prompt` continues
a conversation with calls from the tokens that were sampled. Knows nothing of requests, episodes or engines.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from headrace.algo.random import derive_seed
from headrace.errors import DataError, EpisodeError, ModelError
from headrace.render import Renderer, Tools
from headrace.types import IntArray, Message, ToolCall


def _refuse_constant(name: str) -> float:
    """Refuse NaN and infinities, which Python reads and JSON lacks: a tool could not read them."""
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# some templates want ids of nine characters
_PROBE = ToolCall(name="probe_tool", arguments='{"probe_argument": 17}', id="abcdefghi")
_ARGUMENTS = ("arguments", "parameters")
_SPACE = re.compile(r"\s*")
_LIKE_A_CALL = re.compile(r'\s*\[?\s*\{\s*"(?:name|function|tool_calls)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """The text that a chat template puts before and after the JSON of a call, without white space at its ends."""

    opening: str  # never empty
    closing: str

    def __post_init__(self) -> None:
        assert self.opening == self.opening.strip() != ""
        assert self.closing == self.closing.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply, divided into text and calls."""

    content: str  # the text without the calls
    calls: tuple[ToolCall, ...] = ()  # without ids yet


def tool_names(tools: Tools) -> tuple[str, ...]:
    """Return the names of described tools. Raises EpisodeError on a description that is not in OpenAI's form."""
    try:
        return tuple(str(tool["function"]["name"]) for tool in tools)
    except (KeyError, TypeError) as exc:
        raise EpisodeError(
            'a tool is described otherwise than as {"type": "function", "function": {"name": ..., "parameters": ...}}'
        ) from exc


@lru_cache(maxsize=4)
def find_form(renderer: Renderer) -> ToolForm | None:
    """Find the form in which the chat template writes a call.

    Returns None if it writes calls as bare JSON, not as JSON, or not at all.
    """
    question = Message(role="user", content="a")
    try:
        plain = _reply(renderer, question, Message(role="assistant", content=""))
        called = _reply(renderer, question, Message(role="assistant", content="", tool_calls=(_PROBE,)))
    except (DataError, ModelError):  # the template takes no calls
        return None
    shared = next((index for index, pair in enumerate(zip(plain, called, strict=False)) if len(set(pair)) > 1), None)
    text = called[len(plain) if shared is None else shared :]
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        decoded = _decode(text, start)
        if decoded is None:
            continue
        value, end = decoded
        if [call.name for call in _calls(value, text[start:end]) or ()] == ["probe_tool"]:
            opening, closing = text[:start].strip(), text[end:].strip()
            return ToolForm(opening=opening, closing=closing) if opening else None
    return None


def parse_reply(text: str, form: ToolForm | None, tools: Collection[str]) -> ParsedReply:
    """Divide `text` into calls and the text around them; without a call, return the text as it is.

    >>> form = ToolForm(opening="<call>", closing="</call>")
    >>> parse_reply('ok <call>{"name": "add", "arguments": {"a": 1}}</call>', form, {"add"})
    ParsedReply(content='ok', calls=(ToolCall(name='add', arguments='{"a": 1}', id=''),))
    """
    if form is not None and form.opening in text:
        return _parse_formed(text, form, tools) or ParsedReply(content=text)
    decoded = _decode(text, _after_space(text, 0))
    if decoded is None or text[decoded[1] :].strip():
        return ParsedReply(content=text)
    calls = _of_known_tools(_calls(decoded[0], text[: decoded[1]]), tools)
    return ParsedReply(content="", calls=calls) if calls else ParsedReply(content=text)


def call_problem(text: str, form: ToolForm | None, tools: Collection[str]) -> str | None:
    """Tell the model what is wrong with a text in which `parse_reply` found no call.

    Returns None if the text does not attempt a call.
    """
    if form is not None and form.opening in text:
        return how_to_call(tools, form)
    return how_to_call(tools) if _LIKE_A_CALL.match(text) else None


def how_to_call(tools: Collection[str], form: ToolForm | None = None) -> str:
    """Tell the model how to write a call.

    >>> how_to_call(["sub", "add"])
    'this is no call that can be made: write {"name": ..., "arguments": {...}} with one of the tools add, sub'
    """
    where = "" if form is None else f" between {form.opening} and {form.closing or 'the end'}"
    return (
        f'this is no call that can be made: write {{"name": ..., "arguments": {{...}}}}{where} with one of the tools '
        f"{', '.join(sorted(tools))}"
    )


def is_object(arguments: str) -> bool:
    """Tell whether a call's arguments are a JSON object, as they have to be.

    >>> is_object('{"a": 1}'), is_object('[1]'), is_object('{"a"')
    (True, False, False)
    """
    decoded = _decode(arguments, _after_space(arguments, 0))
    return decoded is not None and isinstance(decoded[0], dict) and not arguments[decoded[1] :].strip()


def with_ids(calls: Sequence[ToolCall], seed: int, number: int) -> tuple[ToolCall, ...]:
    """Give the calls of turn `number` ids of nine digits, which some templates insist on."""
    return tuple(
        replace(call, id=f"{derive_seed(seed, number, index) % 10**9:09d}") for index, call in enumerate(calls)
    )


def extended_prompt(
    renderer: Renderer,
    tokens_so_far: IntArray,
    history: Sequence[Message],
    replies: Sequence[Message],
    new: Sequence[Message],
    tools: Tools | None,
) -> tuple[IntArray, tuple[Message, ...]] | None:
    """Extend the tokens so far by the new messages, and return the prompt with the messages as it renders them.

    `history` are the messages before the turn that was sampled last, and `replies` the ways to write that turn: the
    text as it was sampled, and its calls as the template writes them. Returns None if no way renders to
    `tokens_so_far`.
    """
    for reply in replies:
        before = (*history, reply)
        try:
            prompt = renderer.continue_prompt(tokens_so_far, before, new, tools)
        except DataError:  # a template may insist on calls before their results
            continue
        if prompt is not None:
            return prompt, (*before, *new)
    return None


def _parse_formed(text: str, form: ToolForm, tools: Collection[str]) -> ParsedReply | None:
    """Parse calls in the template's form.

    Returns None if any call is malformed: a program must not act on half of a reply.
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (opened := text.find(form.opening, position)) >= 0:
        texts.append(text[position:opened])
        start = _after_space(text, opened + len(form.opening))
        decoded = _decode(text, start)
        if decoded is None:
            return None
        value, end = decoded
        position = _after_space(text, end)
        parsed = _of_known_tools(_calls(value, text[start:end]), tools)
        if not parsed or not text.startswith(form.closing, position):
            return None
        calls += parsed
        position += len(form.closing)
    texts.append(text[position:])
    return ParsedReply(content="".join(texts).strip(), calls=tuple(calls))


def _of_known_tools(calls: Iterable[ToolCall] | None, tools: Collection[str]) -> tuple[ToolCall, ...] | None:
    """Return the calls if there are any and all are of known tools, else None."""
    calls = tuple(calls or ())
    return calls if calls and all(call.name in tools for call in calls) else None


def _calls(value: Any, written: str) -> tuple[ToolCall, ...] | None:
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
        decoded = _decode(written, key.end())
        if decoded is not None and decoded[0] == arguments:
            yield written[key.end() : decoded[1]]


def _decode(text: str, start: int) -> tuple[Any, int] | None:
    """Decode the JSON object or list at `start`, and return it with its end; None if it is malformed.

    A lone surrogate, which JSON can write and UTF-8 cannot, counts as malformed: a tool or a template would fail on it.
    """
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value, end


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()


def _reply(renderer: Renderer, question: Message, answer: Message) -> str:
    rendered = renderer.conversation([question, answer])
    assert len(rendered) == 1
    return renderer.spoken(rendered[0].tokens[rendered[0].trained])
