"""OpenAI's chat and text completions on the service's samplers, with the real `openai` client."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.infer.openai_api.session import cut_at_stops
from headrace.infer.openai_api.streaming import StreamedText
from headrace.render import Renderer
from headrace.service.host.fake_host import FakeHost
from headrace.service.http.auth import Quota
from headrace.service.http.openai_responses import LatestChoices
from headrace.types import Completion, Message, SampleRequest, StopReason, float_array, int_array
from support.agent_programs import ADD, make_tokenizer
from support.tinker_sdk import ADAM, datum
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOKENIZER = make_tokenizer()
RENDERER = Renderer(TOKENIZER)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Speaking(FakeHost):
    """Says `line`, if there is one, whatever is asked; a bigram table over bytes otherwise."""

    line: str | None = None

    async def sample(self, sampler: str, request: SampleRequest) -> Completion:
        if self.line is None:
            return await super().sample(sampler, request)
        self._logprobs(sampler)  # raises when it is not there
        tokens = [*TOKENIZER(self.line, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        logprobs = float_array([-0.5] * len(tokens))
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array([0] * len(tokens)),
            stop=StopReason.STOP,
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    host = Speaking(vocabulary=len(TOKENIZER), context=600, spell=RENDERER.decode)
    with served(tmp_path_factory.mktemp("completions"), host=host, renderer=RENDERER) as running:
        yield running


@pytest.fixture(autouse=True)
def silent(server: Served) -> Iterator[None]:
    yield
    server.host.line = None


def client(server: Served, key: str = KEY) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    server.closers.append(made.close)
    return made


@pytest.fixture(scope="module")
def ai(server: Served) -> openai.OpenAI:
    return client(server)


@pytest.fixture(scope="module")
def trained(server: Served) -> tuple[str, str]:
    """The path of a saved sampler and the id of a sampling session, both of a model that has learnt something."""
    model = server.client().create_lora_training_client(base_model=BASE, rank=4)
    model.forward_backward([datum([10, 11, 12, 13, 14])], "cross_entropy").result()
    model.optim_step(ADAM).result()
    return model.save_weights_for_sampler("mine").result().path, (
        model.save_weights_and_get_sampling_client()._sampling_session_id
    )


def table(server: Served, sampler: str = "base") -> Any:
    return server.host._logprobs(sampler)


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_has_text_reason_and_usage(server: Served, ai: openai.OpenAI) -> None:
    server.host.line = "hello there"
    reply = ai.chat.completions.create(model=BASE, messages=HELLO)
    [choice] = reply.choices
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == ("hello there", "stop", None)
    # "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n": 1 + 5 + 2 + 1 + 1 + 1 + 10 tokens
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (21, 12, 33)
    assert reply.model == BASE


def test_choices_differ_and_a_seed_repeats_them(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "n": 4, "seed": 5, "max_tokens": 12}
    first, again = (ai.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 4
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    other = ai.chat.completions.create(**{**asked, "seed": 6})
    assert texts != [choice.message.content for choice in other.choices]
    assert first.usage is not None
    assert first.usage.prompt_tokens == 21
    assert first.usage.completion_tokens <= 48
    unseeded = [ai.chat.completions.create(**{**asked, "seed": None}).choices[0].message.content for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_logprobs_are_those_of_the_sampler(server: Served, ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "seed": 1, "max_tokens": 6, "temperature": 0.5}
    reply = ai.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert len(entries) == 6
    before = int(RENDERER.prompt([Message(role="user", content="hi")])[-1])
    for entry in entries:
        row = table(server)[before]
        best = np.argsort(-row)[:3]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row[best].tolist(), abs=1e-5)
        assert [top.token for top in entry.top_logprobs] == RENDERER.token_texts(best.tolist())
        candidates = [t for t in range(len(row)) if RENDERER.token_texts([t]) == [entry.token]]
        token = min(candidates, key=lambda t: abs(row[t] - entry.logprob))
        assert entry.logprob == pytest.approx(row[token], abs=1e-5)  # at temperature 1
        before = token


def test_a_stop_string_ends_the_text(server: Served, ai: openai.OpenAI) -> None:
    free = ai.chat.completions.create(model=BASE, messages=HELLO, seed=3, max_tokens=20).choices[0].message.content
    assert free is not None
    mark = next(letter for letter in free[2:] if letter.isascii() and letter.isprintable())
    reply = ai.chat.completions.create(model=BASE, messages=HELLO, seed=3, max_tokens=20, stop=[mark])
    assert reply.choices[0].message.content == free[: free.index(mark)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens < 20


def test_tools_are_called(server: Served, ai: openai.OpenAI) -> None:
    server.host.line = f"let me see\n{CALL}"
    reply = ai.chat.completions.create(model=BASE, messages=HELLO, tools=[ADD])  # type: ignore[list-item]
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "let me see")
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    server.host.line = "it is 3"
    reply = ai.chat.completions.create(model=BASE, messages=history, tools=[ADD])  # type: ignore[list-item]
    assert reply.choices[0].message.content == "it is 3"


def test_a_stream_says_the_same(server: Served, ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "n": 2, "seed": 4, "max_tokens": 15}
    whole = ai.chat.completions.create(**asked)
    texts, reasons, used = {0: "", 1: ""}, {}, None
    for chunk in ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        used = chunk.usage or used
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert used == whole.usage


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_comes_while_it_is_sampled(tmp_path: Path, chat: bool) -> None:
    read, drawn = threading.Event(), [0]

    async def tick() -> None:
        drawn[0] += 1
        if drawn[0] > 10:  # no further before the client has read something
            assert await asyncio.to_thread(read.wait, 60)

    host = FakeHost(vocabulary=len(TOKENIZER), context=400, tick=tick, spell=RENDERER.decode)
    with served(tmp_path, host=host, renderer=RENDERER) as running:
        ai = client(running)
        asked: dict[str, Any] = {"model": BASE, "seed": 7, "max_tokens": 60, "stream": True}
        events = (
            ai.chat.completions.create(messages=HELLO, **asked) if chat else ai.completions.create(prompt="hi", **asked)
        )
        said = ""
        for event in events:
            said += (event.choices[0].delta.content or "") if chat else event.choices[0].text
            if said and not read.is_set():
                assert drawn[0] <= 11
                read.set()
        asked["stream"] = False
        whole = (
            ai.chat.completions.create(messages=HELLO, **asked).choices[0].message.content
            if chat
            else ai.completions.create(prompt="hi", **asked).choices[0].text
        )
        assert said == whole
        assert read.is_set()
        assert running.service.sampling.num_tokens == drawn[0]  # those of a piece are counted once


def test_a_stream_that_cannot_begin_is_a_refusal(server: Served, ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.chat.completions.create(model="nobody", messages=HELLO, stream=True)
    with pytest.raises(openai.BadRequestError):
        ai.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "x" * 700}], stream=True)


@given(st.text(alphabet="abE\ufffd", max_size=12), st.integers(1, 4), st.lists(st.text("abE", min_size=1, max_size=3)))
def test_what_is_shown_of_a_growing_text_is_the_text(text: str, step: int, stops: list[str]) -> None:
    shown = StreamedText(stops)
    final = cut_at_stops(text, stops)
    said = [shown.feed(text[:end]) for end in range(0, len(text), step)]
    assert final.startswith("".join(said))
    assert "".join(said) + shown.finish(final) == final


# --- text ------------------------------------------------------------------------------------------------------------


def test_prompts_are_texts_or_tokens(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": BASE, "seed": 2, "max_tokens": 5, "n": 2}
    tokens = TOKENIZER("one", add_special_tokens=False)["input_ids"]
    single = ai.completions.create(prompt="one", **asked)
    several = ai.completions.create(prompt=["one", "two"], **asked)
    as_tokens = ai.completions.create(prompt=[tokens], **asked)
    texts = [choice.text for choice in several.choices]
    assert [choice.text for choice in single.choices] == [choice.text for choice in as_tokens.choices] == texts[:2]
    assert len(set(texts)) == 4
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (6, 20)
    assert [choice.finish_reason for choice in several.choices] == ["length"] * 4
    streamed = ["", "", "", ""]
    for chunk in ai.completions.create(prompt=["one", "two"], **asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_texts_are_scored_without_sampling(server: Served, ai: openai.OpenAI) -> None:
    tokens = TOKENIZER("abca", add_special_tokens=False)["input_ids"]
    reply = ai.completions.create(model=BASE, prompt="abca", max_tokens=0, echo=True, logprobs=2)
    [choice] = reply.choices
    assert choice.text == "abca"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "a"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    scores = [table(server)[before, after] for before, after in pairwise(tokens)]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-5)
    tops = choice.logprobs.top_logprobs
    assert tops is not None
    best = np.sort(table(server)[tokens[0]])[::-1][:2]
    assert sorted(tops[1].values(), reverse=True) == pytest.approx(best.tolist(), abs=1e-5)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 0)


def test_one_token_alone_has_no_score(server: Served, ai: openai.OpenAI) -> None:
    [choice] = ai.completions.create(model=BASE, prompt="a", max_tokens=0, echo=True, logprobs=2).choices
    assert choice.text == "a"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None]
    assert choice.logprobs.top_logprobs == [None]


# --- which model, and whose ------------------------------------------------------------------------------------------


def test_any_sampler_is_a_model(server: Served, ai: openai.OpenAI, trained: tuple[str, str]) -> None:
    asked: dict[str, Any] = {"prompt": [[10, 11, 12]], "max_tokens": 0, "echo": True, "logprobs": 0}

    def score(model: str) -> Any:
        return ai.completions.create(model=model, **asked).choices[0].logprobs.token_logprobs[1:]  # type: ignore

    path, session = trained
    assert (
        score(path)
        == score(session)
        == pytest.approx([table(server, session)[10, 11], table(server, session)[11, 12]], abs=1e-5)
    )
    assert score(BASE) == score("fake/bigram") != score(path)
    listed = [model.id for model in ai.models.list()]
    assert {BASE, "fake/bigram", path, session} <= set(listed)


def test_what_is_anothers_is_not_a_model(server: Served, trained: tuple[str, str]) -> None:
    bob = client(server, OTHER_KEY)
    for model in (*trained, "nobody", "tinker://x:train:0/sampler_weights/none"):
        with pytest.raises(openai.NotFoundError) as failure:
            bob.chat.completions.create(model=model, messages=HELLO)
        assert failure.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=f"no model 'nobody': use fake/bigram or {BASE}, a sampling session"):
        bob.chat.completions.create(model="nobody", messages=HELLO)
    assert {model.id for model in bob.models.list()} == {BASE, "fake/bigram"}
    state = trained[0].replace("sampler_weights", "weights")
    with pytest.raises(openai.BadRequestError, match="sampler_weights"):
        bob.chat.completions.create(model=state, messages=HELLO)
    with pytest.raises(openai.AuthenticationError) as refused:
        client(server, "tml-nobody").chat.completions.create(model=BASE, messages=HELLO)
    assert refused.value.code == "invalid_api_key"


def test_an_ended_sampling_session_is_gone(server: Served, ai: openai.OpenAI) -> None:
    ending = server.client()
    session = ending.create_sampling_client(base_model=BASE)._sampling_session_id
    assert ai.completions.create(model=session, prompt="a", max_tokens=1).choices
    ending.close("success").result()
    with pytest.raises(openai.APIStatusError, match="has ended") as failure:
        ai.completions.create(model=session, prompt="a", max_tokens=1)
    assert failure.value.status_code == 410


def test_a_key_that_asks_too_often_is_told_when_to_come_again(tmp_path: Path) -> None:
    quota = Quota(requests_per_s=0.001, burst=1)
    host = Speaking(vocabulary=len(TOKENIZER))
    with served(tmp_path, host=host, renderer=RENDERER, quota=quota) as running:
        ai = client(running)
        ai.completions.create(model=BASE, prompt="a", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as failure:
            ai.completions.create(model=BASE, prompt="a", max_tokens=1)
        assert int(failure.value.response.headers["retry-after"]) > 100


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": HELLO, "n": 0}, "n"),
        ("chat/completions", {"messages": HELLO, "n": 1000}, "n"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": HELLO, "frequency_penalty": 1.0}, "frequency_penalty"),
        ("chat/completions", {"messages": HELLO, "temperature": 1000.0}, "temperature"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 700}]}, "messages"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [[2**40]]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": "x" * 700}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": ["x"] * 100, "n": 100}, "n"),
        ("completions", {"prompt": 3}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Served, path: str, body: Any, param: str) -> None:
    reply = server.http().post(f"/v1/{path}", json={"model": BASE, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"stream": True, "after": 8}])
def test_who_hangs_up_ends_the_sampling(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Also before the first piece of a stream, which comes after four tokens, and between two of them."""
    after, drawn = asked.pop("after", 0), [0]
    entered, ended = threading.Event(), threading.Event()

    async def tick() -> None:
        drawn[0] += 1
        if drawn[0] <= after:
            return
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    host = FakeHost(vocabulary=len(TOKENIZER), tick=tick)
    body = {"model": BASE, "prompt": "a", "max_tokens": 60, **asked}
    with served(tmp_path, host=host, renderer=RENDERER) as running:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=running.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
                call = asyncio.create_task(http.post("/v1/completions", json=body))
                assert await asyncio.to_thread(entered.wait, 60)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        asyncio.run(leave())
        assert ended.wait(60)


@pytest.mark.parametrize("quota", [Quota(open_requests=1), Quota(open_bytes=1)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_waited_for_is_one_of_the_keys_requests(tmp_path: Path, quota: Quota, stream: bool) -> None:
    entered, go_on = threading.Event(), threading.Event()

    async def tick() -> None:
        entered.set()
        assert await asyncio.to_thread(go_on.wait, 60)

    host = FakeHost(vocabulary=len(TOKENIZER), tick=tick)
    body = {"model": BASE, "prompt": "a", "max_tokens": 6}
    with served(tmp_path, host=host, renderer=RENDERER, quota=quota) as running, ThreadPoolExecutor(1) as pool:
        http = running.http()
        first = pool.submit(running.http().post, "/v1/completions", json={**body, "stream": stream})
        try:
            assert entered.wait(60)
            second = http.post("/v1/completions", json=body)
            assert second.status_code == 429
            assert second.json()["error"]["code"] == "rate_limit_exceeded"
            session = http.post("/api/v1/create_session", json={}).json()["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
            assert http.post("/api/v1/create_model", json=made).status_code == 429
            assert running.http(OTHER_KEY).post("/api/v1/create_session", json={}).status_code == 200
        finally:
            go_on.set()
        assert first.result().status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200


async def test_a_reader_who_is_slow_finds_the_last_of_each_choice_and_no_more() -> None:
    latest = LatestChoices()
    pieces = [
        Completion(
            tokens=int_array(range(size)),
            sampler_logprobs=float_array([0.0] * size),
            raw_logprobs=float_array([0.0] * size),
            versions=int_array([0] * size),
            stop=StopReason.LENGTH,
        )
        for size in (4, 20, 36)
    ]
    for piece in pieces:
        latest.put(1, piece)
        latest.put(0, piece)
    await latest.wait()
    assert dict(latest.take()) == {0: pieces[2], 1: pieces[2]}
    assert latest.take() == []
    waiting = asyncio.ensure_future(latest.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    latest.wake()
    await waiting
