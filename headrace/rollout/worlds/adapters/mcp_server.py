"""A tool server of the Model Context Protocol: a process that is spoken to in JSON-RPC lines on its standard streams.

Only what tools need: the handshake, `tools/list` and `tools/call`. Every wait has a deadline. What the server writes to
stderr is kept, the last of it, for the sentence that says why it failed; closing leaves no process of it behind. May be
used from several threads at once. Knows no episodes.
"""

import itertools
import json
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from headrace.errors import EpisodeError

PROTOCOL = "2025-06-18"  # what is offered; the server answers with what it speaks
START_TIMEOUT_S = 60.0  # until the tools are known
END_GRACE_S = 2.0  # between closing stdin, which asks a server to end, and killing it
STDERR_BYTES = 1000  # kept of what it said last
MAX_LINE_BYTES = 16 * 2**20  # of one message
MAX_TOOL_PAGES = 100
METHOD_NOT_FOUND = -32601


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as its server describes it; `schema` is the JSON schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """What a tool answered, as text. `failed`: the tool itself says that it could not do it."""

    text: str
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcError:
    """A request that the server refused."""

    message: str


class Deadline:
    """So many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


class McpServer:
    """One running server. `start_server` makes it."""

    def __init__(self, process: "subprocess.Popen[bytes]", command: Sequence[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._command = process, shlex.join(command)
        self._stdin, self._stderr_tail = process.stdin, bytearray()
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._gone: str | None = None  # why no reply can come any more
        self._lock = threading.Lock()  # of the two above
        self._writing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._read_stderr, args=(process.stderr,), daemon=True),
            threading.Thread(target=self._read_replies, args=(process.stdout,), daemon=True),
        ]
        self.tools: tuple[Tool, ...] = ()
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return self._gone is None

    def handshake(self, timeout_s: float) -> None:
        """Agree on the protocol and learn the tools; raises EpisodeError if that fails."""
        deadline = Deadline(timeout_s)
        client = {"name": "headrace", "version": "0"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        self._expect("initialize", hello, "starting up", deadline)
        self._notify("initialized", {}, deadline)
        found: list[Tool] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_TOOL_PAGES):
            page = self._expect("tools/list", cursor, "listing its tools", deadline)
            found += [_read_tool(item) for item in page.get("tools", ())]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        self.tools = tuple(found)

    def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> ToolReply:
        """Raises EpisodeError when no reply came: the server ended, or took too long. A refusal is a reply."""
        what = f"the tool {name} was called"
        got = self._request("tools/call", {"name": name, "arguments": dict(arguments)}, what, Deadline(timeout_s))
        if isinstance(got, RpcError):
            return ToolReply(text=got.message, failed=True)
        return ToolReply(text=_text_of(got), failed=bool(got.get("isError", False)))

    def close(self) -> None:
        """Asks the server to end, then kills what is left of it and its children. Requests that wait are failed."""
        with self._lock:
            self._gone = self._gone or "was closed"
        with suppress(OSError):
            self._stdin.close()
        _end_group(self._process)
        for thread in self._threads:
            thread.join(END_GRACE_S)
        self._fail_waiting()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _expect(self, method: str, params: Mapping[str, Any], what: str, deadline: Deadline) -> Any:
        got = self._request(method, params, f"it was {what}", deadline)
        if isinstance(got, RpcError):
            raise EpisodeError(self._told(f"refused {method}: {got.message}"))
        return got

    def _request(self, method: str, params: Mapping[str, Any], what: str, deadline: Deadline) -> Any:
        number, reply = next(self._ids), Future[Any]()
        with self._lock:
            self._waiting[number] = reply
        try:
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}, deadline)
            return reply.result(deadline.left_s)
        except TimeoutError as exc:
            with suppress(OSError):
                self._notify("cancelled", {"requestId": number}, Deadline(0.0))
            raise EpisodeError(self._told(f"gave no answer within {deadline.seconds:g} s when {what}")) from exc
        except ConnectionError as exc:
            raise EpisodeError(self._told(f"{exc} when {what}")) from exc
        finally:
            with self._lock:
                del self._waiting[number]

    def _notify(self, what: str, params: Mapping[str, Any], deadline: Deadline) -> None:
        self._send({"jsonrpc": "2.0", "method": f"notifications/{what}", "params": dict(params)}, deadline)

    def _send(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """Raises ConnectionError with the reason, or TimeoutError, when it cannot be sent."""
        line = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        if self._gone is not None:
            raise ConnectionError(self._gone)
        try:
            with self._writing:
                _write(self._stdin.fileno(), line, deadline)
        except TimeoutError:
            raise
        except (OSError, ValueError) as exc:  # a broken pipe, or one that `close` has closed
            if threading.current_thread() not in self._threads:
                self._threads[1].join(END_GRACE_S)  # the reader finds out how it ended
            raise ConnectionError(self._gone or "does not read its stdin any more") from exc

    def _told(self, what: str) -> str:
        if self._gone is not None:
            self._threads[0].join(END_GRACE_S)  # its last words
        said = " ".join(bytes(self._stderr_tail).decode(errors="replace").split())
        return f"the MCP server `{self._command}` {what}" + (f"; it said: {said}" if said else "")

    # --- the two threads ---------------------------------------------------------------------------------------------

    def _read_stderr(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read1(4096):  # type: ignore[attr-defined]  # a pipe is a BufferedReader
                self._stderr_tail += piece
                del self._stderr_tail[:-STDERR_BYTES]

    def _read_replies(self, stream: IO[bytes]) -> None:
        why = None
        with stream:
            while line := stream.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                    why = f"wrote a message of more than {MAX_LINE_BYTES} bytes"
                    break
                self._take(line)
        with self._lock:
            self._gone = self._gone or why or _how_it_ended(self._process)
        self._fail_waiting()

    def _take(self, line: bytes) -> None:
        """A line that is no message is ignored: many a server prints to stdout by mistake."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if "method" in message:
            if "id" in message:
                self._answer(message)
            return
        with self._lock:
            reply = self._waiting.get(message.get("id", 0))
        if reply is None or reply.done():
            return
        error = message.get("error")
        if error is not None:
            reply.set_result(RpcError(message=str(error.get("message", error) if isinstance(error, dict) else error)))
        else:
            result = message.get("result")
            reply.set_result(result if isinstance(result, dict) else {})

    def _answer(self, request: Mapping[str, Any]) -> None:
        """A server may ask as well; only `ping` is answered, for nothing else was offered."""
        refusal = {"error": {"code": METHOD_NOT_FOUND, "message": "not supported"}}
        answer: Mapping[str, Any] = {"result": {}} if request["method"] == "ping" else refusal
        with suppress(OSError):
            self._send({"jsonrpc": "2.0", "id": request["id"], **answer}, Deadline(END_GRACE_S))

    def _fail_waiting(self) -> None:
        with self._lock:
            assert self._gone is not None
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(ConnectionError(self._gone))


def start_server(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
) -> McpServer:
    """A server that has told its tools. `env` is added to this process's environment.

    Raises EpisodeError if it cannot be started, ends, or takes too long.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a group of its own, to be ended as a whole
        )
    except OSError as exc:
        raise EpisodeError(f"the MCP server `{shlex.join(command)}` cannot be started: {exc}") from exc
    server = McpServer(process, command)
    try:
        server.handshake(timeout_s)
    except EpisodeError:
        server.close()
        raise
    return server


def _read_tool(item: Mapping[str, Any]) -> Tool:
    schema = item.get("inputSchema") or {"type": "object", "properties": {}}
    return Tool(name=str(item["name"]), description=str(item.get("description") or ""), schema=schema)


def _text_of(result: Mapping[str, Any]) -> str:
    """The texts of a tool's answer; other content is named, structured content without a text is JSON."""
    parts = [part for part in result.get("content") or () if isinstance(part, dict)]
    texts = [str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts]
    if not texts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(texts)


def _write(fd: int, data: bytes, deadline: Deadline) -> None:
    """All of `data`; raises TimeoutError when the other end does not take it in time."""
    os.set_blocking(fd, False)
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    rest = memoryview(data)
    while rest:
        if not ready.poll(deadline.left_s * 1000):
            raise TimeoutError
        with suppress(BlockingIOError):
            rest = rest[os.write(fd, rest) :]


def _how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    """In words, once its stdout has ended."""
    status = _status(process, END_GRACE_S)
    if status is None:
        return "closed its stdout"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Waits for the server to end by itself, then kills what there is of its process group."""
    if process.returncode is not None:
        return
    _status(process, END_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # children may be left even if it has ended itself
    process.wait()


def _status(process: "subprocess.Popen[bytes]", timeout_s: float) -> int | None:
    """The exit status as `Popen` has it, or None. The process is not reaped: until then nobody else gets its number,
    which is that of its group too."""
    deadline = Deadline(timeout_s)
    while process.returncode is None:
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it was reaped just now
            break
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if not deadline.left_s:
            return None
        time.sleep(0.005)
    return process.returncode
