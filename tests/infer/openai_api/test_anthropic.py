"""Anthropic's Messages API of the endpoint, driven by the real `anthropic` client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import pytest

from headrace.infer.openai_api import ChatSession, OpenAIEndpoint, serve
from headrace.render import Renderer
from headrace.testing import FakeSampler
from headrace.types import Completion, SampleRequest
from support.agent_programs import ADD, SAMPLING, scripted

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
TOOL: Any = {
    "name": "add",
    "description": "Add two numbers",
    "input_schema": ADD["function"]["parameters"],  # type: ignore[index]
}


@asynccontextmanager
async def opened(
    sampler: Any, renderer: Renderer, **options: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, ChatSession]]:
    """A client of one episode, without a socket."""
    endpoint = OpenAIEndpoint(renderer)
    arguments = {"sampling": SAMPLING, "seed": 7, "max_calls": 8, "max_tokens": 2000, **options}
    record = endpoint.open(sampler=sampler, **arguments)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=endpoint.app)) as http:
        yield anthropic.AsyncAnthropic(base_url=record.base_url, api_key="none", http_client=http), record


async def ask(client: anthropic.AsyncAnthropic, messages: list[Any] = HELLO, **parameters: Any) -> Any:
    return await client.messages.create(**{"model": "m", "max_tokens": 100, "messages": messages, **parameters})


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_reply_has_text_reason_and_usage() -> None:
    sampler, renderer = scripted("hi there")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client)
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
    [block] = reply.content
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "m")
    assert (block.type, block.text) == ("text", "hi there")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    # "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n": 1 + 5 + 5 + 1 + 1 + 1 + 10 tokens
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (24, 9)
    assert counted.input_tokens == 24
    assert len(record.steps) == len(sampler.heard) == 1  # counting is no call
    assert record.steps[0].prompt.tolist() == sampler.heard[0].prompt


async def test_system_text_and_blocks_are_shown_in_their_order() -> None:
    sampler, renderer = scripted("ok")
    system = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind", "cache_control": None}]
    results = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "no such file", "is_error": True},
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
    ]
    async with opened(sampler, renderer) as (client, record):
        await ask(client, [{"role": "user", "content": results}, {"role": "system", "content": "go on"}], system=system)
    assert [(message.role, message.content, message.tool_call_id) for message in record.calls[0].messages] == [
        ("system", "be brief\n\nbe kind", None),
        ("user", "before", None),
        ("tool", "3", "1"),
        ("tool", "error: no such file", "2"),
        ("user", "one\n\ntwo", None),
        ("system", "go on", None),
    ]


async def test_a_tool_call_is_a_block_and_its_result_extends_the_tokens() -> None:
    sampler, renderer = scripted(f"let me see\n{CALL}", "3")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client, tools=[TOOL])
        text, use = reply.content
        assert reply.stop_reason == "tool_use"
        assert (text.text, use.type, use.name, use.input) == ("let me see", "tool_use", "add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        messages = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        last = await ask(client, messages, tools=[TOOL])
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "3")
    first, second = sampler.heard
    seen = [*first.prompt, *first.sampled]
    assert second.prompt[: len(seen)] == seen
    assert renderer.decode(second.prompt[len(seen) :]).split() == ["tool", "3", "assistant"]
    assert "Add two numbers" in renderer.decode(first.prompt)
    assert record.steps[1].prompt.tolist() == second.prompt


async def test_a_reply_cut_at_its_length_or_a_stop_sequence_says_so() -> None:
    sampler, renderer = scripted("one. two; three")
    async with opened(sampler, renderer, sampling=replace(SAMPLING, stop_strings=("!",))) as (client, record):
        cut = await ask(client, max_tokens=3)
        stopped = await ask(client, stop_sequences=[";", "."])
        plain = await ask(client, stop_sequences=["never"])
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one")
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", ".", "one")
    assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)
    assert sampler.heard[1].params.stop_strings == ("!", ";", ".")
    assert record.steps[1].completion.tokens.tolist() == sampler.heard[1].sampled


@pytest.mark.parametrize("display", [None, "omitted"])
async def test_thinking_is_a_block_of_its_own_that_comes_back_whole(display: str | None) -> None:
    sampler, renderer = scripted("<think>hm\n</think>\n\none", "two")
    thinking = {"type": "enabled", "budget_tokens": 1024, **({"display": display} if display else {})}
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client, thinking=thinking)
        thought, text = reply.content
        assert (thought.type, thought.thinking) == ("thinking", "" if display else "hm\n")
        assert text.text == "\n\none"
        messages = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "more"}]
        await ask(client, messages, thinking=thinking)
    first, second = sampler.heard
    seen = [*first.prompt, *first.sampled]
    assert second.prompt[: len(seen)] == seen


async def test_a_prompt_that_opens_the_thinking_itself_is_no_different() -> None:
    sampler, renderer = scripted("hm</think>one", "<think>never closed")
    async with opened(sampler, renderer) as (client, _):
        replies = [await ask(client, thinking={"type": "adaptive"}) for _ in range(2)]
    assert [block.type for block in replies[0].content] == ["thinking", "text"]
    assert [block.text for block in replies[1].content] == ["<think>never closed"]


async def test_without_thinking_the_text_is_whole() -> None:
    sampler, renderer = scripted("<think>hm</think>one")
    async with opened(sampler, renderer) as (client, _):
        for options in ({}, {"thinking": {"type": "disabled"}}):
            assert (await ask(client, **options)).content[0].text == "<think>hm</think>one"


async def test_deferred_tools_are_shown_once_a_reference_names_them() -> None:
    sampler, renderer = scripted(CALL, CALL)
    found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "add"}]}
    other = {**TOOL, "name": "search", "description": "Find a tool"}
    async with opened(sampler, renderer) as (client, record):
        before = await ask(client, tools=[other, {**TOOL, "defer_loading": True}])
        after = await ask(
            client,
            [*HELLO, {"role": "assistant", "content": "so"}, {"role": "user", "content": [found]}],
            tools=[other, {**TOOL, "defer_loading": True}],
        )
    assert [before.stop_reason, after.stop_reason] == ["end_turn", "tool_use"]
    assert ["Add two numbers" in renderer.decode(step.prompt) for step in record.steps] == [False, True]


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream() -> None:
    sampler, renderer = scripted(f"<think>a b</think>let  me\n{CALL}")
    async with opened(sampler, renderer) as (client, _):
        parameters: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "adaptive"}, "stream": True}
        events = [event async for event in await ask(client, **parameters)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    names = [event.type for event in events]
    assert list(dict.fromkeys(names)) == ["message_start", *block, "message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens == len(sampler.heard[0].prompt)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    kinds = ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta"]
    assert [delta.type for delta in deltas] == kinds
    assert json.loads(deltas[-1].partial_json) == {"a": 1, "b": 2}
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("tool_use", len(sampler.heard[0].sampled))


async def test_the_clients_own_accumulation_of_a_stream_is_the_reply() -> None:
    sampler, renderer = scripted(f"<think>hm</think>ok {CALL}")
    options: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    async with opened(sampler, renderer) as (client, record):
        async with client.messages.stream(messages=HELLO, **options) as stream:
            streamed = await stream.get_final_message()
        record._begun = 0  # the same number gives the same ids
        whole = await ask(client, **options)
    assert [block.model_dump(exclude_none=True) for block in streamed.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_a_stream_begins_with_a_ping_as_every_line_is_an_event() -> None:
    sampler, renderer = scripted("hi")
    async with serve(renderer) as endpoint:
        record = endpoint.open(sampler=sampler, sampling=SAMPLING, seed=7, max_calls=8, max_tokens=2000)
        async with httpx2.AsyncClient() as http:
            body = {"model": "m", "max_tokens": 9, "messages": HELLO, "stream": True}
            reply = await http.post(record.base_url + "/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [part.split("\n") for part in reply.text.strip().split("\n\n")]
    assert [name for name, _ in events[:2]] == ["event: message_start", "event: ping"]
    for name, data in events:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


# --- what is refused -------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
FOREIGN = {"type": "thinking", "thinking": "hm", "signature": "EqQ!"}


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 0.5}}, "temperature is 1 in this episode"),
        ({"extra_body": {"top_k": 5}}, "top_k is not supported here"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice must be"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124 is a tool that the provider defines"),
        ({"tools": [{"name": "add"}]}, r"tools\[0\].input_schema: Field required"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "It is"}]}, "a reply cannot be begun for the model"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "only blocks of type text, thinking, tool_use"),
        ({"messages": [{"role": "assistant", "content": [FOREIGN]}, *HELLO]}, "signature that this endpoint did not"),
        ({"messages": [{"role": "user", "content": [FOREIGN]}]}, "a user message cannot have a block of type thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "nothing constrains what is sampled"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "context_managem"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is not supported here"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(parameters: dict[str, Any], sentence: str) -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        with pytest.raises(anthropic.BadRequestError, match=sentence) as caught:
            await ask(client, **parameters)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert sampler.heard == []
    assert record.steps == ()


async def test_hints_without_an_effect_pass() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        await ask(
            client,
            metadata={"user_id": "me"},
            output_config={"effort": "high"},
            tools=[],
            tool_choice={"type": "auto"},
            extra_body={
                "temperature": 1.0,
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            },
        )
        await ask(client)
    assert sampler.heard[0].prompt == sampler.heard[1].prompt
    assert len(record.steps) == 2


async def test_errors_have_their_types() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer, max_calls=1, max_tokens=30) as (client, record):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await ask(client, [{"role": "user", "content": "hello hello"}])
        await ask(client)
        with pytest.raises(anthropic.BadRequestError, match="has had its 1 calls"):
            await ask(client)
        record.close()
        with pytest.raises(anthropic.NotFoundError) as caught:
            await ask(client)
    assert caught.value.body == {  # type: ignore[comparison-overlap]
        "type": "error",
        "error": {"type": "not_found_error", "message": "there is no such episode, or it is over"},
    }


async def test_a_failing_sampler_is_an_api_error_at_once() -> None:
    class Broken(FakeSampler):
        asked = 0

        async def sample(self, request: SampleRequest) -> Completion:
            self.asked += 1
            raise RuntimeError("out of memory")

    sampler = Broken()
    async with opened(sampler, scripted("")[1]) as (client, _):
        with pytest.raises(anthropic.InternalServerError, match="out of memory"):
            await ask(client)
    assert sampler.asked == 1  # the client was told not to try again


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credentials", [{"api_key": "none"}, {"auth_token": "none", "api_key": None}])
@pytest.mark.parametrize("suffix", ["", "/v1"])
async def test_keys_in_either_header_and_base_urls_of_either_form(credentials: dict[str, Any], suffix: str) -> None:
    sampler, renderer = scripted("hi")
    async with serve(renderer) as endpoint:
        record = endpoint.open(sampler=sampler, sampling=SAMPLING, seed=7, max_calls=8, max_tokens=2000)
        base_url = record.base_url.removesuffix("/v1") + suffix
        async with anthropic.AsyncAnthropic(base_url=base_url, **credentials) as client:
            assert (await ask(client)).content[0].text == "hi"
            assert [model.id async for model in client.models.list()] == ["policy"]
