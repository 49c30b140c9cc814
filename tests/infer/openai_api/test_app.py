"""The endpoint, driven by the real `openai` client: replies, streams, parameters, errors, hanging up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from headrace.algo.random import derive_seed
from headrace.errors import SamplerError
from headrace.infer.openai_api import ChatSession, OpenAIEndpoint, serve
from headrace.render import Renderer
from headrace.testing import FakeSampler
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights
from support.agent_programs import ADD, HERMES, SAMPLING, client_of, scripted

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'


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


async def ask(client: openai.AsyncOpenAI, messages: list[Any] = HELLO, **parameters: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **parameters)


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_reply_has_text_reason_and_usage() -> None:
    sampler, renderer = scripted("hi there")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi there", "stop")
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    # "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n": 1 + 5 + 5 + 1 + 1 + 1 + 10 tokens
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (24, 9, 33)
    assert reply.model == "policy"
    [step] = record.steps
    assert step.prompt.tolist() == sampler.heard[0].prompt
    assert step.action == "hi there"


async def test_a_reply_cut_at_its_length_says_so() -> None:
    sampler, renderer = scripted("hi there")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client, max_completion_tokens=2)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hi", "length")
    assert record.truncated


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    sampler, renderer = scripted("ok")
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client, logprobs=True, top_logprobs=0)
    entries = reply.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in entries] == [("o", -0.25), ("k", -0.5), ("<|im_end|>", -0.75)]
    assert [entry.bytes for entry in entries[:2]] == [[111], [107]]
    assert [entry.top_logprobs for entry in entries] == [[], [], []]


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_record() -> None:
    sampler, renderer = scripted("one. two")
    async with opened(sampler, renderer) as (client, record):
        reply = await ask(client, stop=[".", "!"])
    assert reply.choices[0].message.content == "one"
    assert sampler.heard[0].params.stop_strings == (".", "!")
    assert record.steps[0].completion.tokens.tolist() == sampler.heard[0].sampled


async def test_the_stop_strings_of_the_episode_hold_beside_those_of_a_call() -> None:
    sampler, renderer = scripted("one; two", "one! two")
    async with opened(sampler, renderer, sampling=replace(SAMPLING, stop_strings=(";",))) as (client, _):
        replies = [await ask(client), await ask(client, stop="!")]
    assert [reply.choices[0].message.content for reply in replies] == ["one", "one"]
    assert [request.params.stop_strings for request in sampler.heard] == [(";",), (";", "!")]


async def test_a_tool_call_of_the_templates_own_form() -> None:
    sampler, renderer = scripted(f"let me see\n{CALL}")
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client, tools=[ADD])
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me see"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1,  "b": 2}')
    assert len(call.id) == 9


XML = HERMES.replace(
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "{{ '<function=' + call.function.name + '>' }}{% for name, value in call.function.arguments.items() %}"
    "{{ '\\n<parameter=' + name + '>\\n' + value | string + '\\n</parameter>' }}{% endfor %}{{ '\\n</function>' }}",
)


async def test_arguments_that_are_text_have_the_types_of_the_tools_schema() -> None:
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 1), ("b", 2)))
    called = f"<tool_call>\n<function=add>\n{values}</function>\n</tool_call>"
    sampler, renderer = scripted(called, "3", template=XML)
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client, tools=[ADD])
        [call] = reply.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        await ask(client, [*HELLO, reply.choices[0].message.model_dump(exclude_none=True), answer], tools=[ADD])
    first, second = sampler.heard
    assert second.prompt[: len(first.prompt) + len(first.sampled)] == [*first.prompt, *first.sampled]


async def test_of_channels_the_final_one_is_the_content() -> None:
    template = HERMES.replace(
        "'\\n<tool_call>\\n'", "'<|channel|>commentary to=functions.' + call.function.name + '<|message|>'"
    )
    sampler, renderer = scripted(
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>3", template=template
    )
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client)
    assert reply.choices[0].message.content == "3"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (CALL.replace("}}", "}"), {"tools": [ADD]}),  # not JSON
        (CALL.replace("add", "subtract"), {"tools": [ADD]}),  # no such tool
        (CALL.removesuffix("</tool_call>"), {"tools": [ADD]}),
        (CALL, {"tools": [ADD], "tool_choice": "none"}),
        (CALL, {}),
    ],
)
async def test_what_is_not_a_call_of_a_tool_comes_back_as_text(text: str, options: dict[str, Any]) -> None:
    sampler, renderer = scripted(text)
    async with opened(sampler, renderer) as (client, _):
        reply = await ask(client, **options)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_a_stream_adds_up_to_the_reply() -> None:
    sampler, renderer = scripted(f"let me  see\n{CALL}")
    async with opened(sampler, renderer) as (client, _):
        stream = await ask(client, tools=[ADD], stream=True, stream_options={"include_usage": True}, logprobs=True)
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == len(sampler.heard[0].sampled)
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "let me  see"
    assert sum(bool(delta.content) for delta in deltas) == 3  # in pieces, not at once
    [call] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    logprobs = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert len(logprobs) == len(sampler.heard[0].sampled)
    assert len({part.id for part in chunks}) == 1


async def test_the_clients_own_accumulation_of_a_stream_is_the_reply() -> None:
    sampler, renderer = scripted(f"ok {CALL}")
    async with opened(sampler, renderer) as (client, record):
        async with client.chat.completions.stream(model="policy", messages=HELLO, tools=[ADD]) as stream:
            final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == record.messages[-1].content == "ok"
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1,  "b": 2}']


async def test_a_stream_without_usage_has_none() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, _):
        chunks = [chunk async for chunk in await ask(client, stream=True)]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


# --- parameters ------------------------------------------------------------------------------------------------------


async def test_parameters_reach_the_sampler() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer, pinned=False, sampling=SamplingParams(max_tokens=50, top_k=5)) as (client, _):
        await ask(client)
        await ask(client, temperature=0.5, top_p=0.9, max_tokens=9, stop=".", seed=3)
        await ask(client, seed=3, max_tokens=99)
    first, second, third = (heard.params for heard in sampler.heard)
    assert first == SamplingParams(max_tokens=50, top_k=5, seed=derive_seed(7, 0))
    asked = derive_seed(7, "asked", 3)
    assert second == SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, stop_strings=(".",), seed=asked)
    assert third == SamplingParams(max_tokens=50, top_k=5, seed=asked)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.5}, "temperature"),  # the episode is sampled at 1
        ({"top_p": 0.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "queen", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **parameters)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert sampler.heard == []
    assert record.steps == ()


async def test_what_asks_for_nothing_passes() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        await ask(
            client,
            [{"role": "user", "content": parts}],
            n=1,
            temperature=1.0,
            presence_penalty=0,
            response_format={"type": "text"},
            user="me",
            tools=[],
        )
        await ask(client)
    assert len(record.steps) == 2
    assert sampler.heard[0].prompt == sampler.heard[1].prompt


async def test_tools_that_the_template_does_not_show_are_refused() -> None:
    sampler, renderer = scripted("hi", template=HERMES.replace("if tools", "if false"))
    async with opened(sampler, renderer) as (client, _):
        with pytest.raises(openai.BadRequestError, match="shows no tools"):
            await ask(client, tools=[ADD])


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_an_episode_that_is_unknown_or_over_is_not_found() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer) as (client, record):
        await ask(client)
        record.close()
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(client)
        assert caught.value.code == "unknown_episode"
        other = client.with_options(base_url=record.base_url.replace("/v1", "x/v1"))
        with pytest.raises(openai.NotFoundError, match="no such episode"):
            await ask(other)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="policy", input="hi")
        assert caught.value.type == "invalid_request_error"
    assert len(record.steps) == 1


async def test_a_failing_sampler_is_a_server_error_at_once_and_is_kept() -> None:
    class Broken(FakeSampler):
        asked = 0

        async def sample(self, request: SampleRequest) -> Completion:
            self.asked += 1
            raise RuntimeError("out of memory")

    sampler = Broken()
    async with opened(sampler, scripted("")[1]) as (client, record):
        with pytest.raises(openai.InternalServerError, match="sampling failed: RuntimeError: out of memory"):
            await ask(client)
    assert sampler.asked == 1  # the client was told not to try again
    assert isinstance(record.error, SamplerError)
    assert record.steps == ()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "policy"}'])
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    sampler, renderer = scripted("hi")
    endpoint = OpenAIEndpoint(renderer)
    record = endpoint.open(sampler=sampler, sampling=SAMPLING, seed=7, max_calls=8, max_tokens=100)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=endpoint.app)) as http:
        reply = await http.post(record.base_url + "/chat/completions", content=body)
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_limits_refuse_the_next_call() -> None:
    sampler, renderer = scripted("hi")
    async with opened(sampler, renderer, max_calls=1) as (client, record):
        await ask(client)
        assert not record.truncated
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client)
    assert caught.value.code == "too_many_calls"
    assert record.truncated
    async with opened(sampler, renderer, max_tokens=26) as (client, record):
        assert (await ask(client)).usage.completion_tokens == 2  # a prompt of 24 tokens leaves room for 2
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [{"role": "user", "content": "hello hello"}])
    assert caught.value.code == "context_length_exceeded"


class StuckSampler(FakeSampler):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.left = asyncio.Event(), asyncio.Event()

    async def sample(self, request: SampleRequest) -> Completion:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        raise AssertionError("never")


async def test_a_call_whose_program_hangs_up_is_cancelled_and_leaves_no_trace() -> None:
    sampler = StuckSampler()
    async with serve(scripted("")[1]) as endpoint:
        record = endpoint.open(sampler=sampler, sampling=SAMPLING, seed=7, max_calls=8, max_tokens=2000)
        async with client_of(record.base_url) as client:
            asking = asyncio.ensure_future(ask(client))
            await sampler.entered.wait()
            asking.cancel()
            await asyncio.wait_for(sampler.left.wait(), 100)
        assert record.steps == ()
        assert record.error is None


async def test_an_open_call_is_refused_when_its_episode_ends() -> None:
    sampler = StuckSampler()
    async with opened(sampler, scripted("")[1]) as (client, record):
        asking = asyncio.ensure_future(ask(client))
        await sampler.entered.wait()
        record.close()
        with pytest.raises(openai.NotFoundError):
            await asking
    assert sampler.left.is_set()


# --- the server ------------------------------------------------------------------------------------------------------


async def test_a_real_server_serves_several_episodes_apart_from_each_other() -> None:
    samplers = [scripted(text) for text in ("one", "two", "three")]
    async with serve(samplers[0][1]) as endpoint:
        records = [
            endpoint.open(sampler=sampler, sampling=SAMPLING, seed=7, max_calls=8, max_tokens=2000)
            for sampler, _ in samplers
        ]
        clients = [client_of(record.base_url) for record in records]
        replies = await asyncio.gather(*(ask(client) for client in clients))
        names = [model.id async for model in clients[0].models.list()]
        for client in clients:
            await client.close()
    assert [reply.choices[0].message.content for reply in replies] == ["one", "two", "three"]
    assert [record.steps[0].action for record in records] == ["one", "two", "three"]
    assert names == ["policy"]
    assert len({record.base_url for record in records}) == 3


async def test_a_taken_port_is_an_error() -> None:
    renderer = scripted("")[1]
    async with serve(renderer) as endpoint:
        record = endpoint.open(sampler=FakeSampler(), sampling=SAMPLING, seed=7, max_calls=8, max_tokens=2000)
        port = int(record.base_url.split(":")[2].split("/")[0])
        with pytest.raises(SamplerError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serve(renderer, port=port):
                raise AssertionError("never")


async def test_a_reply_goes_on_across_a_weight_update() -> None:
    updates: list[asyncio.Task[None]] = []
    ticks = 0

    async def update() -> None:
        await sampler.pause(interrupt=True)
        await sampler.load(SharedWeights(fingerprint="new"), 1)
        await sampler.resume()

    async def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            updates.append(asyncio.create_task(update()))
        await asyncio.sleep(0)

    sampler = FakeSampler(length=lambda request: 4, tick=tick)
    async with opened(sampler, scripted("")[1]) as (client, record):
        await ask(client)
    completion = record.steps[0].completion
    assert completion.tokens.tolist() == [0, 1, 1002, 1003]  # the fake's token is version * 1000 + position
    assert completion.versions.tolist() == [0, 0, 1, 1]
