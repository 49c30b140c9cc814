"""Serve the endpoint on a socket of this machine, in the caller's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from headrace.errors import SamplerError
from headrace.infer.openai_api.app import OpenAIEndpoint
from headrace.render import Renderer

CLOSE_S = 5  # how long calls that are still open may take to end
BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server that leaves SIGINT and SIGTERM to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve(renderer: Renderer, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[OpenAIEndpoint]:
    """Open an endpoint that answers on `host`; port 0 takes a free one. Raises SamplerError if the port is taken."""
    listening = _listen(host, port)
    endpoint = OpenAIEndpoint(renderer, root_url=f"http://{host}:{listening.getsockname()[1]}")
    server = _Server(
        uvicorn.Config(
            endpoint.app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="agent-endpoint")
    try:
        yield endpoint
    finally:
        server.should_exit = True
        await serving
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only on a socket that says it is TCP
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)  # from here on connections wait for the server instead of failing
    except OSError as exc:
        listening.close()
        raise SamplerError(f"the agent endpoint cannot listen on {host}:{port} ({exc}): choose another port") from exc
    listening.setblocking(False)
    return listening
