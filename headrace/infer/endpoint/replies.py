"""Answered calls as OpenAI's chat.completion, and as the server-sent events of a stream. Pure functions.

A sampler returns whole sequences, so a stream begins when its sequence is complete.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.infer.endpoint.record import Call
from headrace.infer.endpoint.wire import ChatRequest
from headrace.render import Renderer

PIECE = re.compile(r"\s*\S+\s*|\s+")
LAST_EVENT = "data: [DONE]\n\n"
Delta = tuple[dict[str, Any], str | None, dict[str, Any] | None]  # what is new, why it ended, log-probs


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a reply. `tops`: of every sampled token the likeliest in its place, which are asked for."""

    call: Call
    tops: Sequence[Mapping[int, float]] = ()
    raw: bool = False  # log-probs at temperature 1, rather than under the law that sampled


def completion_body(
    answers: Sequence[Answer], request: ChatRequest, renderer: Renderer, *, id: str, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_said(answer.call)},
            "logprobs": _logprobs(answer, renderer) if request.logprobs else None,
            "finish_reason": answer.call.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(request, id, created, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def stream_events(
    answers: Sequence[Answer], request: ChatRequest, renderer: Renderer, *, id: str, created: int
) -> Iterator[str]:
    """The same as `completion_body` in pieces: the role, content word by word, calls, the reason, usage if asked for.

    All log-probs come with the first piece of content, or with the reason where there is no content.
    """
    counted = request.stream_options is not None and request.stream_options.include_usage
    head = _head(request, id, created, "chat.completion.chunk")
    for index, answer in enumerate(answers):
        for delta, finish, logprobs in _deltas(answer, request, renderer):
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            yield sent_event({**head, "choices": [choice], **({"usage": None} if counted else {})})
    if counted:
        yield sent_event({**head, "choices": [], "usage": _usage(answers)})
    yield LAST_EVENT


def _deltas(answer: Answer, request: ChatRequest, renderer: Renderer) -> Iterator[Delta]:
    said = _said(answer.call)
    logprobs = _logprobs(answer, renderer) if request.logprobs else None
    yield {"role": "assistant", "content": None if said["content"] is None else ""}, None, None
    for piece in PIECE.findall(said["content"] or ""):
        yield {"content": piece}, None, logprobs
        logprobs = None
    for index, tool_call in enumerate(said.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **tool_call}]}, None, None
    yield {}, answer.call.finish_reason, logprobs


def _head(request: ChatRequest, id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": created, "model": request.model}


def _said(call: Call) -> dict[str, Any]:
    calls = [
        {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
        for made in call.reply.tool_calls
    ]
    if calls:
        return {"content": call.reply.content or None, "tool_calls": calls}
    return {"content": call.reply.content}


def _logprobs(answer: Answer, renderer: Renderer) -> dict[str, Any]:
    """Of every sampled token, those of the end of the turn and of cut-off text too."""
    completion = answer.call.completion
    texts = renderer.token_texts(completion.tokens)
    logprobs = completion.raw_logprobs if answer.raw else completion.sampler_logprobs
    entries = [
        {**_entry(text, float(logprob)), "top_logprobs": _tops(answer.tops[place] if answer.tops else {}, renderer)}
        for place, (text, logprob) in enumerate(zip(texts, logprobs, strict=True))
    ]
    return {"content": entries, "refusal": None}


def _tops(tops: Mapping[int, float], renderer: Renderer) -> list[dict[str, Any]]:
    texts = renderer.token_texts(list(tops))
    return [_entry(text, logprob) for text, logprob in zip(texts, tops.values(), strict=True)]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Choices of one request share its prompt."""
    return usage(len(answers[0].call.prompt), sum(len(answer.call.completion.tokens) for answer in answers))


def usage(prompt: int, sampled: int) -> dict[str, int]:
    """
    >>> usage(3, 2)
    {'prompt_tokens': 3, 'completion_tokens': 2, 'total_tokens': 5}
    """
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def sent_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
