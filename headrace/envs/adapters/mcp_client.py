"""Connect to tool servers of the Model Context Protocol (MCP): a process on its standard streams, or a URL.

The `mcp` package speaks the protocol, on one event loop thread for all connections. This file owns what the package
leaves open: a deadline for every wait, the server's exit status and the end of its stderr for the error message,
and ending the server with all its children. A client may be used from several threads at once. Knows no episodes.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic

from headrace.envs.adapters.loop_thread import LoopThread
from headrace.envs.adapters.optional_package import require
from headrace.errors import ConfigError, EpisodeError, boundary

PIP = "'mcp>=1.24,<2'"
START_TIMEOUT_S = 60.0  # until the tools are known
END_GRACE_S = 2.0  # between closing stdin, which asks a server to end, and killing it
STDERR_BYTES = 1000  # kept of the end of the server's stderr
MAX_LINE_BYTES = 16 * 2**20  # of one message on stdout
MAX_TOOL_PAGES = 100
HTTP_CONNECT_TIMEOUT_S = 30.0
NOT_FOUND = 32600  # the package's error code when an HTTP server answers 404
GONE = "knows no such path or session"
LOOP = LoopThread("mcp")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as its server describes it."""

    name: str
    description: str
    schema: Mapping[str, Any]  # the JSON schema of its arguments


class ConnectionEnded(Exception):
    """The server can answer nothing more; the text continues a sentence that begins with the server's name."""


class McpClient:
    """Holds one connection to a server; made by `start_server` and `connect_server`."""

    def __init__(self, server: str, streams: AbstractAsyncContextManager[tuple[Any, Any]], stderr: bytearray) -> None:
        self._server, self._streams = server, streams
        self._stderr = stderr  # filled by `streams`
        self._session: Any = None
        self._connection: asyncio.Task[None] | None = None
        self.tools: tuple[Tool, ...] = ()

    @property
    def alive(self) -> bool:
        return self._connection is not None and not self._connection.done()

    def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call a tool and give its answer as text; a refusal is an answer too.

        Raises EpisodeError when no answer came: the server ended, or took too long.
        """
        return LOOP.run(self._call(name, arguments, timeout_s))

    def close(self) -> None:
        """Ask the server to end, then kill what is left of it and its children; calls in flight fail."""
        LOOP.run(self._close())

    # --- on the loop's thread ----------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> "McpClient":
        """Connect and list the tools; raise EpisodeError, with nothing left behind, if that fails."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._hold_connection(ready))
        try:
            await self._wait(ready, "it was starting up", timeout_s)
        except EpisodeError:
            await self._close()
            raise
        return self

    async def _hold_connection(self, ready: "asyncio.Future[None]") -> None:
        """Keep the connection until this task is cancelled or the connection ends, which raises the cause.

        Enters and leaves the package's contexts in one task, as their cancel scopes require.
        """
        mcp = require("mcp", PIP)
        client = mcp.types.Implementation(name="headrace", version="0")
        async with self._streams as (incoming, outgoing):
            async with mcp.ClientSession(incoming, outgoing, client_info=client) as session:
                await session.initialize()
                self.tools = await _list_tools(session)
                self._session = session
                ready.set_result(None)
                await asyncio.Event().wait()  # until cancelled

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        mcp = require("mcp", PIP)
        request = asyncio.ensure_future(self._session.call_tool(name, dict(arguments)))
        with boundary(EpisodeError, self._sentence(f"broke the protocol when the tool {name} was called")):
            try:
                return _text_of(await self._wait(request, f"the tool {name} was called", timeout_s))
            except mcp.McpError as exc:
                if exc.error.code == NOT_FOUND:
                    raise EpisodeError(self._sentence(f"{GONE} when the tool {name} was called")) from exc
                return str(exc.error.message)

    async def _wait(self, request: "asyncio.Future[T]", what: str, timeout_s: float) -> T:
        """Wait for `request`; raise EpisodeError when the time is up or the connection ends first."""
        assert self._connection is not None, "open comes first"
        either: set[asyncio.Future[Any]] = {request, self._connection}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        anyio = require("anyio", PIP)
        if request.done() and isinstance(request.exception(), anyio.ClosedResourceError | anyio.BrokenResourceError):
            await asyncio.wait({self._connection}, timeout=3 * END_GRACE_S)  # it is ending; the cause comes last
        elif request.done():
            return request.result()
        request.cancel()
        if not self._connection.done():
            raise EpisodeError(self._sentence(f"gave no answer within {timeout_s:g} s when {what}"))
        cause = None if self._connection.cancelled() else self._connection.exception()
        while isinstance(cause, BaseExceptionGroup):  # of task groups
            cause = cause.exceptions[0]
        if isinstance(cause, EpisodeError):
            raise cause
        raise EpisodeError(self._sentence(f"{_how_it_ended(cause)} when {what}")) from cause

    async def _close(self) -> None:
        if self._connection is None:
            return
        for _ in range(2):  # the second time cuts short a shutdown that takes too long
            self._connection.cancel()
            await asyncio.wait({self._connection}, timeout=3 * END_GRACE_S)
        if self._connection.done() and not self._connection.cancelled():
            self._connection.exception()  # retrieved, so that asyncio does not log it

    def _sentence(self, what: str) -> str:
        stderr_tail = " ".join(bytes(self._stderr).decode(errors="replace").split())
        return f"the MCP server `{self._server}` {what}" + (f"; it said: {stderr_tail}" if stderr_tail else "")


def start_server(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
) -> McpClient:
    """Start `command` and connect to its standard streams. `env` is added to this process's environment.

    Raises EpisodeError if it cannot be started, ends, or takes too long; ConfigError if `mcp` is not installed, and on
    Windows, where its children could not be ended with it.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "an MCP server is started only on Linux and macOS, where its children end with it: start it yourself and "
            "give its url, or use WSL (docs/windows.md)"
        )
    require("mcp", PIP)
    stderr = bytearray()
    client = McpClient(shlex.join(command), _process_streams(command, env or {}, stderr), stderr)
    return LOOP.run(client.open(timeout_s))


def connect_server(url: str, *, timeout_s: float = START_TIMEOUT_S) -> McpClient:
    """Connect to the server at `url` by streamable HTTP, in a session of its own; raises like `start_server`."""
    require("mcp", PIP)
    return LOOP.run(McpClient(url, _http_streams(url), bytearray()).open(timeout_s))


async def _list_tools(session: Any) -> tuple[Tool, ...]:
    tools: list[Any] = []
    params = None
    for _ in range(MAX_TOOL_PAGES):
        page = await session.list_tools(params=params)
        tools += page.tools
        if not page.nextCursor:
            break
        params = require("mcp.types", PIP).PaginatedRequestParams(cursor=page.nextCursor)
    return tuple(Tool(name=tool.name, description=tool.description or "", schema=tool.inputSchema) for tool in tools)


def _text_of(result: Any) -> str:
    """Join the texts of a tool's answer; name other content by its type, write structured content alone as JSON."""
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not texts and result.structuredContent is not None:
        return json.dumps(result.structuredContent, ensure_ascii=False)
    return "\n".join(texts)


def _how_it_ended(cause: BaseException | None) -> str:
    if cause is None:
        return "was closed"
    if isinstance(cause, ConnectionEnded):
        return str(cause)
    if isinstance(cause, require("mcp", PIP).McpError):
        return GONE if cause.error.code == NOT_FOUND else f"refused: {cause}"
    return f"failed with {type(cause).__name__}: {' '.join(str(cause).split())}"


# --- the two transports ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _http_streams(url: str) -> AsyncIterator[tuple[Any, Any]]:
    transport = require("mcp.client.streamable_http", PIP)
    import httpx  # a tenth of a second, and most runs have no server

    timeout = httpx.Timeout(HTTP_CONNECT_TIMEOUT_S, read=None)  # a reply's deadline is that of the call
    async with httpx.AsyncClient(timeout=timeout) as http:
        async with transport.streamable_http_client(url, http_client=http) as (incoming, outgoing, _):
            yield incoming, outgoing


@asynccontextmanager
async def _process_streams(
    command: Sequence[str], env: Mapping[str, str], stderr: bytearray
) -> AsyncIterator[tuple[Any, Any]]:
    """Start the process and yield the streams of its messages; at the end nothing of its process group is left.

    The package's own `stdio_client` tells neither the exit status nor the process id, and leaves children alive.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **env},
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # a group of its own, to be ended as a whole
        )
    except OSError as exc:
        raise EpisodeError(f"the MCP server `{shlex.join(command)}` cannot be started: {exc}") from exc
    listening = asyncio.create_task(_keep_stderr(process, stderr))
    open_stream = require("anyio", PIP).create_memory_object_stream  # what the package's sessions are made of
    received, incoming = open_stream(0)
    outgoing, to_send = open_stream(0)
    try:
        async with received, to_send, asyncio.TaskGroup() as group:
            group.create_task(_read_messages(process, received, listening))
            group.create_task(_write_messages(process, to_send))
            yield incoming, outgoing
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await _end_process(process)
        listening.cancel()


async def _read_messages(process: Process, received: Any, listening: "asyncio.Task[None]") -> None:
    """Pass on the messages on stdout until it ends; other lines are skipped: many a server prints there by mistake."""
    assert process.stdout is not None
    message_type = require("mcp.types", PIP).JSONRPCMessage
    envelope = require("mcp.shared.message", PIP).SessionMessage
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError as exc:
            raise ConnectionEnded(f"wrote a message of more than {MAX_LINE_BYTES} bytes") from exc
        if not line:
            break
        try:
            message = message_type.model_validate_json(line)
        except pydantic.ValidationError:
            continue
        await received.send(envelope(message))
    status = await _end_process(process)
    await asyncio.wait({listening}, timeout=END_GRACE_S)  # for the end of its stderr
    if status is None:
        raise ConnectionEnded("closed its stdout")
    raise ConnectionEnded(f"was ended by signal {-status}" if status < 0 else f"ended with status {status}")


async def _write_messages(process: Process, to_send: Any) -> None:
    assert process.stdin is not None
    async for envelope in to_send:
        message = envelope.message.model_dump_json(by_alias=True, exclude_none=True)
        process.stdin.write(message.encode() + b"\n")
        try:
            await process.stdin.drain()
        except ConnectionError as exc:
            await asyncio.sleep(END_GRACE_S)  # if it has ended, the reader of stdout finds out how and cancels this
            raise ConnectionEnded("does not read its stdin any more") from exc


async def _keep_stderr(process: Process, stderr: bytearray) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(4096):
        stderr += chunk
        del stderr[:-STDERR_BYTES]


async def _end_process(process: Process) -> int | None:
    """Wait until the process ends, then kill what there is of its group; give the status if it ended by itself."""
    try:
        status = await _exit_status(process)
    finally:  # also when cancelled
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children may be left even if the process has ended
    await _exit_status(process)
    return status


async def _exit_status(process: Process) -> int | None:
    """Give the exit status, or None after END_GRACE_S. `Process.wait` would wait for children that hold the pipes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_GRACE_S):
            while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for it
                await asyncio.sleep(0.005)
    return process.returncode
