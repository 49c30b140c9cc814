"""Serve an application on a socket; beyond this machine only with keys, or whoever reaches the port could train."""

import contextlib
import functools
import ipaddress
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from headrace.errors import ConfigError
from headrace.service.http.connections import BoundedConnection, ConnectionLimits
from headrace.service.settings import Limits

BACKLOG = 4096
OTHER_FILES = 256  # file descriptors for everything but connections
CLOSE_S = 5  # how long open requests may take to end
STOP_S = 120.0  # how long `serving` waits for the end of all


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


def make_server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    connections = ConnectionLimits(
        max_open=_max_connections(limits.connections), header_s=limits.header_s, body_s=limits.body_s
    )
    config = uvicorn.Config(
        app,
        http=cast(Any, functools.partial(BoundedConnection, limits=connections)),
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=CLOSE_S,
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)


def _max_connections(wanted: int) -> int:
    """Return how many connections the process can have open, at most `wanted`."""
    try:
        import resource
    except ImportError:
        return wanted
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - OTHER_FILES))


@contextlib.contextmanager
def serving(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None) -> Iterator[str]:
    """Serve the application on a thread of its own and yield its URL: for tests and notebooks."""
    listening = listen(host, port)
    server = make_server(app, limits or Limits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="headrace-serve", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STOP_S)
        listening.close()
