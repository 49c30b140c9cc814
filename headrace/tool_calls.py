"""Tool calls in what a model wrote: in the form its own chat template writes them, or as plain JSON in OpenAI's shapes.

The form is read off the template: what stands around the JSON of a call that it renders. What is not a well-formed
call of a known tool is text, all of it; nothing is repaired. And back: a conversation with calls in it goes on from the
tokens that were sampled. Knows nothing of requests, episodes or engines.
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


def _no_number(name: str) -> float:
    """NaN and infinities, which Python reads and JSON has not: who is called could not read them."""
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_number)
_PROBE = ToolCall(name="probe_tool", arguments='{"probe_argument": 17}', id="abcdefghi")  # some templates want nine
_ARGUMENTS = ("arguments", "parameters")
_SPACE = re.compile(r"\s*")
_LIKE_A_CALL = re.compile(r'\s*\[?\s*\{\s*"(?:name|function|tool_calls)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """What a chat template puts before and after the JSON of a call; never white space at the ends, `opening` never
    empty."""

    opening: str
    closing: str

    def __post_init__(self) -> None:
        assert self.opening == self.opening.strip() != ""
        assert self.closing == self.closing.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply: `content` is what is not a call. Calls have no ids yet."""

    content: str
    calls: tuple[ToolCall, ...] = ()


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
    """How the chat template writes a call; None: as bare JSON, as something else than JSON, or not at all."""
    question = Message(role="user", content="a")
    try:
        plain = _reply(renderer, question, Message(role="assistant", content=""))
        called = _reply(renderer, question, Message(role="assistant", content="", tool_calls=(_PROBE,)))
    except (DataError, ModelError):  # the template takes no calls
        return None
    shared = next((index for index, pair in enumerate(zip(plain, called, strict=False)) if len(set(pair)) > 1), None)
    text = called[len(plain) if shared is None else shared :]
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        found = _decode(text, start)
        if found is not None and [call.name for call in _calls(found[0], text[start : found[1]]) or ()] == [
            "probe_tool"
        ]:
            opening, closing = text[:start].strip(), text[found[1] :].strip()
            return ToolForm(opening=opening, closing=closing) if opening else None
    return None


def parse_reply(text: str, form: ToolForm | None, tools: Collection[str]) -> ParsedReply:
    """The calls in `text` and what is said around them; without a call, the text as it is.

    >>> form = ToolForm(opening="<call>", closing="</call>")
    >>> parse_reply('ok <call>{"name": "add", "arguments": {"a": 1}}</call>', form, {"add"})
    Parsed(content='ok', calls=(ToolCall(name='add', arguments='{"a": 1}', id=''),))
    """
    if form is not None and form.opening in text:
        return _formed(text, form, tools) or ParsedReply(content=text)
    found = _decode(text, _after_space(text, 0))
    if found is None or text[found[1] :].strip():
        return ParsedReply(content=text)
    calls = _known(_calls(found[0], text[: found[1]]), tools)
    return ParsedReply(content="", calls=calls) if calls else ParsedReply(content=text)


def call_problem(text: str, form: ToolForm | None, tools: Collection[str]) -> str | None:
    """What is wrong with a text that `parse_reply` found no call in, for whoever wrote it; None: it tried none."""
    if form is not None and form.opening in text:
        return how_to_call(tools, form)
    return how_to_call(tools) if _LIKE_A_CALL.match(text) else None


def how_to_call(tools: Collection[str], form: ToolForm | None = None) -> str:
    """
    >>> how_to_call(["sub", "add"])
    'this is no call that can be made: write {"name": ..., "arguments": {...}} with one of the tools add, sub'
    """
    where = "" if form is None else f" between {form.opening} and {form.closing or 'the end'}"
    return (
        f'this is no call that can be made: write {{"name": ..., "arguments": {{...}}}}{where} with one of the tools '
        f"{', '.join(sorted(tools))}"
    )


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are a JSON object, as they have to be.

    >>> is_object('{"a": 1}'), is_object('[1]'), is_object('{"a"')
    (True, False, False)
    """
    found = _decode(arguments, _after_space(arguments, 0))
    return found is not None and isinstance(found[0], dict) and not arguments[found[1] :].strip()


def with_ids(calls: Sequence[ToolCall], seed: int, number: int) -> tuple[ToolCall, ...]:
    """The calls of turn `number` with ids of nine digits, which some templates insist on."""
    return tuple(
        replace(call, id=f"{derive_seed(seed, number, index) % 10**9:09d}") for index, call in enumerate(calls)
    )


def extended_prompt(
    renderer: Renderer,
    seen: IntArray,
    told: Sequence[Message],
    replies: Sequence[Message],
    new: Sequence[Message],
    tools: Tools | None,
) -> tuple[IntArray, tuple[Message, ...]] | None:
    """The tokens `seen` so far and what the template adds for the new messages, and the messages as they stand there.

    `told` are the messages before the turn that was sampled last, and `replies` the ways to write that turn: the text
    as it was sampled, the calls in it as the template writes them. None if no way gives the tokens that were seen.
    """
    for reply in replies:
        before = (*told, reply)
        try:
            prompt = renderer.continue_prompt(seen, before, new, tools)
        except DataError:  # a template may insist on calls before their results
            continue
        if prompt is not None:
            return prompt, (*before, *new)
    return None


def _formed(text: str, form: ToolForm, tools: Collection[str]) -> ParsedReply | None:
    """None as soon as one call is malformed: a program must not act on half of what was meant."""
    said: list[str] = []
    calls: list[ToolCall] = []
    place = 0
    while (opened := text.find(form.opening, place)) >= 0:
        said.append(text[place:opened])
        start = _after_space(text, opened + len(form.opening))
        found = _decode(text, start)
        if found is None:
            return None
        place = _after_space(text, found[1])
        known = _known(_calls(found[0], text[start : found[1]]), tools)
        if not known or not text.startswith(form.closing, place):
            return None
        calls += known
        place += len(form.closing)
    said.append(text[place:])
    return ParsedReply(content="".join(said).strip(), calls=tuple(calls))


def _known(calls: Iterable[ToolCall] | None, tools: Collection[str]) -> tuple[ToolCall, ...] | None:
    found = tuple(calls or ())
    return found if found and all(call.name in tools for call in found) else None


def _calls(value: Any, written: str) -> tuple[ToolCall, ...] | None:
    """One call, a list of them, or {"tool_calls": [...]}; None if anything in it is not a call."""
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
    """The arguments as the model wrote them, spaces and all."""
    for key in re.finditer(r'"(?:arguments|parameters)"\s*:\s*', written):
        found = _decode(written, key.end())
        if found is not None and found[0] == arguments:
            yield written[key.end() : found[1]]


def _decode(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON object or list that starts there, and where it ends. Half a character, which JSON can write and no text
    can hold, makes it malformed: a tool or a template would fail on it."""
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
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _reply(renderer: Renderer, question: Message, answer: Message) -> str:
    rendered = renderer.conversation([question, answer])
    assert len(rendered) == 1
    return renderer.spoken(rendered[0].tokens[rendered[0].trained])
