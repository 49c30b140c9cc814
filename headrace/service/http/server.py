"""Serve an application on a socket; beyond this machine only with keys, or whoever reaches the port could train."""

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from headrace.errors import ConfigError

BACKLOG = 4096
CLOSE_S = 5  # how long open requests may take to end


def check_reach(host: str, *, has_keys: bool) -> None:
    """Raise ConfigError for an address beyond loopback without keys."""
    if has_keys or host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ConfigError(
        f"listening on {host} without keys would let everybody in: add a [[keys]] entry, or listen on 127.0.0.1"
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; raises ConfigError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where the protocol is named; otherwise every answer waits 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise ConfigError(f"the service cannot listen on {host}:{port} ({exc}): choose another port") from exc
    return listening


def make_server(app: FastAPI) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http="h11",  # the other one, taken where it happens to be installed, has no limit for headers
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=CLOSE_S,
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def serving(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve the application on a thread of its own and yield its URL: for tests and notebooks."""
    listening = listen(host, port)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="headrace-serve", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
