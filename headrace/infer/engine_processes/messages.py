"""Frame messages between a run and its engine processes: eight bytes of length, then a pickle.

Both ends are processes of one run, joined by a socket that no other process can open.
"""

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError

LENGTH = struct.Struct("!Q")
MOST_BYTES = 2**32  # of one message


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """Ask the host to run a verb."""

    id: int
    verb: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelCall:
    """Tell the host that nobody waits for a call any more."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """Answer a call with its result or its error."""

    id: int
    value: Any = None
    error: HeadraceError | None = None


def frame(message: object) -> bytes:
    """Pickle a message and put its length before it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Any:
    """Read the next message; None when the other end is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        assert length <= MOST_BYTES
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_now(connection: socket.socket) -> Any:
    """Read the next message from a blocking socket; None when the other end is gone. Raises TimeoutError."""
    header = _read(connection, LENGTH.size)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    assert length <= MOST_BYTES
    body = _read(connection, length)
    return None if body is None else pickle.loads(body)


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
