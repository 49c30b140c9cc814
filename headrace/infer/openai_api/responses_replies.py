"""Write answered calls as responses of OpenAI's Responses API, or as the events of a stream. Pure functions."""

import json
from collections.abc import Iterator
from typing import Any

from headrace.infer.openai_api.chat_responses import WORD
from headrace.infer.openai_api.responses_requests import ResponsesRequest
from headrace.infer.openai_api.session import Call
from headrace.types import StopReason


def response_body(call: Call, request: ResponsesRequest, *, id: str, created: int) -> dict[str, Any]:
    cut = call.completion.stop is StopReason.LENGTH and not call.reply.tool_calls
    return {
        **_head(call, request, id, created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(call, id),
        "usage": _usage(call),
    }


def response_events(call: Call, request: ResponsesRequest, *, id: str, created: int) -> Iterator[str]:
    """Write what `response_body` does as server-sent events, word by word."""
    body = response_body(call, request, id=id, created=created)
    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    for number, event in enumerate(_events(body, begun)):
        value = {**event, "sequence_number": number}
        yield f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"


def _events(body: dict[str, Any], begun: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun_item(item)}
        yield from _call_events(item, place) if item["type"] == "function_call" else _text_events(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _text_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    [part] = item["content"]
    place = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    for word in WORD.findall(part["text"]):
        yield {"type": "response.output_text.delta", **place, "delta": word, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _call_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item["name"],
        "arguments": item["arguments"],
    }


def _begun_item(item: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _items(call: Call, id: str) -> list[dict[str, Any]]:
    """Divide a reply into items: its text, if there is any or no call, then its calls."""
    key = id.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    if call.reply.content or not call.reply.tool_calls:
        part = {"type": "output_text", "text": call.reply.content, "annotations": [], "logprobs": []}
        cut = call.completion.stop is StopReason.LENGTH
        items.append(
            {
                "type": "message",
                "id": f"msg_{key}",
                "status": "incomplete" if cut and not call.reply.tool_calls else "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for tool_call in call.reply.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{key}_{tool_call.id}",
                "call_id": tool_call.id,
                "name": tool_call.name,
                "arguments": tool_call.arguments,
                "status": "completed",
            }
        )
    return items


def _head(call: Call, request: ResponsesRequest, id: str, created: int) -> dict[str, Any]:
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "error": None,
        "model": request.model,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": True,
        "temperature": call.params.temperature,
        "top_p": call.params.top_p,
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in request.tools or ()],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": request.store is not False,
        "metadata": {},
    }


def _usage(call: Call) -> dict[str, Any]:
    prompt, sampled = len(call.prompt), len(call.completion.tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
