"""Futures of the service's requests, for threads and event loops alike.

A `RequestFuture` is awaited twice: first until the server has the request in its journal, then until it is done. A
`FutureGroup` waits for several. Everything is built on futures of `concurrent.futures` that cannot be cancelled from
outside, so that a caller that stops waiting changes nothing; `cancel` asks the server.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.errors import HeadraceError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """The state of a request."""

    state: str  # queued, running, done or failed
    position: int | None = None  # requests of the same model before it, while it is open
    waited_s: float | None = None


def promise() -> "Future[Any]":
    """Make a future whose `cancel` does nothing."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class SyncAsyncFuture(Generic[T]):
    """A future value: `result` waits on a thread, `await` on an event loop."""

    def __init__(self, future: "Future[T]") -> None:
        self.future = future

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value; raises TimeoutError after `timeout_s`."""
        return self.future.result(timeout_s)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        return self.future.exception(timeout_s)

    def done(self) -> bool:
        return self.future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self.future).__await__()


class Accepted(SyncAsyncFuture[T]):
    """A request that the server has in its journal: it will be run once, whatever happens to either side."""

    def __init__(self, request_id: str, future: "Future[T]", ask: Callable[[], SyncAsyncFuture[RequestStatus]]) -> None:
        super().__init__(future)
        self.request_id = request_id
        self.status = ask


class RequestFuture(Generic[T]):
    """A request that was sent. `await` it for the `Accepted`, and that for the result; `result` waits for both."""

    def __init__(
        self, accepted: "Future[Accepted[T]]", finished: "Future[T]", cancel: Callable[[], SyncAsyncFuture[bool]]
    ) -> None:
        self._accepted = accepted
        self.finished = SyncAsyncFuture(finished)
        self.cancel = cancel

    def accepted(self, timeout_s: float | None = None) -> Accepted[T]:
        return self._accepted.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> T:
        return self.finished.result(timeout_s)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        return self.finished.exception(timeout_s)

    def done(self) -> bool:
        return self.finished.done()

    def __await__(self) -> Generator[Any, None, Accepted[T]]:
        return asyncio.wrap_future(self._accepted).__await__()


class FutureGroup(Generic[T]):
    """Several requests as one. A group neither starts nor stops its members, except by `cancel`."""

    def __init__(self, members: Sequence[RequestFuture[T]]) -> None:
        self.members = tuple(members)

    def all(self) -> SyncAsyncFuture[tuple[T, ...]]:
        """Wait for every result, in the order of the members; the first failure fails it, and the others run on."""

        def look(out: "Future[tuple[T, ...]]", last: "Future[T]", ended: int) -> None:
            if last.exception() is not None:
                out.set_exception(_raised(last))
            elif ended == len(self.members):
                out.set_result(tuple(member.result() for member in self.members))

        return self._join(look, empty=())

    def any(self) -> SyncAsyncFuture[T]:
        """Wait for the first result; fails when all have failed."""

        def look(out: "Future[T]", last: "Future[T]", ended: int) -> None:
            if last.exception() is None:
                out.set_result(last.result())
            elif ended == len(self.members):
                why = _raised(self.members[0].finished.future)
                out.set_exception(type(why)(f"all {ended} requests failed, the first because: {why}"))

        assert self.members, "the first of no requests never comes"
        return self._join(look)

    def settled(self) -> SyncAsyncFuture[tuple[T | HeadraceError, ...]]:
        """Wait until all have ended, and return each member's result or error; never fails."""

        def outcome(member: RequestFuture[T]) -> T | HeadraceError:
            return member.result() if member.exception() is None else _raised(member.finished.future)

        def look(out: "Future[tuple[T | HeadraceError, ...]]", last: "Future[T]", ended: int) -> None:
            if ended == len(self.members):
                out.set_result(tuple(outcome(member) for member in self.members))

        return self._join(look, empty=())

    def as_completed(self, timeout_s: float | None = None) -> "AsCompleted[T]":
        """Iterate over the members and their places in the order in which they end, by `for` or `async for`."""
        return AsCompleted(self.members, timeout_s)

    def cancel(self) -> SyncAsyncFuture[int]:
        """Cancel all members that have not ended; returns how many were."""
        cancelling = [member.cancel() for member in self.members if not member.done()]
        out = promise()
        lock, ended = threading.Lock(), 0

        def one_more(future: "Future[bool]") -> None:
            nonlocal ended
            with lock:
                ended += 1
                last = ended == len(cancelling)
            if last:
                out.set_result(sum(reply.exception() is None and reply.result() for reply in cancelling))

        for reply in cancelling:
            reply.future.add_done_callback(one_more)
        if not cancelling:
            out.set_result(0)
        return SyncAsyncFuture(out)

    def _join(self, look: "Callable[[Future[Any], Future[T], int], None]", empty: Any = None) -> SyncAsyncFuture[Any]:
        """Call `look` with each member that ends, one at a time, until it has set the outcome."""
        out, lock, ended = promise(), threading.RLock(), 0

        def one_more(future: "Future[T]") -> None:
            nonlocal ended
            with lock:
                ended += 1
                if not out.done():
                    look(out, future, ended)

        if not self.members:
            out.set_result(empty)
        for member in self.members:
            member.finished.future.add_done_callback(one_more)
        return SyncAsyncFuture(out)


class AsCompleted(Generic[T]):
    """Iterates over pairs of a member's place and the member; raises TimeoutError if none ends in `timeout_s`."""

    def __init__(self, members: Sequence[RequestFuture[T]], timeout_s: float | None) -> None:
        self._members, self._timeout_s = members, timeout_s

    def __iter__(self) -> Iterator[tuple[int, RequestFuture[T]]]:
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listen(ended.put)
        for _ in self._members:
            try:
                place = ended.get(timeout=self._timeout_s)
            except queue.Empty as exc:
                raise TimeoutError(f"nothing ended in {self._timeout_s} s") from exc
            yield place, self._members[place]

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestFuture[T]]]:
        ended: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._listen(lambda place: loop.call_soon_threadsafe(ended.put_nowait, place))
        for _ in self._members:
            async with asyncio.timeout(self._timeout_s):
                place = await ended.get()
            yield place, self._members[place]

    def _listen(self, tell: Callable[[int], object]) -> None:
        for place, member in enumerate(self._members):
            member.finished.future.add_done_callback(lambda _, place=place: tell(place))  # type: ignore[misc]


def _raised(future: "Future[Any]") -> HeadraceError:
    """Return the error of a failed request, which is always one of ours."""
    error = future.exception()
    assert isinstance(error, HeadraceError)
    return error
