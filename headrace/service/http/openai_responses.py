"""Errors and streams in the shape of OpenAI's API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.errors import HeadraceError, SamplerGoneError
from headrace.infer.openai_api.chat_requests import ApiError
from headrace.infer.openai_api.chat_responses import ChatStream, sent_event
from headrace.infer.openai_api.text_completions import TextStream
from headrace.service.http.auth import RateLimited, Unauthorized
from headrace.service.requests.request_table import to_failure
from headrace.service.store.registry import Gone, NotFound
from headrace.types import Completion

PREFIX = "/v1/"
Progress = Callable[[int, Completion], None]  # called with the index of a choice, and the choice as it is now


def error_response(exc: HeadraceError, headers: Mapping[str, str]) -> Response:
    """Answer an error in OpenAI's shape; `headers` say when to come again."""
    error = _api_error(exc)
    again = {} if error.status == 429 else {"x-should-retry": "false"}  # what failed fails again
    body = json.dumps(error.body())  # in ASCII: what is refused may not even be text
    return Response(body, error.status, {**headers, **again}, media_type="application/json")


def _api_error(exc: HeadraceError) -> ApiError:
    match exc:
        case ApiError():
            return exc
        case Unauthorized():
            return ApiError(str(exc), status=401, code="invalid_api_key")
        case RateLimited():
            return ApiError(str(exc), status=429, code="rate_limit_exceeded")
        case NotFound():
            return ApiError(str(exc), status=404, param="model", code="model_not_found")
        case Gone() | SamplerGoneError():
            return ApiError(str(exc), status=410, param="model", code="model_gone")
        case _:
            return ApiError(str(exc), status=400 if to_failure(exc).category == "user" else 500)


class LatestChoices:
    """Keep the latest state of each choice for a reader who takes it when it can."""

    def __init__(self) -> None:
        self._latest: dict[int, Completion] = {}
        self._news = asyncio.Event()

    def put(self, index: int, completion: Completion) -> None:
        self._latest[index] = completion
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()

    def take(self) -> list[tuple[int, Completion]]:
        latest, self._latest = self._latest, {}
        self._news.clear()
        return list(latest.items())


async def stream_response(
    request: Request, work: Callable[[Progress], Coroutine[Any, Any, list[Any]]], stream: ChatStream | TextStream
) -> Response:
    """Send events while the work goes on. An error before the first event is a refusal, a later one the last event. A
    client that hangs up ends the work, whether anything was sent or not."""
    latest = LatestChoices()
    working, leaving = asyncio.ensure_future(work(latest.put)), asyncio.ensure_future(_hung_up(request))
    leaving.add_done_callback(lambda _: working.cancel())
    working.add_done_callback(lambda _: latest.wake())

    def end() -> None:
        working.cancel()
        leaving.cancel()

    try:
        await latest.wait()
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
                for index, completion in latest.take():
                    for event in stream.chunk(index, completion):
                        yield event
                await latest.wait()
            if working.cancelled():
                return
            try:
                answers = working.result()
            except HeadraceError as exc:
                yield sent_event(_api_error(exc).body())
                return
            for event in stream.end(answers):
                yield event
        finally:
            end()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
