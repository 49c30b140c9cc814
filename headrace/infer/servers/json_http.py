"""Send JSON to a server and read JSON or server-sent events back, with a deadline and a size limit on everything."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import ServerLostError
from headrace.retry import reply_words

MAX_REPLY_BYTES = 256 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
DATA, DONE = "data:", "[DONE]"


class JsonHttp:
    """Requests to one server. It may be used in one event loop after another, which each get their own connections.

    `silence_s`: how long a reply may bring nothing before the server counts as lost.
    """

    def __init__(self, url: str, *, silence_s: float = 600.0, connect_s: float = 10.0, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout = httpx.Timeout(silence_s, connect=connect_s)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, *, deadline_s: float = 60.0) -> Any:
        return await self._send("GET", path, None, deadline_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float = 60.0) -> Any:
        """Return the parsed reply, or its text where that is no JSON."""
        return await self._send("POST", path, body, deadline_s)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each server-sent event, until "[DONE]". Raises ServerLostError if the stream breaks off."""
        try:
            async with self._connections().stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    self._check(path, response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith(DATA):
                        continue
                    if len(line) > MAX_EVENT_BYTES:
                        raise ServerLostError(f"{self.url} sent an event of {len(line)} bytes: look at the server")
                    text = line.removeprefix(DATA).strip()
                    if text == DONE:
                        return
                    with boundary(SamplerError, f"an event of {self.url} is not JSON"):
                        event = json.loads(text)
                    yield event
        except httpx.HTTPError as exc:
            raise self._lost(path, exc) from exc
        raise ServerLostError(f"{self.url} broke off its answer to {path}")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                async with self._connections().stream(method, self.url + path, json=body) as response:
                    content = await response.aread() if _small(response) else b""
        except TimeoutError as exc:
            raise ServerLostError(f"{self.url} did not answer {path} within {deadline_s:g} s") from exc
        except httpx.HTTPError as exc:
            raise self._lost(path, exc) from exc
        if response.status_code != 200:
            self._check(path, response.status_code, content)
        with suppress(ValueError):
            return json.loads(content)
        return content.decode(errors="replace")

    def _check(self, path: str, status: int, content: bytes) -> None:
        """Raise for an error status: below 500 the request is refused, from there on the server has failed."""
        error = ServerLostError if status >= 500 else SamplerError
        raise error(f"{self.url}{path} answered {status}: {reply_words(status, content)}")

    def _lost(self, path: str, exc: Exception) -> ServerLostError:
        return ServerLostError(f"{self.url} is gone or does not answer ({path}: {type(exc).__name__} {exc})".rstrip())

    def _connections(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(
                timeout=self._timeout, limits=limits, headers=self._headers, trust_env=False
            )
            self._loop = loop
        return self._client


def _small(response: httpx.Response) -> bool:
    return int(response.headers.get("content-length", 0)) <= MAX_REPLY_BYTES
