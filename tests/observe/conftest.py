"""Fixtures of what looks at run folders: a made-up run, and a web server that hears what a page asks for."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.made_up_run import make_run


@pytest.fixture
def synthetic_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda note="": make_run(tmp_path / "runs", note)


@pytest.fixture
def outside() -> Iterator[tuple[str, list[str]]]:
    """A web server, and the paths that were asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()
    thread.join()
