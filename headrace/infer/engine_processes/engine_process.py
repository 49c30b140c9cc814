"""An engine process of this run: start it, call its verbs, end it.

A process that is killed, or whose run is killed, needs no clean-up: either end sees the socket close.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import SamplerError
from headrace.infer.engine_processes.engine_host import BuildEngine
from headrace.infer.engine_processes.messages import CancelCall, HostCall, HostReply, frame, receive, receive_now
from headrace.infer.servers.api import ServerLostError

logger = logging.getLogger(__name__)

POLL_S, TOLD_EVERY_S, STOP_S = 0.5, 20.0, 5.0
LAST_LINES = 6


class EngineProcess:
    """One process with an `EngineHost`. `start` and `wait_ready` block; `call` belongs to one event loop.

    `make_build` is asked at every start: weights that an engine can begin with come and go.
    """

    access = None  # nobody else has the other end of its socket

    def __init__(
        self,
        make_build: Callable[[], BuildEngine],
        *,
        name: str,
        log: Path,
        folder: Path,  # of the run's weights, which the process removes if this one is killed
        threads: int = 1,  # of arithmetic
        environment: Mapping[str, str] | None = None,  # further variables
        start_s: float = 600.0,
    ) -> None:
        self.name, self._log = name, log
        self._make_build, self._folder, self._threads = make_build, folder, threads
        self._environment, self._start_s = dict(environment or {}), start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._attaching = asyncio.Lock()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()

    @property
    def pid(self) -> int | None:
        """Return the process id, while there is one."""
        return None if self._process is None else self._process.pid

    # --- starting and ending, on any thread ---

    def start(self) -> None:
        """Start the process and tell it what to build; return before it is ready."""
        assert self._process is None
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "headrace.infer.engine_processes.host_process"]
        try:
            with self._log.open("ab") as output, theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(self._threads), str(self._folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"PYTHONPATH": paths} | self._environment,
                    start_new_session=True,  # Ctrl-C is for us; we then end it in order
                )
        except OSError as exc:
            ours.close()
            raise SamplerError(f"{self.name} cannot be started: {exc}") from exc
        self._socket = ours
        with contextlib.suppress(OSError):  # it has ended, which `wait_ready` tells
            ours.sendall(frame(HostCall(id=next(self._ids), verb="start", arguments=(self._make_build(),))))

    def wait_ready(self) -> None:
        """Wait until the engine is built. Raises SamplerError with its last lines if it ends or takes too long."""
        assert self._socket is not None
        began = told = time.monotonic()
        self._socket.settimeout(POLL_S)
        reply: Any = None
        while True:
            try:
                reply = receive_now(self._socket)
                break
            except TimeoutError:
                now = time.monotonic()
            if now - began > self._start_s:
                self.stop()
                raise SamplerError(
                    f"{self.name} was not ready within {self._start_s:g} s: raise 'cluster.deadline_s', or look into "
                    f"{self._log}{self._last_words()}"
                )
            if now - told > TOLD_EVERY_S:
                told = now
                logger.info("waiting for %s: %.0f of %g s (%s)", self.name, now - began, self._start_s, self._log)
        if not isinstance(reply, HostReply) or reply.error is not None:
            how = self._exit_words() if reply is None else ""
            self.stop()
            if isinstance(reply, HostReply):
                raise SamplerError(f"{self.name} did not start: {reply.error}")
            raise SamplerError(f"{self.name} ended before it was ready{how}{self._last_words()}")
        logger.info("%s (process %s) is ready after %.0f s", self.name, self.pid, time.monotonic() - began)

    def ask_to_stop(self) -> None:
        """Tell the process to end, and do not wait for it."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(frame(HostCall(id=next(self._ids), verb="close")))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def stop(self) -> None:
        """End the process."""
        self.ask_to_stop()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            return "; its last lines: " + " | ".join(line.strip()[:300] for line in lines) if lines else ""
        return ""

    def _exit_words(self) -> str:
        """Say in brackets how the process has ended; nothing if it runs on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = 0 if self._process is None else self._process.wait(STOP_S)
            return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
        return ""

    # --- calls, in one event loop ---

    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Run a verb of the host and return its result. Raises the host's error, or ServerLostError.

        Calls reach the host in the order they are made. A caller that is cancelled cancels the call there.
        """
        if self._writer is None:
            await self._attach()
        writer = self._writer
        if writer is None or writer.is_closing():
            raise ServerLostError(f"{self.name} has ended")
        message = HostCall(id=next(self._ids), verb=verb, arguments=arguments, named=tuple(named.items()))
        answer = self._open[message.id] = asyncio.get_running_loop().create_future()
        writer.write(frame(message))
        try:
            return await answer
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(frame(CancelCall(id=message.id)))
            raise
        finally:
            self._open.pop(message.id, None)

    async def restart(self) -> None:
        """End the process, whatever it does, and start another one."""
        self.detach("it is started again")
        await asyncio.to_thread(self._start_again)

    def detach(self, reason: str) -> None:
        """Fail open calls and let go of the connection."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        self._reading = self._writer = None
        self.fail_open(reason)

    def fail_open(self, reason: str) -> None:
        """Fail open calls with ServerLostError, and cancel them in the process if it still listens."""
        for id, answer in tuple(self._open.items()):
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(frame(CancelCall(id=id)))
            if not answer.done():
                answer.set_exception(ServerLostError(f"{self.name}: {reason}"))

    def _start_again(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
        self.stop()
        self.start()
        self.wait_ready()

    async def _attach(self) -> None:
        async with self._attaching:
            if self._writer is None and self._socket is not None:
                # a duplicate, so that `ask_to_stop` still has a socket when the event loop is closed
                reader, self._writer = await asyncio.open_connection(sock=self._socket.dup())
                self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (reply := await receive(reader)) is not None:
            answer = self._open.get(reply.id)
            if answer is None or answer.done():
                continue
            if reply.error is not None:
                answer.set_exception(reply.error)
            else:
                answer.set_result(reply.value)
        if self._writer is not None:
            self._writer.close()
        self.fail_open("its process has ended")
