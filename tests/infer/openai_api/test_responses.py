"""OpenAI's Responses API of the endpoint, driven by the real `openai` client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from headrace.infer.openai_api import ChatSession, OpenAIEndpoint
from headrace.render import Renderer
from support.agent_programs import ADD, SAMPLING, client_of, scripted

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
TOOL: Any = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]


@asynccontextmanager
async def opened(
    sampler: Any, renderer: Renderer, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ChatSession]]:
    """A client of one episode, without a socket."""
    endpoint = OpenAIEndpoint(renderer)
    arguments = {"sampling": SAMPLING, "seed": 7, "max_calls": 8, "max_tokens": 2000, **options}
    record = endpoint.open(sampler=sampler, **arguments)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=endpoint.app)) as http:
        yield client_of(record.base_url, http_client=http), record


async def ask(client: openai.AsyncOpenAI, input: Any = "hello", **parameters: Any) -> Any:
    return await client.responses.create(model="m", input=input, **parameters)


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_reply_has_text_status_and_usage() -> None:
    sampler, renderer = scripted("hi there")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client)
    [item] = reply.output
    assert (reply.object, reply.status, reply.model, reply.output_text) == ("response", "completed", "m", "hi there")
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    # "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n": 1 + 5 + 5 + 1 + 1 + 1 + 10 tokens
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (24, 9, 33)
    assert record.steps[0].prompt.tolist() == sampler.heard[0].prompt


async def test_a_reply_cut_at_its_length_is_incomplete() -> None:
    sampler, renderer = scripted("hi there")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client, max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason, reply.output_text) == (
        "incomplete",
        "max_output_tokens",
        "hi",
    )
    assert record.truncated


async def test_instructions_and_items_are_shown_in_their_order() -> None:
    sampler, renderer = scripted("ok")
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "both", "annotations": []}]},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "add",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call", "call_id": "3", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": "5"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "go on"},
    ]
    async with opened(sampler, renderer) as (client, record):
        await ask(client, items, instructions="be brief")
    shown = [
        (message.role, message.content, [call.id for call in message.tool_calls], message.tool_call_id)
        for message in record.calls[0].messages
    ]
    assert shown == [
        ("system", "be brief", [], None),
        ("system", "be kind", [], None),
        ("user", "hello", [], None),
        ("assistant", "both", ["1", "2"], None),
        ("tool", "3", [], "1"),
        ("tool", "4", [], "2"),
        ("assistant", "", ["3"], None),
        ("tool", "5", [], "3"),
        ("assistant", "so", [], None),
        ("user", "go on", [], None),
    ]


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_call_and_its_output_extend_the_tokens(by_id: bool) -> None:
    """The program repeats the items of the response, or names the response that it continues."""
    sampler, renderer = scripted(f"let me see\n{CALL}", "3")
    options: dict[str, Any] = {"tools": [TOOL], "instructions": "be brief"}
    async with opened(sampler, renderer) as (client, record):
        first = await ask(client, **options)
        text, call = first.output
        assert (text.content[0].text, call.type, call.name) == ("let me see", "function_call", "add")
        assert call.arguments == '{"a": 1,  "b": 2}'
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if by_id:
            last = await ask(client, [output], previous_response_id=first.id, **options)
        else:
            last = await ask(client, [{"role": "user", "content": "hello"}, *first.output, output], **options)
    assert last.output_text == "3"
    before, after = sampler.heard
    seen = [*before.prompt, *before.sampled]
    assert after.prompt[: len(seen)] == seen
    assert renderer.decode(after.prompt[len(seen) :]).split() == ["tool", "3", "assistant"]
    assert [step.prompt.tolist() for step in record.steps] == [before.prompt, after.prompt]


async def test_instructions_are_not_carried_over() -> None:
    sampler, renderer = scripted("one", "two")
    async with opened(sampler, renderer) as (client, record):
        first = await ask(client, instructions="be brief")
        await ask(client, "more", previous_response_id=first.id, instructions="be long")
    assert [message.content for message in record.calls[1].messages] == ["be long", "hello", "one", "more"]


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream() -> None:
    sampler, renderer = scripted(f"let me\n{CALL}")
    async with opened(sampler, renderer) as (client, _):
        events = [event async for event in await ask(client, tools=[TOOL], stream=True)]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.output == []
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "let me"
    assert events[-1].response.usage.output_tokens == len(sampler.heard[0].sampled)


async def test_the_clients_own_accumulation_of_a_stream_is_the_reply() -> None:
    sampler, renderer = scripted(f"ok {CALL}", "hi there")
    async with opened(sampler, renderer) as (client, record):
        async with client.responses.stream(model="m", input="hello", tools=[TOOL]) as stream:
            called = await stream.get_final_response()
        async with client.responses.stream(model="m", input="hello", max_output_tokens=2) as stream:
            last = [event async for event in stream][-1]
    assert [item.type for item in called.output] == ["message", "function_call"]
    assert called.output_text == record.calls[0].reply.content == "ok"
    assert called.output[1].arguments == '{"a": 1,  "b": 2}'  # type: ignore[union-attr]
    assert (last.type, last.response.output_text) == ("response.incomplete", "hi")  # type: ignore[union-attr]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "1", "summary": []}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].message.content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **parameters)
    assert caught.value.param == param
    assert sampler.heard == []
    assert record.steps == ()


async def test_a_response_that_is_not_stored_or_of_another_episode_cannot_be_continued() -> None:
    sampler, renderer = scripted("hi")
    endpoint = OpenAIEndpoint(renderer)
    options: dict[str, Any] = {"sampling": SAMPLING, "seed": 7, "max_calls": 8, "max_tokens": 2000}
    one, two = (endpoint.open(sampler=sampler, **options) for _ in range(2))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=endpoint.app)) as http:
        mine, other = (client_of(record.base_url, http_client=http) for record in (one, two))
        stored, unstored = await ask(mine), await ask(mine, store=False)
        await ask(mine, previous_response_id=stored.id)
        for client, response in ((mine, unstored), (other, stored)):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, previous_response_id=response.id)
            assert caught.value.code == "previous_response_not_found"


async def test_hints_without_an_effect_pass() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, _):
        await ask(
            client,
            temperature=1.0,
            metadata={"a": "b"},
            reasoning={"effort": "low"},
            include=["reasoning.encrypted_content"],
            parallel_tool_calls=True,
            truncation="disabled",
            text={"format": {"type": "text"}},
        )
        await ask(client)
    assert sampler.heard[0].prompt == sampler.heard[1].prompt
