"""Write answered calls as OpenAI's chat.completion, or as the server-sent events of a stream. Pure functions."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.infer.openai_api.chat_requests import ChatRequest
from headrace.infer.openai_api.session import Call
from headrace.infer.openai_api.streaming import StreamedText
from headrace.render import Renderer
from headrace.types import Completion

WORD = re.compile(r"\s*\S+\s*|\s+")
LAST_EVENT = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice of a chat reply."""

    call: Call
    tops: Sequence[Mapping[int, float]] = ()  # the most likely tokens at each position, if requested
    raw: bool = False  # log-probs at temperature 1, rather than under the sampling distribution


def completion_body(
    answers: Sequence[Answer], request: ChatRequest, renderer: Renderer, *, id: str, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_reply(answer.call)},
            "logprobs": _logprobs(answer, renderer) if request.logprobs else None,
            "finish_reason": answer.call.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(request, id, created, "chat.completion"), "choices": choices, "usage": _usage(answers)}


class ChatStream:
    """Write what `completion_body` does as server-sent events: role, content, calls, finish reason, usage if requested.

    Chunks of choices that are still being sampled may come first. Log-probs come with the first chunk of content that
    is sent at the end, or with the finish reason if there is none.
    """

    def __init__(self, request: ChatRequest, renderer: Renderer, *, id: str, created: int) -> None:
        self._request, self._renderer = request, renderer
        self._head = _head(request, id, created, "chat.completion.chunk")
        self._counted = request.stream_options is not None and request.stream_options.include_usage
        self._texts: dict[int, StreamedText] = {}

    def chunk(self, index: int, completion: Completion) -> Iterator[str]:
        """Send what there is of a choice by now; nothing if it may become a tool call."""
        if self._request.callable_tools:
            return
        if index not in self._texts:
            yield self._event(index, {"role": "assistant", "content": ""})
        text = self._texts.setdefault(index, StreamedText(self._request.stops))
        if added := text.feed(self._renderer.decode(completion.tokens)):
            yield self._event(index, {"content": added})

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Send what has not been sent, word by word."""
        for index, answer in enumerate(answers):
            yield from self._rest(index, answer)
        if self._counted:
            yield sent_event({**self._head, "choices": [], "usage": _usage(answers)})
        yield LAST_EVENT

    def _rest(self, index: int, answer: Answer) -> Iterator[str]:
        reply = _reply(answer.call)
        logprobs = _logprobs(answer, self._renderer) if self._request.logprobs else None
        if index not in self._texts:
            yield self._event(index, {"role": "assistant", "content": None if reply["content"] is None else ""})
        for word in WORD.findall(self._texts.get(index, StreamedText(())).finish(reply["content"] or "")):
            yield self._event(index, {"content": word}, logprobs=logprobs)
            logprobs = None
        for number, tool_call in enumerate(reply.get("tool_calls", ())):
            yield self._event(index, {"tool_calls": [{"index": number, **tool_call}]})
        yield self._event(index, {}, finish=answer.call.finish_reason, logprobs=logprobs)

    def _event(
        self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sent_event({**self._head, "choices": [choice], **({"usage": None} if self._counted else {})})


def _head(request: ChatRequest, id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": created, "model": request.model}


def _reply(call: Call) -> dict[str, Any]:
    calls = [
        {"id": tool_call.id, "type": "function", "function": {"name": tool_call.name, "arguments": tool_call.arguments}}
        for tool_call in call.reply.tool_calls
    ]
    if calls:
        return {"content": call.reply.content or None, "tool_calls": calls}
    return {"content": call.reply.content}


def _logprobs(answer: Answer, renderer: Renderer) -> dict[str, Any]:
    """Write the log-prob of every sampled token, also of the end of the turn and of text behind a stop string."""
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
    """Count tokens; the choices of one request share its prompt."""
    return usage(len(answers[0].call.prompt), sum(len(answer.call.completion.tokens) for answer in answers))


def usage(prompt: int, sampled: int) -> dict[str, int]:
    """
    >>> usage(3, 2)
    {'prompt_tokens': 3, 'completion_tokens': 2, 'total_tokens': 5}
    """
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def sent_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
