"""OpenAI's chat and text completions on any sampler of the service, for programs that know no other API.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

`model` is a sampler checkpoint (tinker://RUN/sampler_weights/NAME), a sampling session, or the base model by any of its
names. Nothing here is journalled: a client that hangs up ends the sampling, and may ask again. Log-probs are at
temperature 1. Requests and replies are those of the endpoint for agent programs. A stream is sent while its sequences
are sampled; where tools may be called, when it is known whether they are.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from headrace.algo.random import derive_seed
from headrace.infer.openai_api.app import while_connected
from headrace.infer.openai_api.chat_requests import ApiError, ChatRequest, parse_request
from headrace.infer.openai_api.chat_responses import Answer, ChatStream, completion_body
from headrace.infer.openai_api.session import Call, ChatSession
from headrace.infer.openai_api.streaming import ChunkedSampler
from headrace.infer.openai_api.text_completions import (
    TextAnswer,
    TextRequest,
    TextStream,
    parse_text,
    read_prompts,
    text_body,
)
from headrace.render import Renderer
from headrace.service.core import Service
from headrace.service.host.model_host import FullFinetune
from headrace.service.http.auth import Access, ApiUser, RateLimited
from headrace.service.http.openai_responses import PREFIX, Progress, stream_response
from headrace.service.http.schemas import openapi_body
from headrace.service.store.entities import SCHEME, CheckpointKind, SamplerRecord, split_path
from headrace.service.store.registry import NotFound
from headrace.tool_calls import find_form
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, SamplingParams, float_array, int_array

MAX_N, MAX_TOPS, MAX_CHOICES = 128, 20, 1024
MAX_TEMPERATURE = 100.0
TEXT_TOKENS = 16  # sampled after a text whose request does not say how many


@dataclass(frozen=True, slots=True)
class _Policy:
    """A sampler of the service with the interface that the endpoint's code samples through."""

    service: Service
    sampler: SamplerRecord

    async def sample(self, request: SampleRequest) -> Completion:
        return await self.service.sampling.draw(self.sampler, request)

    def telling(self, progress: Progress | None, index: int) -> "_Policy | ChunkedSampler":
        return self if progress is None else ChunkedSampler(self.sample, partial(progress, index))

    async def tops(self, prompt: IntArray, tokens: IntArray, k: int) -> tuple[dict[int, float], ...]:
        """Return the k likeliest tokens at each position behind a prompt; empty if k is 0."""
        if not k or not len(tokens):
            return ()
        most = min(k, self.service.card.vocabulary)
        top = await self.service.sampling.tops(self.sampler, int_array([*prompt, *tokens]), most)
        rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
        return tuple(dict(zip(*row, strict=True)) for row in list(rows)[len(prompt) :])


class Completions:
    """Answer the endpoints' requests."""

    def __init__(self, service: Service, renderer: Renderer) -> None:
        self._service, self._renderer = service, renderer
        self._form = find_form(renderer)

    def find(self, user: ApiUser, model: str) -> SamplerRecord:
        """Find the sampler that a request names; raises NotFound, Gone, or ApiError for a path of other weights."""
        card = self._service.card
        if model in card.names:
            return _one_request_session(user, base_model=model)
        if not model.startswith(SCHEME):
            return self._session(user, model)
        if split_path(model)[1] is not CheckpointKind.SAMPLER:
            raise ApiError(f"{model} cannot be sampled from: use a sampler_weights path", param="model")
        checkpoint = self._service.registry.checkpoint(model, user.name)
        full = isinstance(checkpoint.spec, FullFinetune)
        return _one_request_session(user, base_model=checkpoint.base_model, model_path=model, full=full)

    def _session(self, user: ApiUser, model: str) -> SamplerRecord:
        try:
            return self._service.sampling_requests.find_session(user, model)
        except NotFound as exc:
            names = " or ".join(self._service.card.names)
            others = "a sampling session or the sampler_weights path of a checkpoint (GET /v1/models lists them)"
            raise NotFound(f"there is no model '{model[:200]}': use {names}, {others}") from exc

    def models(self, user: ApiUser) -> list[dict[str, object]]:
        card, registry = self._service.card, self._service.registry
        named = [(name, self._service.started) for name in card.names]
        saved = [c for c in registry.checkpoints.values() if c.kind is CheckpointKind.SAMPLER and c.owner == user.name]
        live = [s for s in registry.samplers.values() if s.owner == user.name and s.gone is None]
        named += [(checkpoint.path, checkpoint.created) for checkpoint in saved]
        named += [(sampler.id, sampler.created) for sampler in live]
        return [{"id": id, "object": "model", "created": int(when), "owned_by": "headrace"} for id, when in named]

    async def chat(self, user: ApiUser, chat_request: ChatRequest, progress: Progress | None = None) -> list[Answer]:
        """Answer a chat; `progress` is called with each choice as it grows."""
        policy = _Policy(self._service, self.find(user, chat_request.model))
        _check_temperature(chat_request.temperature)
        once = secrets.randbits(62)
        context = self._service.card.context
        sampling = SamplingParams(max_tokens=context, stop_tokens=self._renderer.eos_tokens)

        async def answer(index: int) -> Answer:
            record = ChatSession(
                base_url="",
                sampler=policy.telling(progress, index),
                renderer=self._renderer,
                form=self._form,
                sampling=sampling,
                seed=index if chat_request.seed is not None else once + index,
                max_calls=1,
                max_tokens=context,
                pinned=False,
            )
            call: Call = await record.answer(chat_request)
            num_tops = (chat_request.top_logprobs or 0) if chat_request.logprobs else 0
            return Answer(call, await policy.tops(call.prompt, call.completion.tokens, num_tops), raw=True)

        return await _together([answer(index) for index in range(chat_request.n or 1)])

    async def text(
        self, user: ApiUser, text_request: TextRequest, progress: Progress | None = None
    ) -> list[TextAnswer]:
        policy = _Policy(self._service, self.find(user, text_request.model))
        _check_temperature(text_request.temperature)
        prompts = read_prompts(text_request, self._renderer, vocabulary=self._service.card.vocabulary)
        count = text_request.n or 1
        if len(prompts) * count > MAX_CHOICES:
            raise ApiError(f"prompts times n may be {MAX_CHOICES}: ask for less at once", param="n")
        once = secrets.randbits(62)
        seeds = [
            derive_seed(i, "asked", text_request.seed) if text_request.seed is not None else once + i
            for i in range(count)
        ]
        max_tokens = TEXT_TOKENS if text_request.max_tokens is None else text_request.max_tokens
        context = self._service.card.context
        for prompt in prompts:
            if len(prompt) + min(max_tokens, 1) > context:
                raise ApiError(
                    f"a prompt of {len(prompt)} tokens does not fit into the context of {context}",
                    param="prompt",
                    code="context_length_exceeded",
                )

        async def answer(index: int, prompt: IntArray, seed: int) -> TextAnswer:
            params = SamplingParams(
                max_tokens=min(max_tokens, context - len(prompt)),
                temperature=1.0 if text_request.temperature is None else text_request.temperature,
                top_p=1.0 if text_request.top_p is None else text_request.top_p,
                stop_strings=text_request.stops,
                seed=seed,
            )
            request = SampleRequest(prompt=prompt, params=params)
            sampled = await policy.telling(progress, index).sample(request) if max_tokens else None
            k, echoed = text_request.logprobs or 0, bool(text_request.echo) and text_request.logprobs is not None
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
    service: Service, access: Access, renderer: Renderer, rate_limit: Callable[..., Awaitable[ApiUser]]
) -> APIRouter:
    routes = APIRouter(prefix=PREFIX.rstrip("/"), tags=["openai"])
    completions = Completions(service, renderer)
    limited_user = Depends(rate_limit)

    async def counted(user: ApiUser, size: int, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """Count the work as an open poll and as a waiting request of `size` bytes."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(access.polling(user))
                stack.enter_context(service.requests.counted(user, size))
            except RateLimited:
                work.close()
                raise
            return await work

    @routes.post("/chat/completions", openapi_extra=openapi_body(ChatRequest))
    async def chat_completions(request: Request, user: ApiUser = limited_user) -> Response:
        body = await request.body()
        chat_request = parse_request(body, max_n=MAX_N, max_tops=MAX_TOPS)
        if chat_request.stream:
            stream = ChatStream(chat_request, renderer, **_named("chatcmpl"))
            return await stream_response(
                request,
                lambda progress: counted(user, len(body), completions.chat(user, chat_request, progress)),
                stream,
            )
        answers = await while_connected(request, counted(user, len(body), completions.chat(user, chat_request)))
        return JSONResponse(completion_body(answers, chat_request, renderer, **_named("chatcmpl")))

    @routes.post("/completions", openapi_extra=openapi_body(TextRequest))
    async def text_completions(request: Request, user: ApiUser = limited_user) -> Response:
        body = await request.body()
        text_request = parse_text(body, max_n=MAX_N, max_tops=MAX_TOPS)
        if text_request.stream:
            stream = TextStream(text_request, renderer, **_named("cmpl"))
            return await stream_response(
                request,
                lambda progress: counted(user, len(body), completions.text(user, text_request, progress)),
                stream,
            )
        answers = await while_connected(request, counted(user, len(body), completions.text(user, text_request)))
        return JSONResponse(text_body(answers, text_request, renderer, **_named("cmpl")))

    @routes.get("/models")
    async def models(user: ApiUser = limited_user) -> dict[str, object]:
        return {"object": "list", "data": completions.models(user)}

    return routes


def _check_temperature(temperature: float | None) -> None:
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise ApiError(f"temperature may be {MAX_TEMPERATURE:g} at most", param="temperature")


def _one_request_session(user: ApiUser, **weights: Any) -> SamplerRecord:
    """Make a sampling session for one request."""
    return SamplerRecord(id="", session="", owner=user.name, created=time.time(), **weights)


async def _together(work: Sequence[Any]) -> list[Any]:
    """Wait for all results; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as exc:
        raise exc.exceptions[0] from exc.exceptions[0].__cause__
    return [task.result() for task in tasks]


def _named(kind: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time())}
