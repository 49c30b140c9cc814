"""The ASGI application: one base URL for each open episode, errors in the format of the API that was called.

    POST {root}/episodes/{id}/v1/chat/completions
    POST {root}/episodes/{id}/v1/responses
    POST {root}/episodes/{id}/v1/messages, and /v1/messages/count_tokens
    GET  {root}/episodes/{id}/v1/models

Anthropic's clients add `/v1` to a base URL and OpenAI's do not, so paths with a second `/v1` mean the same. Ids cannot
be guessed, so one program does not reach another's episode. `server.serve` owns the socket.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.errors import HeadraceError
from headrace.infer.openai_api.anthropic_replies import error_body, message_body, message_events
from headrace.infer.openai_api.anthropic_requests import parse_messages
from headrace.infer.openai_api.chat_requests import ApiError, ChatRequest, MessageIn, parse_request
from headrace.infer.openai_api.chat_responses import Answer, ChatStream, completion_body
from headrace.infer.openai_api.responses_replies import response_body, response_events
from headrace.infer.openai_api.responses_requests import ResponsesRequest, parse_responses, reply_message
from headrace.infer.openai_api.session import Call, ChatSession, SampleFn
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
        self._stored: dict[tuple[str, str], list[MessageIn]] = {}  # conversations by the ids of episode and response
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
        self._stored = {key: value for key, value in self._stored.items() if key[0] in self._records}

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="headrace agent endpoint", docs_url=None, redoc_url=None, openapi_url=None)

        async def refuse(request: Request, exc: Exception) -> Response:
            assert isinstance(exc, ApiError | HTTPException)
            error = exc if isinstance(exc, ApiError) else ApiError(str(exc.detail), status=exc.status_code)
            body = error_body(error) if "/v1/messages" in request.url.path else error.body()
            # failures of this endpoint are deterministic, and a client that retries would only fail later
            return JSONResponse(body, status_code=error.status, headers={"x-should-retry": "false"})

        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "chat/completions": self._chat,
            "responses": self._responses,
            "messages": self._messages,
            "messages/count_tokens": self._count_tokens,
        }
        for version in ("v1", "v1/v1"):
            for path, answer in posts.items():
                app.add_route(f"/episodes/{{id}}/{version}/{path}", answer, methods=["POST"])
            app.add_route(f"/episodes/{{id}}/{version}/models", self._models, methods=["GET"])
        app.add_exception_handler(ApiError, refuse)
        app.add_exception_handler(HTTPException, refuse)
        return app

    def _find(self, request: Request) -> ChatSession:
        record = self._records.get(request.path_params["id"])
        if record is None:
            raise ApiError("there is no such episode, or it is over", status=404, code="unknown_episode")
        return record

    async def _models(self, request: Request) -> Response:
        """List the one model, in a form that the clients of both APIs read."""
        self._find(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "headrace"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse({"object": "list", "data": [model], **pages})

    async def _chat(self, request: Request) -> Response:
        record = self._find(request)
        asked = parse_request(await _read(request))
        call = await _answer(request, record, asked)
        id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        if asked.stream:
            return _stream(ChatStream(asked, self._renderer, id=id, created=created).end([Answer(call)]))
        return JSONResponse(completion_body([Answer(call)], asked, self._renderer, id=id, created=created))

    async def _messages(self, request: Request) -> Response:
        record = self._find(request)
        asked = parse_messages(await _read(request))
        call = await _answer(request, record, asked.to_chat())
        id = f"msg_{secrets.token_hex(12)}"
        if asked.stream:
            return _stream(message_events(call, asked, id=id))
        return JSONResponse(message_body(call, asked, id=id))

    async def _count_tokens(self, request: Request) -> Response:
        record = self._find(request)
        asked = parse_messages(await _read(request), counted=True)
        return JSONResponse({"input_tokens": record.count(asked.to_chat())})

    async def _responses(self, request: Request) -> Response:
        record, episode = self._find(request), request.path_params["id"]
        asked = parse_responses(await _read(request))
        conversation = [*self._conversation(episode, asked), *asked.messages]
        call = await _answer(request, record, asked.to_chat(conversation))
        id, created = f"resp_{secrets.token_hex(12)}", int(time.time())
        if asked.store is not False and episode in self._records:
            calls = [(made.id, made.name, made.arguments) for made in call.reply.tool_calls]
            self._stored[episode, id] = [*conversation, reply_message(call.reply.content, calls)]
        if asked.stream:
            return _stream(response_events(call, asked, id=id, created=created))
        return JSONResponse(response_body(call, asked, id=id, created=created))

    def _conversation(self, episode: str, asked: ResponsesRequest) -> list[MessageIn]:
        """Return the conversation up to the response that a request continues, without that one's instructions."""
        if asked.previous_response_id is None:
            return []
        try:
            return self._stored[episode, asked.previous_response_id]
        except KeyError:
            raise ApiError(
                f"there is no stored response {asked.previous_response_id[:80]!r} in this episode",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None


async def _answer(request: Request, record: ChatSession, asked: ChatRequest) -> Call:
    try:
        return await while_connected(request, record.answer(asked))
    except ApiError:
        raise
    except HeadraceError as exc:
        logger.warning("a call of an agent program failed: %s", exc)
        raise ApiError(str(exc), status=500) from exc


def _stream(events: Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


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
