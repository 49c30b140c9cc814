"""A client that reads its answer slowly gets all of it; one that stops reading is cut."""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from uvicorn.server import ServerState

from headrace.service.http.connections import ANSWER_S, BoundedConnection, ConnectionLimits
from headrace.service.http.server import serving
from headrace.service.settings import Limits

LARGE = 40_000_000  # more than the sockets of both sides hold


class Timers:
    """An event loop that has timers only, and no clock but `pass_time`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        timer = (self.now + delay_s, call)
        self.pending.append(timer)
        return Timer(lambda: self.pending.remove(timer) if timer in self.pending else None)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.pending if timer[0] <= self.now]:
            self.pending.remove(timer)
            timer[1]()


class Timer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


class Line:
    """A transport whose client has still to read `unread` bytes."""

    unread, aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


def slow_answer() -> tuple[BoundedConnection, Timers, Line]:
    """A connection to which a large answer has just been written."""
    config = uvicorn.Config(app=FastAPI(), log_config=None)
    config.load()
    timers, line = Timers(), Line()
    limits = ConnectionLimits(max_open=9, header_s=1.0, body_s=1.0)
    connection = BoundedConnection(config, ServerState(), {}, timers, limits=limits)
    connection.transport, connection.flow = line, Flow()  # type: ignore[assignment]
    line.unread = LARGE
    connection.pause_writing()
    return connection, timers, line


class Flow:
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


def test_an_answer_may_take_as_long_as_its_client_goes_on_reading() -> None:
    connection, timers, line = slow_answer()
    for _ in range(20):
        line.unread -= 1_000_000
        timers.pass_time(ANSWER_S)
        assert not line.aborted
    line.unread = 10_000
    connection.resume_writing()  # little is left, and nothing more is reported of it
    line.unread = 0
    timers.pass_time(ANSWER_S)
    assert (line.aborted, timers.pending) == (False, [])


@pytest.mark.parametrize("left", [LARGE // 2, 10_000])
def test_a_client_that_stops_reading_is_cut(left: int) -> None:
    connection, timers, line = slow_answer()
    line.unread = left
    if left < 2**14:
        connection.resume_writing()
    timers.pass_time(ANSWER_S)
    timers.pass_time(ANSWER_S)
    assert line.aborted


def test_a_download_is_not_cut_for_a_new_connection() -> None:
    app = FastAPI()

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(LARGE))

    with serving(app, limits=Limits(connections=1)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=30) as reading:
            reading.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            received = len(reading.recv(1000))
            time.sleep(0.1)  # by now the server has written all that it can
            with socket.create_connection(address, timeout=30) as other:
                assert other.recv(100).startswith(b"HTTP/1.1 503 ")
            while received < LARGE:
                piece = reading.recv(2**20)
                assert piece, "the server closed the connection"
                received += len(piece)
