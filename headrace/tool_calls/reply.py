"""Divide a reply into text, reasoning and tool calls, in the form of the model's chat template or as bare JSON.

Anything but a well-formed call of a known tool leaves the whole reply as text; nothing is repaired, and what a model
writes while it thinks is no call. In the other direction, `extended_prompt` continues a conversation with calls from
the tokens that were sampled. Knows nothing of requests, episodes or engines.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.algo.random import derive_seed
from headrace.errors import DataError, EpisodeError
from headrace.render import PlacedTokens, Renderer, Tools
from headrace.tool_calls.channels import parse_channels
from headrace.tool_calls.forms import PARSERS, WRITTEN, ToolForm
from headrace.tool_calls.json_calls import PYTHON_TAG, parse_bare
from headrace.tool_calls.reasoning import find_reasoning
from headrace.types import IntArray, Message, ToolCall

_LIKE_A_CALL = re.compile(r'\s*(?:<\|python_tag\|>)?\s*\[?\s*\{\s*"(?:name|function|tool_calls)"')
assert PYTHON_TAG == "<|python_tag|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply, divided into text and calls."""

    # the text without the calls. It begins with the reasoning, in its marks, as the template renders it again; of
    # gpt-oss's channels it is the answer, or before a call what the template takes for it: a preamble, or the reasoning
    content: str
    calls: tuple[ToolCall, ...] = ()  # without ids yet
    reasoning: str = ""  # without its marks


def tool_names(tools: Tools) -> tuple[str, ...]:
    """Return the names of described tools. Raises EpisodeError on a description that is not in OpenAI's form."""
    try:
        return tuple(str(tool["function"]["name"]) for tool in tools)
    except (KeyError, TypeError) as exc:
        raise EpisodeError(
            'a tool is described otherwise than as {"type": "function", "function": {"name": ..., "parameters": ...}}'
        ) from exc


def tool_schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments of described tools by name. Raises EpisodeError as `tool_names` does."""
    schemas = (tool["function"].get("parameters") for tool in tools if tool_names([tool]))
    return {
        name: schema if isinstance(schema, Mapping) else {}
        for name, schema in zip(tool_names(tools), schemas, strict=True)
    }


def parse_reply(text: str, form: ToolForm | None, tools: Collection[str]) -> ParsedReply:
    """Divide `text` into reasoning, calls and the text around them; without a call, the content is the text as it is.

    `tools` are names, or better schemas of arguments by name: some forms write a string and a number alike.

    >>> form = ToolForm(opening="<call>", closing="</call>")
    >>> parse_reply('ok <call>{"name": "add", "arguments": {"a": 1}}</call>', form, {"add"})
    ParsedReply(content='ok', calls=(ToolCall(name='add', arguments='{"a": 1}', id=''),), reasoning='')
    """
    if form is not None and form.kind == "channels":
        return _parse_channels(text, tools)
    block = find_reasoning(text)
    whole = None if block.opened else _parse_answer(text, form, tools)
    if whole is not None and not find_reasoning(whole.content).end:  # what seemed to end a block is in an argument
        return whole
    parsed = _parse_answer(text[block.end :], form, tools)
    if parsed is None:
        return ParsedReply(content=text, reasoning=block.text)
    content = (text[: block.end] + parsed.content).strip()
    return ParsedReply(content=content, calls=parsed.calls, reasoning=block.text)


def call_problem(text: str, form: ToolForm | None, tools: Collection[str]) -> str | None:
    """Tell the model what is wrong with a text in which `parse_reply` found no call.

    Returns None if the text does not attempt a call.
    """
    answer = text[find_reasoning(text).end :]
    if form is not None and form.opening and form.opening in answer:
        return how_to_call(tools, form)
    return how_to_call(tools) if _LIKE_A_CALL.match(answer) else None


def how_to_call(tools: Collection[str], form: ToolForm | None = None) -> str:
    """Tell the model how to write a call.

    >>> how_to_call(["sub", "add"])
    'this is no call that can be made: write {"name": ..., "arguments": {...}} with one of the tools add, sub'
    """
    marked = form is not None and form.opening and form.kind != "channels"
    where = f" between {form.opening} and {form.closing or 'the end'}" if form is not None and marked else ""
    written = WRITTEN["json" if form is None else form.kind]
    return f"this is no call that can be made: write {written}{where} with one of the tools {', '.join(sorted(tools))}"


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
    extended = extended_placed_prompt(renderer, PlacedTokens(tokens=tokens_so_far), history, replies, new, tools)
    return None if extended is None else (extended[0].tokens, extended[1])


def extended_placed_prompt(
    renderer: Renderer,
    so_far: PlacedTokens,
    history: Sequence[Message],
    replies: Sequence[Message],
    new: Sequence[Message],
    tools: Tools | None,
) -> tuple[PlacedTokens, tuple[Message, ...]] | None:
    """Extend as `extended_prompt`, with the pictures so far and the new ones."""
    for reply in replies:
        before = (*history, reply)
        try:
            prompt = renderer.placed_continuation(so_far, before, new, tools)
        except DataError:  # a template may insist on calls before their results
            continue
        if prompt is not None:
            return prompt, (*before, *new)
    return None


def _parse_answer(text: str, form: ToolForm | None, tools: Collection[str]) -> ParsedReply | None:
    """Parse calls behind the reasoning; None if there are none, or one is malformed."""
    if form is not None and form.opening and form.opening in text:
        return _parse_formed(text, form, tools)
    calls = parse_bare(text, tools) or _parse_whole(text, form, tools)
    return None if calls is None else ParsedReply(content="", calls=calls)


def _parse_formed(text: str, form: ToolForm, tools: Collection[str]) -> ParsedReply | None:
    """Parse calls in the template's form.

    Returns None if any call is malformed: a program must not act on half of a reply.
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (opened := text.find(form.opening, position)) >= 0:
        texts.append(text[position:opened])
        parsed = PARSERS[form.kind](text, opened + len(form.opening), form.closing, tools)
        if parsed is None:
            return None
        calls += parsed[0]
        position = parsed[1]
    texts.append(text[position:])
    return ParsedReply(content="".join(texts).strip(), calls=tuple(calls))


def _parse_whole(text: str, form: ToolForm | None, tools: Collection[str]) -> tuple[ToolCall, ...] | None:
    """Parse a reply that is one call without marks around it."""
    if form is None or form.opening:
        return None
    parsed = PARSERS[form.kind](text, 0, form.closing, tools)
    return parsed[0] if parsed is not None and not text[parsed[1] :].strip() else None


def _parse_channels(text: str, tools: Collection[str]) -> ParsedReply:
    texts = parse_channels(text, tools)
    if texts is None:
        return ParsedReply(content=text)
    content = texts.said or (texts.reasoning if texts.calls else "")
    return ParsedReply(content=content, calls=texts.calls, reasoning=texts.reasoning)
