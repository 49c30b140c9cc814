"""Run inference servers on nodes of the cluster: an actor starts and keeps each, and the coordinator asks it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.cluster.connection import cluster_machines
from headrace.errors import HeadraceError, SamplerError
from headrace.infer.servers.launch import (
    COMMANDS,
    HOST,
    STOP_S,
    LaunchedServer,
    ServerOptions,
    free_port,
    server_environment,
)

logger = logging.getLogger(__name__)
TELL_S = 20.0
SLACK_S = 60.0  # by which the answer about a start may outlast the start


def listening_host(machine: str, machines: frozenset[str]) -> str:
    """Return where a server of a machine listens: where rollout workers of other machines reach it, if there are any.

    >>> listening_host("10.0.0.7", frozenset({"10.0.0.7", "10.0.0.8"}))
    '10.0.0.7'
    >>> listening_host("10.0.0.7", frozenset({"10.0.0.7"}))
    '127.0.0.1'
    """
    return HOST if machines <= {machine} else machine


class EngineReplica:
    """Keeps one server on its node. The server ends with this process, which ends with the coordinator."""

    def __init__(self) -> None:
        self._server: LaunchedServer | None = None
        self._stopping = asyncio.Lock()

    async def start(
        self, kind: str, options: ServerOptions, log: Path, start_s: float, machines: frozenset[str]
    ) -> str | HeadraceError:
        """Start the server and return its address, or the error. It listens at its machine's own address, or, if the
        cluster has no other `machines`, where only this one reaches it."""
        from ray.util import get_node_ip_address

        node = get_node_ip_address()
        if not options.model.is_dir():
            return SamplerError(
                f"node {node} does not see {options.model}: write 'engine.sync_folder', a folder that all nodes share"
            )
        options = replace(options, host=listening_host(node, machines))
        port = free_port(options.host)
        self._server = LaunchedServer(
            lambda: COMMANDS[kind](options, port),
            port,
            environment=server_environment(options),
            log=log,
            start_s=start_s,
            host=options.host,
        )
        try:
            await asyncio.to_thread(self._server.start)
        except HeadraceError as exc:
            return exc
        return self._server.url

    async def wait_ready(self) -> HeadraceError | None:
        """Wait until the server answers; return the error if it does not."""
        assert self._server is not None
        try:
            await asyncio.to_thread(self._server.wait_ready)
        except HeadraceError as exc:
            return exc
        return None

    async def stop(self) -> None:
        """End the server."""
        async with self._stopping:  # who asks again waits for the end, too
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)


class PlacedServer:
    """A server that an actor keeps, as `LaunchedServer` is one that this process keeps. Its calls block.

    `moved` is called with the address at every start: a server whose node has left starts on another one.
    """

    def __init__(
        self,
        kind: str,
        options: Callable[[], ServerOptions],  # asked for at every start
        *,
        number: int,
        create: Callable[[], Any],  # start the actor in its place
        kill: Callable[[Any], None],
        log: Path,
        start_s: float,
        deadline_s: float,
    ) -> None:
        self.url = f"engine-replica-{number}"  # until it is started
        self.moved: Callable[[str], None] = lambda url: None
        self._kind, self._options, self._number, self._log = kind, options, number, log
        self._create, self._kill, self._start_s, self._deadline_s = create, kill, start_s, deadline_s
        self._actor: Any = None

    def start(self) -> None:
        """Start the server, and return before it answers."""
        assert self._actor is None
        self._actor = self._create()
        arguments = (self._kind, self._options(), self._log, self._start_s, cluster_machines())
        self.url = self._ask("start", *arguments, limit_s=self._deadline_s)
        self.moved(self.url)

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises SamplerError if it ends or takes too long."""
        self._ask("wait_ready", limit_s=self._start_s + SLACK_S)

    def ask_to_stop(self) -> None:
        """Tell the server to end, and do not wait for it."""
        if self._actor is not None:
            self._actor.stop.remote()

    def stop(self) -> None:
        """End the server and its actor."""
        if self._actor is None:
            return
        with contextlib.suppress(SamplerError):
            self._ask("stop", limit_s=STOP_S)
        self._kill(self._actor)  # which ends the server as well
        self._actor = None

    def restart(self) -> None:
        """Start the server anew, where there is room for it, with the newest weights."""
        self.stop()
        self.start()
        self.wait_ready()

    def _ask(self, method: str, *arguments: object, limit_s: float) -> Any:
        """Call the actor, with a line every twenty seconds. Raises SamplerError if it fails, is gone or is late."""
        import ray
        from ray.exceptions import RayError

        what = f"{method} of inference server {self._number} ({self.url})"
        began_s = time.monotonic()
        answer = getattr(self._actor, method).remote(*arguments)
        while not ray.wait([answer], timeout=min(TELL_S, limit_s))[0]:
            passed_s = time.monotonic() - began_s
            if passed_s > limit_s:
                raise SamplerError(f"waited {limit_s:g} s for {what}: look at its node and at {self._log} there")
            logger.info("waiting for %s: %.0f of %g s", what, passed_s, limit_s)
        try:
            result = ray.get(answer)
        except RayError as exc:
            raise SamplerError(f"{what} failed: {(str(exc).splitlines() or ['?'])[0]}") from exc
        if isinstance(result, HeadraceError):
            raise result
        return result
