"""An answered call as OpenAI's chat.completion, and as the server-sent events of a stream. Pure functions.

A sampler returns whole sequences, so a stream begins when its sequence is complete.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from headrace.infer.endpoint.record import Call
from headrace.infer.endpoint.wire import ChatRequest
from headrace.render import Renderer

PIECE = re.compile(r"\s*\S+\s*|\s+")


def completion_body(call: Call, request: ChatRequest, renderer: Renderer, *, id: str, created: int) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "refusal": None, **_said(call)},
        "logprobs": _logprobs(call, renderer) if request.logprobs else None,
        "finish_reason": call.finish_reason,
    }
    return {**_head(request, id, created, "chat.completion"), "choices": [choice], "usage": _usage(call)}


def stream_events(call: Call, request: ChatRequest, renderer: Renderer, *, id: str, created: int) -> Iterator[str]:
    """The same as `completion_body` in pieces: the role, content word by word, calls, the reason, usage if asked for.

    All log-probs come with the first piece of content, or with the reason where there is no content.
    """
    counted = request.stream_options is not None and request.stream_options.include_usage

    def event(delta: dict[str, Any], *, finish: str | None = None, logprobs: dict[str, Any] | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _event({**head, "choices": [choice], **({"usage": None} if counted else {})})

    head = _head(request, id, created, "chat.completion.chunk")
    said = _said(call)
    logprobs = _logprobs(call, renderer) if request.logprobs else None
    yield event({"role": "assistant", "content": None if said["content"] is None else ""})
    for piece in PIECE.findall(said["content"] or ""):
        yield event({"content": piece}, logprobs=logprobs)
        logprobs = None
    for index, tool_call in enumerate(said.get("tool_calls", ())):
        yield event({"tool_calls": [{"index": index, **tool_call}]})
    yield event({}, finish=call.finish_reason, logprobs=logprobs)
    if counted:
        yield _event({**head, "choices": [], "usage": _usage(call)})
    yield "data: [DONE]\n\n"


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


def _logprobs(call: Call, renderer: Renderer) -> dict[str, Any]:
    """Of every sampled token, those of the end of the turn and of cut-off text too, under the law that sampled it."""
    texts = renderer.token_texts(call.completion.tokens)
    entries = [
        {"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, call.completion.sampler_logprobs, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _usage(call: Call) -> dict[str, int]:
    prompt, sampled = len(call.prompt), len(call.completion.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
