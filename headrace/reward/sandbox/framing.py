"""Send and receive length-prefixed JSON over a socket. Standard library only, because it runs in the sandbox too."""

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
    """Read the next value. Returns None if the other side is gone."""
    head = _read_exactly(descriptor, LENGTH.size)
    return None if head is None else json.loads(_read_exactly(descriptor, LENGTH.unpack(head)[0]) or b"null")


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
