"""Length-prefixed JSON over a socket, for the inside of the walls. Standard library only."""

import json
import os
import struct
from typing import Any

LENGTH = struct.Struct("!I")


def pack(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return LENGTH.pack(len(body)) + body


def send(descriptor: int, value: Any) -> None:
    data = memoryview(pack(value))
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """The next value, or None when the other side is gone."""
    head = _exactly(descriptor, LENGTH.size)
    return None if head is None else json.loads(_exactly(descriptor, LENGTH.unpack(head)[0]) or b"null")


def _exactly(descriptor: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
