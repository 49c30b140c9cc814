"""OpenAI's chat and text completions on any sampler of the service, for programs that know no other API.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

`model` is a sampler checkpoint (tinker://RUN/sampler_weights/NAME), a sampling session, or the base model by any of its
names. Nothing here is journalled: who hangs up ends the sampling, and asks again. Log-probs are at temperature 1.
Requests and replies are those of the endpoint for agent programs. A stream is sent while its sequences are sampled;
where tools may be called, when it is known whether they are.
"""

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.algo.random import derive_seed
from headrace.errors import HeadraceError, SamplerGoneError
from headrace.infer.endpoint.app import while_connected
from headrace.infer.endpoint.live import ChunkedSampler
from headrace.infer.endpoint.record import Call, EpisodeRecord
from headrace.infer.endpoint.replies import Answer, ChatStream, completion_body, sent_event
from headrace.infer.endpoint.text import TextAnswer, TextRequest, TextStream, parse_text, read_prompts, text_body
from headrace.infer.endpoint.wire import ApiError, ChatRequest, parse_request
from headrace.render import Renderer
from headrace.service.access import Access, Denied, Tenant, TooMany
from headrace.service.bodies import described
from headrace.service.futures import failed
from headrace.service.host import Full
from headrace.service.records import SCHEME, Kind, SamplerRecord, split_path
from headrace.service.registry import Gone, Unknown
from headrace.service.service import Service
from headrace.tool_calls import find_form
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, SamplingParams, float_array, int_array

MAX_N, MAX_TOPS, MAX_CHOICES = 128, 20, 1024
MAX_TEMPERATURE = 100.0
TEXT_TOKENS = 16  # sampled after a text whose request does not say how many
PREFIX = "/v1/"
Heard = Callable[[int, Completion], None]


@dataclass(frozen=True, slots=True)
class _Policy:
    """A sampler of the service as the endpoint's code asks for it."""

    service: Service
    sampler: SamplerRecord

    async def sample(self, request: SampleRequest) -> Completion:
        return await self.service.sampling.draw(self.sampler, request)

    def telling(self, heard: Heard | None, index: int) -> "_Policy | ChunkedSampler":
        return self if heard is None else ChunkedSampler(self.sample, partial(heard, index))

    async def tops(self, prompt: IntArray, tokens: IntArray, k: int) -> tuple[dict[int, float], ...]:
        """Of the tokens behind a prompt; empty if k is 0."""
        if not k or not len(tokens):
            return ()
        most = min(k, self.service.card.vocabulary)
        found = await self.service.sampling.tops(self.sampler, int_array([*prompt, *tokens]), most)
        rows = zip(found.tokens.tolist(), found.logprobs.tolist(), strict=True)
        return tuple(dict(zip(*row, strict=True)) for row in list(rows)[len(prompt) :])


class Completions:
    """What the endpoints do."""

    def __init__(self, service: Service, renderer: Renderer) -> None:
        self._service, self._renderer = service, renderer
        self._form = find_form(renderer)

    def find(self, who: Tenant, model: str) -> SamplerRecord:
        """Raises Unknown, Gone, or ApiError for a path that is not a sampler's."""
        card = self._service.card
        if model in (card.name, *card.aliases):
            return _passing(who, base_model=model)
        if not model.startswith(SCHEME):
            return self._session(who, model)
        if split_path(model)[1] is not Kind.SAMPLER:
            raise ApiError(f"{model} cannot be sampled from: use a sampler_weights path", param="model")
        found = self._service.registry.checkpoint(model, who.name)
        return _passing(who, base_model=found.base_model, model_path=model, full=isinstance(found.spec, Full))

    def _session(self, who: Tenant, model: str) -> SamplerRecord:
        try:
            return self._service.sampler(who, model)
        except Unknown as exc:
            names = " or ".join((self._service.card.name, *self._service.card.aliases))
            others = "a sampling session or the sampler_weights path of a checkpoint (GET /v1/models lists them)"
            raise Unknown(f"there is no model '{model[:200]}': use {names}, {others}") from exc

    def models(self, who: Tenant) -> list[dict[str, object]]:
        card, registry = self._service.card, self._service.registry
        named = [(name, self._service.started) for name in (card.name, *card.aliases)]
        saved = [c for c in registry.checkpoints.values() if c.kind is Kind.SAMPLER and c.owner == who.name]
        live = [s for s in registry.samplers.values() if s.owner == who.name and s.gone is None]
        named += [(found.path, found.created) for found in saved] + [(each.id, each.created) for each in live]
        return [{"id": id, "object": "model", "created": int(when), "owned_by": "headrace"} for id, when in named]

    async def chat(self, who: Tenant, asked: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """`heard` is told how far each choice is."""
        policy = _Policy(self._service, self.find(who, asked.model))
        _check_temperature(asked.temperature)
        once = secrets.randbits(62)
        context = self._service.card.context
        sampling = SamplingParams(max_tokens=context, stop_tokens=self._renderer.eos_tokens)

        async def answer(index: int) -> Answer:
            record = EpisodeRecord(
                base_url="",
                sampler=policy.telling(heard, index),
                renderer=self._renderer,
                form=self._form,
                sampling=sampling,
                seed=index if asked.seed is not None else once + index,
                max_calls=1,
                max_tokens=context,
                pinned=False,
            )
            call: Call = await record.answer(asked)
            told = (asked.top_logprobs or 0) if asked.logprobs else 0
            return Answer(call, await policy.tops(call.prompt, call.completion.tokens, told), raw=True)

        return await _together([answer(index) for index in range(asked.n or 1)])

    async def text(self, who: Tenant, asked: TextRequest, heard: Heard | None = None) -> list[TextAnswer]:
        policy = _Policy(self._service, self.find(who, asked.model))
        _check_temperature(asked.temperature)
        prompts = read_prompts(asked, self._renderer, vocabulary=self._service.card.vocabulary)
        count = asked.n or 1
        if len(prompts) * count > MAX_CHOICES:
            raise ApiError(f"prompts times n may be {MAX_CHOICES}: ask for less at once", param="n")
        once = secrets.randbits(62)
        seeds = [derive_seed(i, "asked", asked.seed) if asked.seed is not None else once + i for i in range(count)]
        wanted = TEXT_TOKENS if asked.max_tokens is None else asked.max_tokens
        context = self._service.card.context
        for prompt in prompts:
            if len(prompt) + min(wanted, 1) > context:
                raise ApiError(
                    f"a prompt of {len(prompt)} tokens does not fit into the context of {context}",
                    param="prompt",
                    code="context_length_exceeded",
                )

        async def answer(index: int, prompt: IntArray, seed: int) -> TextAnswer:
            params = SamplingParams(
                max_tokens=min(wanted, context - len(prompt)),
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                stop_strings=asked.stops,
                seed=seed,
            )
            request = SampleRequest(prompt=prompt, params=params)
            sampled = await policy.telling(heard, index).sample(request) if wanted else None
            k, echoed = asked.logprobs or 0, bool(asked.echo) and asked.logprobs is not None
            scores: FloatArray | None = None
            if echoed:  # the first token has no score, and with it alone there is nothing to compute
                first = float_array([math.nan])
                scores = first if len(prompt) == 1 else await self._service.sampling.score(policy.sampler, prompt)
            return TextAnswer(
                prompt=prompt,
                completion=sampled,
                scores=scores,
                prompt_tops=await policy.tops(prompt[:0], prompt, k if echoed and len(prompt) > 1 else 0),
                tops=() if sampled is None else await policy.tops(prompt, sampled.tokens, k),
            )

        choices = [(prompt, seed) for prompt in prompts for seed in seeds]
        return await _together([answer(index, *choice) for index, choice in enumerate(choices)])


def completion_routes(
    service: Service, access: Access, renderer: Renderer, worker: Callable[..., Awaitable[Tenant]]
) -> APIRouter:
    routes = APIRouter(prefix=PREFIX.rstrip("/"), tags=["openai"])
    completions = Completions(service, renderer)
    who = Depends(worker)

    async def counted(who: Tenant, size: int, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """An open answer is a poll to those who count them, and a request of `size` bytes that waits."""
        with contextlib.ExitStack() as stack:
            try:
                access.begin_poll(who)
                stack.callback(access.end_poll, who)
                stack.enter_context(service.room(who, size))
            except TooMany:
                work.close()
                raise
            return await work

    @routes.post("/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request, who: Tenant = who) -> Response:
        body = await request.body()
        asked = parse_request(body, max_n=MAX_N, max_tops=MAX_TOPS)
        if asked.stream:
            stream = ChatStream(asked, renderer, **_named("chatcmpl"))
            return await _streamed(
                request, lambda heard: counted(who, len(body), completions.chat(who, asked, heard)), stream
            )
        answers = await while_connected(request, counted(who, len(body), completions.chat(who, asked)))
        return JSONResponse(completion_body(answers, asked, renderer, **_named("chatcmpl")))

    @routes.post("/completions", openapi_extra=described(TextRequest))
    async def text_completions(request: Request, who: Tenant = who) -> Response:
        body = await request.body()
        asked = parse_text(body, max_n=MAX_N, max_tops=MAX_TOPS)
        if asked.stream:
            stream = TextStream(asked, renderer, **_named("cmpl"))
            return await _streamed(
                request, lambda heard: counted(who, len(body), completions.text(who, asked, heard)), stream
            )
        answers = await while_connected(request, counted(who, len(body), completions.text(who, asked)))
        return JSONResponse(text_body(answers, asked, renderer, **_named("cmpl")))

    @routes.get("/models")
    async def models(who: Tenant = who) -> dict[str, object]:
        return {"object": "list", "data": completions.models(who)}

    return routes


def completion_refusal(exc: HeadraceError, headers: Mapping[str, str]) -> Response:
    """A refusal in OpenAI's shape; `headers` say when to come again."""
    refused = _refused(exc)
    again = {} if refused.status == 429 else {"x-should-retry": "false"}  # what failed fails again
    told = json.dumps(refused.body())  # in ASCII: what is refused may not even be text
    return Response(told, refused.status, {**headers, **again}, media_type="application/json")


def _refused(exc: HeadraceError) -> ApiError:
    match exc:
        case ApiError():
            return exc
        case Denied():
            return ApiError(str(exc), status=401, code="invalid_api_key")
        case TooMany():
            return ApiError(str(exc), status=429, code="rate_limit_exceeded")
        case Unknown():
            return ApiError(str(exc), status=404, param="model", code="model_not_found")
        case Gone() | SamplerGoneError():
            return ApiError(str(exc), status=410, param="model", code="model_gone")
        case _:
            return ApiError(str(exc), status=400 if failed(exc).category == "user" else 500)


def _check_temperature(asked: float | None) -> None:
    if asked is not None and asked > MAX_TEMPERATURE:
        raise ApiError(f"temperature may be {MAX_TEMPERATURE:g} at most", param="temperature")


def _passing(who: Tenant, **weights: Any) -> SamplerRecord:
    """A sampling session of one request."""
    return SamplerRecord(id="", session="", owner=who.name, created=time.time(), **weights)


async def _together(work: Sequence[Any]) -> list[Any]:
    """All results; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as exc:
        raise exc.exceptions[0] from exc.exceptions[0].__cause__
    return [task.result() for task in tasks]


def _named(kind: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time())}


class SoFar:
    """How far each choice is: the last that was told of each, for a reader who takes it when he can."""

    def __init__(self) -> None:
        self._told: dict[int, Completion] = {}
        self._news = asyncio.Event()

    def tell(self, index: int, completion: Completion) -> None:
        self._told[index] = completion
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()

    def take(self) -> list[tuple[int, Completion]]:
        told, self._told = self._told, {}
        self._news.clear()
        return list(told.items())


async def _streamed(
    request: Request, work: Callable[[Heard], Coroutine[Any, Any, list[Any]]], stream: ChatStream | TextStream
) -> Response:
    """Events as the work goes on; what fails before the first of them is a refusal, and later the last event. Who hangs
    up ends the work, whether anything was sent or not."""
    so_far = SoFar()
    working, leaving = asyncio.ensure_future(work(so_far.tell)), asyncio.ensure_future(_hung_up(request))
    leaving.add_done_callback(lambda _: working.cancel())
    working.add_done_callback(lambda _: so_far.wake())

    def end() -> None:
        working.cancel()
        leaving.cancel()

    try:
        await so_far.wait()
        if working.cancelled():
            raise ApiError("the program hung up", status=499)
        if working.done():
            working.result()
    except BaseException:
        end()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            while not working.done():
                for index, completion in so_far.take():
                    for event in stream.chunk(index, completion):
                        yield event
                await so_far.wait()
            if working.cancelled():
                return
            try:
                answers = working.result()
            except HeadraceError as exc:
                yield sent_event(_refused(exc).body())
                return
            for event in stream.end(answers):
                yield event
        finally:
            end()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
