"""The ASGI application: one base URL for each open episode, errors in OpenAI's format.

    POST {root}/episodes/{id}/v1/chat/completions
    GET  {root}/episodes/{id}/v1/models

Ids cannot be guessed, so one program does not reach another's episode. `server.serve` owns the socket.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.errors import HeadraceError
from headrace.infer.openai_api.chat_requests import ApiError, parse_request
from headrace.infer.openai_api.chat_responses import Answer, ChatStream, completion_body
from headrace.infer.openai_api.session import ChatSession, SampleFn
from headrace.render import Renderer
from headrace.tool_calls import find_form
from headrace.types import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
MODEL = "policy"  # any other name is served as well, and repeated in the reply


class OpenAIEndpoint:
    """Hold the open episodes, and serve each under its own URL."""

    def __init__(self, renderer: Renderer, *, root_url: str = "http://endpoint") -> None:
        self._renderer = renderer
        self._form = find_form(renderer)
        self._root_url = root_url.rstrip("/")
        self._records: dict[str, ChatSession] = {}
        self.app = self._make_app()

    def open(
        self,
        *,
        sampler: SampleFn,
        sampling: SamplingParams,
        seed: int,
        max_calls: int,
        max_tokens: int,
        pinned: bool = True,
    ) -> ChatSession:
        """Open an episode with a base URL of its own; the caller passes it to `close`."""
        id = secrets.token_urlsafe(16)
        self._records[id] = ChatSession(
            base_url=f"{self._root_url}/episodes/{id}/v1",
            sampler=sampler,
            renderer=self._renderer,
            form=self._form,
            sampling=sampling,
            seed=seed,
            max_calls=max_calls,
            max_tokens=max_tokens,
            pinned=pinned,
        )
        return self._records[id]

    def close(self, record: ChatSession) -> None:
        """Close an episode: its URL is unknown from now on, and the record stays readable."""
        record.close()
        self._records = {id: other for id, other in self._records.items() if other is not record}

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="headrace agent endpoint", docs_url=None, redoc_url=None, openapi_url=None)

        async def chat(request: Request) -> Response:
            return await self._chat(request)

        async def models(request: Request) -> Response:
            self._find(request)
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "headrace"}
            return JSONResponse({"object": "list", "data": [model]})

        async def refuse(request: Request, exc: Exception) -> Response:
            assert isinstance(exc, ApiError | HTTPException)
            error = exc if isinstance(exc, ApiError) else ApiError(str(exc.detail), status=exc.status_code)
            # failures of this endpoint are deterministic, and a client that retries would only fail later
            return JSONResponse(error.body(), status_code=error.status, headers={"x-should-retry": "false"})

        app.add_api_route("/episodes/{id}/v1/chat/completions", chat, methods=["POST"])
        app.add_api_route("/episodes/{id}/v1/models", models, methods=["GET"])
        app.add_exception_handler(ApiError, refuse)
        app.add_exception_handler(HTTPException, refuse)
        return app

    def _find(self, request: Request) -> ChatSession:
        record = self._records.get(request.path_params["id"])
        if record is None:
            raise ApiError("there is no such episode, or it is over", status=404, code="unknown_episode")
        return record

    async def _chat(self, request: Request) -> Response:
        record = self._find(request)
        body = parse_request(await _read(request))
        try:
            call = await while_connected(request, record.answer(body))
        except ApiError:
            raise
        except HeadraceError as exc:
            logger.warning("a call of an agent program failed: %s", exc)
            raise ApiError(str(exc), status=500) from exc
        id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        if body.stream:
            events = ChatStream(body, self._renderer, id=id, created=created).end([Answer(call)])
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return JSONResponse(completion_body([Answer(call)], body, self._renderer, id=id, created=created))


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel it when the program hangs up, because an unread reply is no step."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the program hung up", status=499)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
