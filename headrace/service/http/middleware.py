"""Answer errors with status codes, and check keys and sizes before bodies are read, for all HTTP applications of the
service.

Status codes steer the public SDK's retries: 408 says "ask again at once", 429 "slow down", 410 "lost", 400 and 404 are
final, 409 and 402 are never sent.
"""

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, JournalError, RequestError
from headrace.infer.openai_api.chat_requests import ApiError
from headrace.service.http.auth import Access, RateLimited, Unauthorized, key_of
from headrace.service.http.openai_responses import PREFIX, error_response
from headrace.service.store.registry import Gone, NotFound

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/api/v1/healthz",)  # answered without a key
SIGNED = "/download/"  # links carry their own right to be followed
# Calls of the public SDK and its command line that have no meaning here, by method and path.
UNSERVED: Mapping[str, str] = {
    r"POST /api/v1/auth/token": "tokens in place of keys: send the API key itself",
    r"\w+ /api/v1/auth/apikey/me": "logins: keys are entries of serve.toml, made by headrace key",
    r"POST /api/v1/sessions/search": "a search of sessions: GET /api/v1/sessions lists them",
    r"PUT /api/v1/sessions/[^/]+/project": "projects: everything belongs to the owner of its key",
    r"GET /api/v1/sessions/[^/]+/trace_export": "traces of sessions: GET /metrics has the server's figures",
    r"GET /api/v1/audit": "an audit log",
    r"GET /api/v1/billing/.*": "billing",
    r"POST /api/v1/forward": "JSON training requests of old SDKs: use tinker 0.25 or newer",
}


class BodyTooLarge(RequestError):
    """The body has more bytes than the server takes."""


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

    async def unserved(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, AnyHTTPException)
        status, sentence, headers = exc.status_code, str(exc.detail), dict(exc.headers or {})
        if status in (404, 405):
            status, sentence = _unserved(request.method, request.url.path, status)
        if request.url.path.startswith(PREFIX):
            return error_response(ApiError(sentence, status=status), headers)
        return JSONResponse({"detail": sentence}, status_code=status, headers=headers)

    app.add_exception_handler(AnyHTTPException, unserved)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HeadraceError, refused)


def _unserved(method: str, path: str, status: int) -> tuple[int, str]:
    """Say in a sentence that a path is not served; calls of the SDK get 404, which it does not send again."""
    for pattern, what in UNSERVED.items():
        if re.fullmatch(pattern, f"{method} {path}"):
            return 404, f"this server does not serve {what}"
    return status, f"this server does not serve {method} {path[:200]}: GET /docs lists what it serves"


def _status(exc: HeadraceError) -> tuple[int, dict[str, str]]:
    """Return the status code of an error, and headers that say when to come again."""
    match exc:
        case ApiError():
            return exc.status, {}
        case Unauthorized():
            return 401, {}
        case RateLimited():
            wait_ms = max(1, round(exc.retry_s * 1000))
            return 429, {"retry-after-ms": str(wait_ms), "retry-after": str(max(1, math.ceil(exc.retry_s)))}
        case BodyTooLarge():
            return 413, {}
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


class RequestGate:
    """Check the key and the size of a request before its body is read, and count the bytes that are being received.

    A body above `limit` bytes is refused with 413, whether it says how long it is or not.
    """

    def __init__(self, app: ASGIApp, *, access: Access, limit: int) -> None:
        self._app, self._access, self._limit = app, access, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._checked(scope, receive, send)
        except HeadraceError as exc:  # nothing was sent yet: errors of the application end in its own handlers
            await _refusal(scope["path"], exc)(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(SIGNED):
            await self._app(scope, receive, send)  # their routes read no body
            return
        user = self._access.authenticate(key_of(headers))
        stated = dict(headers).get(b"content-length", b"0")
        if not stated.isdigit() or int(stated) > self._limit:
            raise BodyTooLarge(self._sentence())
        received = 0
        with self._access.receiving(user) as count:

            async def counted() -> Message:
                nonlocal received
                message = await receive()
                size = len(message.get("body", b""))
                received += size
                try:
                    if received > self._limit:
                        raise BodyTooLarge(self._sentence())
                    if message["type"] == "http.request":
                        count(size, more=message.get("more_body", False))
                except RequestError as exc:  # the one class that FastAPI lets through while it reads a body
                    status, again = _status(exc)
                    raise HTTPException(status, str(exc), again) from exc
                return message

            await self._app(scope, counted, send)

    def _sentence(self) -> str:
        return f"the body has more than {self._limit} bytes: send fewer data at once"


def _refusal(path: str, exc: HeadraceError) -> Response:
    status, headers = _status(exc)
    if path.startswith(PREFIX):
        return error_response(ApiError(str(exc), status=status) if status == 413 else exc, headers)
    return JSONResponse({"detail": str(exc)}, status_code=status, headers=headers)
