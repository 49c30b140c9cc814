"""Send HTTP to one server from a thread with an event loop of its own, so that sync and async callers share a client.

Requests are sent again if the server cannot be reached or answers that it may work later (`retry.check_transient`);
every request carries its own number, so the server runs it once however often it arrives. Any other refusal is raised
in the server's words.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from headrace.errors import BackendError, HeadraceError, SamplerError, SamplerGoneError, boundary
from headrace.retry import Backoff, GaveUp, TryAgain, check_transient, doubling, reply_words, retry_async
from headrace.service.client.futures import Accepted, RequestFuture, RequestStatus, SyncAsyncFuture, promise

logger = logging.getLogger(__name__)

T = TypeVar("T")
API = "/api/v1"
PROTOBUF = "application/x-protobuf"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
CLOSE_S = 30.0
QUICK_S = 0.1  # a poll that ends sooner was not held: the server is closing


class RequestRefused(HeadraceError):
    """The server refused the request."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Unreachable(HeadraceError):
    """The server did not answer while the request was retried."""


class Transport:
    """Sends requests on a thread of its own, and waits for their outcomes."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retry_s: float = 120.0,  # how long a request is sent again before it fails
        timeout_s: float = 60.0,  # of one answer; above the server's longest poll
        network: httpx.AsyncBaseTransport | None = None,  # replaces the network in tests
    ) -> None:
        self.url = url.rstrip("/")
        self._retry_s = retry_s
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"X-API-Key": key},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=network,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)
        self._thread.start()

    def spawn(
        self, work: Coroutine[Any, Any, T], error: type[HeadraceError] = BackendError, out: "Future[T] | None" = None
    ) -> SyncAsyncFuture[T]:
        """Run a coroutine on this thread; coroutines start in the order of the calls. Fails with `error` only.

        `out`: the future to set; the work may end before this returns.
        """
        out = promise() if out is None else out

        async def run() -> None:
            try:
                with boundary(error, "the client failed"):
                    out.set_result(await work)
            except HeadraceError as exc:
                out.set_exception(translate(exc, error))
            except asyncio.CancelledError:
                out.set_exception(error("the client was closed before the request ended"))

        def start() -> None:
            task = self._loop.create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        with self._lock:
            closed = self._closed
            if not closed:
                self._loop.call_soon_threadsafe(start)
        if closed:
            work.close()
            out.set_exception(error("the client is closed"))
        return SyncAsyncFuture(out)

    async def call(
        self,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """POST until there is an answer, which is 2xx or 408; raises RequestRefused and Unreachable.

        `timeout_s` is of one answer; None takes the transport's.
        """
        kind = {} if content is None else {"Content-Type": PROTOBUF}
        limit = {} if timeout_s is None else {"timeout": timeout_s}
        return await self._ask("POST", path, json=json, content=content, headers={**kind, **(headers or {})}, **limit)

    async def read(self, path: str) -> httpx.Response:
        return await self._ask("GET", path)

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path)

    async def get(self, path: str) -> Any:
        """GET the path and return the JSON of the answer."""
        return (await self.read(path)).json()

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def attempt() -> httpx.Response:
            try:
                response = await self._http.request(method, path, **options)
            except httpx.RequestError as exc:
                raise TryAgain(f"{type(exc).__name__}: {exc}") from exc
            status, content = response.status_code, response.content
            if status < 300 or status == 408:
                return response
            check_transient(status, response.headers, content)
            raise RequestRefused(reply_words(status, content), status)

        try:
            return await retry_async(attempt, Backoff(doubling(FIRST_WAIT_S, LONGEST_WAIT_S), self._retry_s))
        except GaveUp as exc:
            raise Unreachable(f"the service at {self.url} did not answer for {self._retry_s:g} s: {exc}") from exc

    async def outcome(self, request_id: str, lost: Callable[[], str | None] = lambda: None) -> httpx.Response:
        """Wait until a request has ended. Raises RequestRefused if it failed, Unreachable with the reason of `lost`."""
        while True:
            began = time.monotonic()
            response = await self.call(f"{API}/retrieve_future", json={"request_id": request_id})
            if response.status_code != 408:
                break
            sentence = lost()
            if sentence is not None:
                raise Unreachable(sentence)
            if time.monotonic() - began < QUICK_S:
                await asyncio.sleep(QUICK_S)
        if not response.headers.get("content-type", "").startswith(PROTOBUF):
            answer = response.json()
            if "error" in answer:
                raise RequestRefused(str(answer["error"]), 400)
        return response

    def submit(
        self,
        limit: asyncio.Semaphore,
        send: Callable[[], Coroutine[Any, Any, str]],
        read: Callable[[httpx.Response], T],
        *,
        error: type[HeadraceError],
        status: "Callable[[str, Future[T]], SyncAsyncFuture[RequestStatus]]",
        lost: Callable[[], str | None] = lambda: None,
    ) -> RequestFuture[T]:
        """Send when `limit` has room, in the order of the calls; `send` returns the server's id of the request."""
        accepted, finished = promise(), promise()
        finished.add_done_callback(lambda ended: _fail_unaccepted(accepted, ended))

        async def run() -> T:
            async with limit:
                id = await send()
                accepted.set_result(Accepted(id, finished, lambda: status(id, finished)))
                return read(await self.outcome(id, lost))

        async def stop() -> bool:
            request: Accepted[T] = await asyncio.wrap_future(accepted)
            answer = await self.call(f"{API}/cancel_future", json={"request_id": request.request_id})
            return bool(answer.json()["cancelled"])

        self.spawn(run(), error, finished)
        return RequestFuture(accepted, finished, lambda: self.spawn(stop(), error))

    def close(self) -> None:
        """Fail all open requests here; at the server they continue."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

        async def end() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._http.aclose()

        with contextlib.suppress(TimeoutError):  # the thread is a daemon: it ends with the process
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


def translate(exc: HeadraceError, error: type[HeadraceError]) -> HeadraceError:
    """Convert an error of the transport to the type that the caller expects, with the same sentence."""
    if not isinstance(exc, RequestRefused | Unreachable):
        return exc
    gone = isinstance(exc, RequestRefused) and exc.status == 410 and error is SamplerError
    translated = SamplerGoneError(str(exc)) if gone else error(str(exc))
    translated.__cause__ = exc
    return translated


def _fail_unaccepted(accepted: "Future[Any]", ended: "Future[Any]") -> None:
    error = ended.exception()
    if not accepted.done():
        assert error is not None
        accepted.set_exception(error)
