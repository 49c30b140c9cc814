"""Sending again: which failures are passing, the pauses, and the end, with a clock by hand."""

import doctest
from collections.abc import Callable

import pytest

from headrace import retry as module
from headrace.retry import (
    Backoff,
    GaveUp,
    TryAgain,
    check_transient,
    doubling,
    reply_words,
    retry,
    retry_after_s,
    retry_async,
)


class Clock:
    """A time that only passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


def failing(*failures: TryAgain) -> Callable[[], str]:
    """An attempt that fails in these ways, one after another, and then succeeds."""
    left = list(failures)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_pauses_double_and_are_as_long_as_the_server_asks() -> None:
    clock = Clock()
    attempt = failing(TryAgain("busy"), TryAgain("busy", 7.0), TryAgain("busy"), TryAgain("busy", 0.1))
    assert retry(attempt, Backoff(doubling(0.5, 3.0), clock=clock), clock.sleep) == "done"
    assert clock.pauses_s == [0.5, 7.0, 2.0, 3.0]


async def test_a_coroutine_is_retried_alike() -> None:
    clock = Clock()
    attempt = failing(TryAgain("busy"), TryAgain("busy", 7.0))

    async def attempt_async() -> str:
        return attempt()

    backoff = Backoff(doubling(0.5, 3.0), clock=clock)
    assert await retry_async(attempt_async, backoff, clock.sleep_async) == "done"
    assert clock.pauses_s == [0.5, 7.0]
    with pytest.raises(GaveUp, match="late"):
        await retry_async(lambda: _raise(TryAgain("late")), Backoff(doubling(0.5, 3.0), 0.4, clock), clock.sleep_async)


async def _raise(failure: TryAgain) -> str:
    raise failure


def test_no_attempt_begins_after_the_total_time() -> None:
    # attempts at 0, 1 and 3 s; the next would begin at 7 s
    clock = Clock()
    attempt = failing(*(TryAgain(f"failure {i}") for i in range(9)))
    with pytest.raises(GaveUp, match=r"^failure 2$") as caught:
        retry(attempt, Backoff(doubling(1.0, 60.0), 6.9, clock), clock.sleep)
    assert clock.pauses_s == [1.0, 2.0]
    assert isinstance(caught.value.__cause__, TryAgain)


def test_a_server_that_asks_for_more_time_than_is_left_ends_it_at_once() -> None:
    clock = Clock()
    with pytest.raises(GaveUp, match="busy"):
        retry(failing(TryAgain("busy", 60.0)), Backoff(doubling(0.1, 1.0), 59.0, clock), clock.sleep)
    assert clock.pauses_s == []


def test_attempts_end_with_the_pauses() -> None:
    clock = Clock()
    with pytest.raises(GaveUp, match="third"):
        retry(failing(*map(TryAgain, ("first", "second", "third"))), Backoff((0.0, 2.0), clock=clock), clock.sleep)
    assert clock.pauses_s == [0.0, 2.0]
    with pytest.raises(GaveUp, match="first"):
        retry(failing(TryAgain("first", 5.0)), Backoff((), clock=clock), clock.sleep)


def test_other_errors_are_not_retried() -> None:
    def attempt() -> str:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        retry(attempt, Backoff(doubling(1.0, 2.0)), lambda seconds: pytest.fail("it slept"))


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_passing_failures(status: int) -> None:
    with pytest.raises(TryAgain, match=f"status {status}: soon") as caught:
        check_transient(status, {"retry-after": "2"}, b'{"detail": "soon"}')
    assert caught.value.after_s == 2.0
    check_transient(status, {"x-should-retry": "false"}, b"")


@pytest.mark.parametrize("status", [400, 401, 404, 410, 413, 422, 501, 505])
def test_lasting_failures(status: int) -> None:
    check_transient(status, {"retry-after": "2"}, b"")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1.5", 1.5),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 60.0),
        ("86400", 60.0),
        ("soon", 0.0),
        ("Sun, 06 Nov 1994 08:49:47 GMT", 10.0),
        ("Sun, 06 Nov 1994 08:49:27 GMT", 0.0),  # is over
        ("Sun, 06 Nov 1994 09:49:37 GMT", 60.0),
        ("Sun, 06 Nov", 0.0),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(value: str, seconds: float) -> None:
    now_s = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the date of RFC 9110
    assert retry_after_s({"retry-after": value}, now_s=lambda: now_s) == seconds


@pytest.mark.parametrize("content", [b"null", b"[1]", b'"words"', b'{"detail": [1]}', b'{"error": "no"}', b"\xff"])
def test_a_reply_without_words_is_described_by_its_beginning(content: bytes) -> None:
    assert reply_words(500, content) == "status 500: " + content.decode(errors="replace")


def test_the_examples_run() -> None:
    results = doctest.testmod(module)
    assert (results.attempted, results.failed) == (4, 0)
