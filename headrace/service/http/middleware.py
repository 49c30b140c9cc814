"""Answer errors with status codes and limit request bodies, for all HTTP applications of the service.

Status codes steer the public SDK's retries: 408 says "ask again at once", 429 "slow down", 410 "lost", 400 and 404 are
final, 409 and 402 are never sent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, JournalError, RequestError
from headrace.infer.openai_api.chat_requests import ApiError
from headrace.service.http.auth import RateLimited, Unauthorized
from headrace.service.http.openai_responses import PREFIX, error_response
from headrace.service.store.registry import Gone, NotFound

logger = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors with their status code and one sentence; paths of OpenAI's API get that API's shape."""

    async def malformed(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"detail": f"{where}: {first['msg']}"}, status_code=422)

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HeadraceError)
        status, headers = _status(exc)
        if request.url.path.startswith(PREFIX):
            return error_response(exc, headers)
        if status >= 500:
            logger.error("%s %s: %s", request.method, request.url.path, exc)
            await asyncio.sleep(1.0)  # clients ask again at once
        return JSONResponse({"detail": str(exc)}, status_code=status, headers=headers)

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HeadraceError, refused)


def _status(exc: HeadraceError) -> tuple[int, dict[str, str]]:
    """Return the status code of an error, and headers that say when to come again."""
    match exc:
        case ApiError():
            return exc.status, {}
        case Unauthorized():
            return 401, {}
        case RateLimited():
            wait_ms = max(1, round(exc.retry_s * 1000))
            return 429, {"retry-after-ms": str(wait_ms), "retry-after": str(max(1, round(exc.retry_s)))}
        case NotFound():
            return 404, {}
        case Gone():
            return 410, {}
        case RequestError():
            return 400, {}
        case JournalError():
            return 503, {"retry-after": "5"}
        case _:
            return 500, {}


class BodyLimit:
    """Refuse bodies above `limit` bytes before they are in memory, whether they say how long they are or not."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if not stated.isdigit() or int(stated) > self._limit:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise RequestError(f"the body has more than {self._limit} bytes: send fewer data at once")
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"the body has more than {self._limit} bytes: send fewer data at once"
        response: Callable[[Scope, Receive, Send], Awaitable[Any]] = JSONResponse({"detail": detail}, status_code=413)
        await response(scope, receive, send)
