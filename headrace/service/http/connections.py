"""Bound what a connection may take: time for headers, bodies and answers, and the number of connections.

uvicorn closes connections that are idle between two requests, and no others. Here every wait for a client has a
deadline: for the headers of a request, for each part of its body, for reading each part of the answer. A poll that the
server holds open has none, because the server ends it itself.
"""

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PART_BYTES = 2**14  # of a body, that have to come within `body_s` unless it ends
ANSWER_S = 60.0  # within which a client has to read something of an answer, however long all of it takes
LINGER_S = 5.0  # what comes behind a refused body is dropped for this long


@dataclass(slots=True)
class ConnectionLimits:
    """Deadlines and the number of connections of one server, and which of its connections are idle."""

    max_open: int
    header_s: float
    body_s: float
    idle: "OrderedDict[BoundedConnection, None]" = field(default_factory=OrderedDict)  # the one idle for longest first
    num_open: int = 0


class BoundedConnection(H11Protocol):
    """A connection with deadlines. A new one beyond the limit closes one that is idle, or is refused with 503."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None  # of headers or of a part of a body
        self._awaited = ""  # what the deadline is for
        self._answer_deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = 0  # of answers, when that deadline began
        self._part_bytes = 0
        self._refused = False

    # --- what happens ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.num_open += 1
        if self._limits.num_open > self._limits.max_open:
            idle = next((one for one in self._limits.idle if not one.transport.get_write_buffer_size()), None)
            if idle is None:
                self._refuse()
                return
            del self._limits.idle[idle]
            idle.transport.abort()
        self._update()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._part_bytes += len(data)
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reading()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.num_open -= 1
        self._limits.idle.pop(self, None)
        self._set_deadline("", 0.0)
        self._cancel_answer_deadline()
        super().connection_lost(exc)

    # --- deadlines ---

    def _update(self) -> None:
        """Set the deadline for what the client has to send next."""
        if self.transport.is_closing():
            return
        answered = self.cycle is None or self.cycle.response_complete
        theirs = self.conn.their_state
        if theirs is h11.IDLE and answered:
            self._limits.idle.setdefault(self)
            begun = bool(self.conn.trailing_data[0])
            if begun or self.timeout_keep_alive_task is None:  # else uvicorn's timer for idle connections runs
                self._set_deadline("headers", self._limits.header_s)
            else:
                self._set_deadline("", 0.0)
            return
        self._limits.idle.pop(self, None)
        if theirs is h11.SEND_BODY:
            if answered:
                self._set_deadline("end", LINGER_S)
            else:
                self._set_deadline("body", self._limits.body_s)
        else:
            self._set_deadline("", 0.0)

    def _set_deadline(self, awaited: str, seconds: float) -> None:
        """Start a deadline unless it runs already; "" ends it."""
        if awaited == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._part_bytes = awaited, 0
        self._deadline = self.loop.call_later(seconds, self._expire) if awaited else None

    def _expire(self) -> None:
        served = self.flow.read_paused  # the body waits for us, not for the client
        if self._awaited == "body" and (served or self._part_bytes >= PART_BYTES):
            self._part_bytes = 0
            self._deadline = self.loop.call_later(self._limits.body_s, self._expire)
            return
        self.transport.abort()

    def _await_reading(self) -> None:
        """Start the deadline for reading something of what is written and not sent yet, if there is anything."""
        self._cancel_answer_deadline()
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes:
            self._answer_deadline = self.loop.call_later(ANSWER_S, self._check_reading)

    def _check_reading(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._await_reading()
        else:
            self.transport.abort()

    def _cancel_answer_deadline(self) -> None:
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None

    def _refuse(self) -> None:
        self._refused = True
        sentence = f"this server has {self._limits.max_open} open connections: come again later"
        body = json.dumps({"detail": sentence}).encode()
        head = [
            "HTTP/1.1 503 Service Unavailable",
            "content-type: application/json",
            "retry-after: 1",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()
