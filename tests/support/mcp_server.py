"""A real MCP server (foreign/server.py) over HTTP."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from support.paths import FOREIGN

START_S = 100


@contextlib.contextmanager
def mcp_server() -> Iterator[str]:
    """Start the server on a free port and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(FOREIGN / "server.py"), str(port)])
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        os.sched_yield()
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()
