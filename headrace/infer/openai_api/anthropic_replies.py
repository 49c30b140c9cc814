"""Write answered calls as messages of Anthropic's Messages API, or as the events of a stream. Pure functions."""

import json
import re
from collections.abc import Iterator
from typing import Any

from headrace.infer.openai_api.anthropic_requests import MessagesRequest, sign_thinking
from headrace.infer.openai_api.chat_requests import ApiError
from headrace.infer.openai_api.chat_responses import WORD
from headrace.infer.openai_api.session import Call
from headrace.types import StopReason

# Some chat templates write the opening mark into the prompt, so a reply may begin behind it.
THINKING = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def message_body(call: Call, request: MessagesRequest, *, id: str) -> dict[str, Any]:
    stop = _stop_sequence(call, request)
    return {
        **_head(request, id),
        "content": _blocks(call, request),
        "stop_reason": _stop_reason(call, stop),
        "stop_sequence": stop,
        "usage": _usage(call),
    }


def message_events(call: Call, request: MessagesRequest, *, id: str) -> Iterator[str]:
    """Write what `message_body` does as server-sent events, word by word."""
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = {**_usage(call), "output_tokens": 0}
    yield _event({"type": "message_start", "message": {**_head(request, id), **begun, "usage": usage}})
    yield _event({"type": "ping"})
    for index, block in enumerate(_blocks(call, request)):
        empty, deltas = _streamed(block)
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    stop = _stop_sequence(call, request)
    delta = {"stop_reason": _stop_reason(call, stop), "stop_sequence": stop}
    yield _event({"type": "message_delta", "delta": delta, "usage": _usage(call)})
    yield _event({"type": "message_stop"})


def error_body(error: ApiError) -> dict[str, Any]:
    """Write an error as Anthropic does; agents look for its words about a prompt that is too long."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{long}{error}"}}


def _head(request: MessagesRequest, id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "model": request.model}


def _blocks(call: Call, request: MessagesRequest) -> list[dict[str, Any]]:
    """Divide a reply into blocks; together they have all of its text."""
    blocks: list[dict[str, Any]] = []
    text = call.reply.content
    thought = THINKING.match(text) if request.thinks else None
    if thought is not None:
        shown = thought[1] if request.shows_thinking else ""
        blocks.append({"type": "thinking", "thinking": shown, "signature": sign_thinking(thought[0])})
        text = text[thought.end() :]
    if text:
        blocks.append({"type": "text", "text": text})
    for tool_call in call.reply.tool_calls:
        input = json.loads(tool_call.arguments)
        blocks.append({"type": "tool_use", "id": tool_call.id, "name": tool_call.name, "input": input})
    return blocks


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block as a stream begins it, and the deltas that complete it."""
    match block["type"]:
        case "text":
            words = WORD.findall(block["text"])
            return {**block, "text": ""}, [{"type": "text_delta", "text": word} for word in words]
        case "thinking":
            words = WORD.findall(block["thinking"])
            deltas = [{"type": "thinking_delta", "thinking": word} for word in words]
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
        case _:
            written = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _stop_sequence(call: Call, request: MessagesRequest) -> str | None:
    """Return which of the request's stop sequences ended the reply."""
    places = {stop: call.text.find(stop) for stop in call.params.stop_strings}
    found = {stop: place for stop, place in places.items() if place >= 0}
    first = min(found, key=lambda stop: found[stop], default=None)
    return first if first in request.stops and not call.reply.tool_calls else None


def _stop_reason(call: Call, stop: str | None) -> str:
    if call.reply.tool_calls:
        return "tool_use"
    if stop is not None:
        return "stop_sequence"
    return "max_tokens" if call.completion.stop is StopReason.LENGTH else "end_turn"


def _usage(call: Call) -> dict[str, int]:
    return {
        "input_tokens": len(call.prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(call.completion.tokens),
    }


def _event(value: dict[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"
