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
    send_bytes(descriptor, pack(value))


def receive(descriptor: int, max_bytes: int | None = None) -> Any:
    """Read the next value. Returns None if the other side is gone; raises ValueError if the value has more bytes."""
    head = read_exactly(descriptor, LENGTH.size)
    if head is None:
        return None
    (size,) = LENGTH.unpack(head)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a message of {size} bytes: at most {max_bytes} are allowed")
    return json.loads(read_exactly(descriptor, size) or b"null")


def send_bytes(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_exactly(descriptor: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
