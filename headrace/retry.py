"""Retry requests: which failures are transient, how long to pause before each attempt, and when to give up.

Knows no HTTP library: an attempt is a function that raises `TryAgain`. Callers may replace the sleep and the clock.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")
MAX_RETRY_AFTER_S = 60.0
TRANSIENT_4XX = frozenset({408, 409, 425, 429})  # timeout, conflict, too early, too many requests
PERMANENT_5XX = frozenset({501, 505})  # not implemented, HTTP version


class TryAgain(Exception):
    """An attempt failed, and a later one may succeed; `after_s` is how long the server asks to wait."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class GaveUp(Exception):
    """No attempt succeeded; the text is the reason of the last failure."""


class Backoff:
    """Chooses the pause after each failure: the next of `pauses_s`, or longer if the server asks for it.

    Raises GaveUp when the pauses are used up, or the next attempt would begin more than `total_s` after construction.
    """

    def __init__(
        self, pauses_s: Iterable[float], total_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pauses_s, self._clock, self._end_s = iter(pauses_s), clock, clock() + total_s

    def pause_s(self, failure: TryAgain) -> float:
        pause_s = max(next(self._pauses_s, math.inf), failure.after_s)
        if pause_s == math.inf or self._clock() + pause_s > self._end_s:
            raise GaveUp(str(failure)) from failure
        return pause_s


def retry(attempt: Callable[[], T], backoff: Backoff, sleep: Callable[[float], object] = time.sleep) -> T:
    """Call `attempt` until it raises no TryAgain; raises GaveUp when `backoff` does."""
    while True:
        try:
            return attempt()
        except TryAgain as failure:
            pause_s = backoff.pause_s(failure)
        sleep(pause_s)


async def retry_async(
    attempt: Callable[[], Awaitable[T]], backoff: Backoff, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> T:
    """Call the coroutine function `attempt` until it raises no TryAgain; raises GaveUp when `backoff` does."""
    while True:
        try:
            return await attempt()
        except TryAgain as failure:
            pause_s = backoff.pause_s(failure)
        await sleep(pause_s)


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses without end, each twice the one before, up to `longest_s`.

    >>> from itertools import islice
    >>> list(islice(doubling(0.5, 3.0), 5))
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def check_transient(status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Raise TryAgain for an error reply if the same request may succeed later.

    The header `x-should-retry: false`, which OpenAI's servers and ours send, says that it cannot.
    """
    transient = status in TRANSIENT_4XX or (status >= 500 and status not in PERMANENT_5XX)
    if transient and headers.get("x-should-retry") != "false":
        words = reply_words(status, content)
        prefix = "" if words.startswith(f"status {status}") else f"status {status}: "
        raise TryAgain(f"{prefix}{words}", retry_after_s(headers))


def retry_after_s(headers: Mapping[str, str], now_s: Callable[[], float] = time.time) -> float:
    """Read how long the server asks to wait: `retry-after-ms`, or `retry-after` in seconds or as a date.

    >>> retry_after_s({"retry-after-ms": "20", "retry-after": "1"}), retry_after_s({"retry-after": "3"})
    (0.02, 3.0)
    """
    wait_s = 0.0
    with suppress(ValueError):
        wait_s = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - now_s()
    for name, unit_s in (("retry-after", 1.0), ("retry-after-ms", 1e-3)):
        with suppress(ValueError):
            wait_s = float(headers.get(name, "")) * unit_s
    return min(max(0.0, wait_s), MAX_RETRY_AFTER_S)


def reply_words(status: int, content: bytes) -> str:
    """Extract the message of an error reply: `detail` of our servers, `error.message` of OpenAI's, or its beginning.

    >>> [reply_words(500, body) for body in (b'{"detail": "no"}', b'{"error": {"message": "slow down"}}', b"oh", b"")]
    ['no', 'slow down', 'status 500: oh', 'status 500']
    """
    with suppress(ValueError, TypeError, KeyError):
        body = json.loads(content)
        message = body["detail"] if "detail" in body else body["error"]["message"]
        if isinstance(message, str):
            return message[:1000]
    beginning = content[:200].decode(errors="replace")
    return f"status {status}: {beginning}" if beginning else f"status {status}"
