"""Run embedded engines on nodes of the cluster: an actor is one engine with a full copy of the weights."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from headrace.cluster.engine_access import ActorAccess, EngineAccess, interrupted
from headrace.errors import HeadraceError, SamplerError, boundary
from headrace.infer.engine_processes.engine_host import BuildEngine, EngineHost
from headrace.infer.servers.api import ServerLostError
from headrace.types import Completion, SampleRequest

logger = logging.getLogger(__name__)
TELL_S = 20.0


class EngineActor(EngineHost):
    """Answers the coordinator's calls, and samples for workers that it has lent the engine to. Errors are values."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    async def open(self, build: BuildEngine, weights: Path, threads: int) -> HeadraceError | None:
        """Make the engine, from weights that this node must see."""
        from ray.util import get_node_ip_address

        if not await asyncio.to_thread(weights.is_dir):
            return SamplerError(
                f"node {get_node_ip_address()} does not see {weights}: write 'engine.sync_folder', a folder that all "
                "nodes share"
            )
        import torch

        torch.set_num_threads(threads)
        error: HeadraceError | None = await _value(self.start(build), "start")
        return error

    async def run(self, verb: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run a verb of the engine; return its result, or the error."""
        return await _value(getattr(self, verb)(*arguments, **named), verb)

    async def sample_lent(self, request: SampleRequest) -> Completion | HeadraceError:
        """Sample for a worker. While the engine is paused nothing waits here: the weights can only be replaced when the
        worker has said that its sequence has come back."""
        if self._paused:
            return interrupted(request)
        result: Completion | HeadraceError = await _value(self.sample(request), "sample")
        return result

    async def pause(self, *, interrupt: bool) -> None:
        self._paused = True
        await super().pause(interrupt=interrupt)

    async def resume(self) -> None:
        await super().resume()
        self._paused = False


async def _value(call: Coroutine[Any, Any, Any], verb: str) -> Any:
    try:
        with boundary(SamplerError, f"the engine could not {verb}"):
            return await call
    except HeadraceError as exc:
        return exc


class PlacedEngine:
    """An engine in an actor, as `EngineProcess` is one in a process of this machine. It ends with the run.

    `start` and `wait_ready` block; `call` belongs to one event loop. `make_build` is asked at every start, and
    `weights` is the folder of the run's weights.
    """

    pid = None  # which process it is on its node is not known here

    def __init__(
        self,
        make_build: Callable[[], BuildEngine],
        *,
        name: str,
        weights: Path,
        create: Callable[[], Any],  # start the actor in its place
        kill: Callable[[Any], None],
        threads: int = 1,  # of arithmetic
        start_s: float = 600.0,
    ) -> None:
        self.name = name
        self._make_build, self._weights, self._threads, self._start_s = make_build, weights, threads, start_s
        self._create, self._kill = create, kill
        self._actor: Any = None
        self._starting: Any = None
        self._open: set[asyncio.Future[Any]] = set()

    @property
    def access(self) -> EngineAccess | None:
        """Return what a worker reaches the engine with."""
        return None if self._actor is None else ActorAccess(actor=self._actor, name=self.name)

    # --- starting and ending, on any thread ---

    def start(self) -> None:
        """Start the actor, and tell it what to build."""
        assert self._actor is None
        self._actor = self._create()
        self._starting = self._actor.open.remote(self._make_build(), self._weights, self._threads)

    def wait_ready(self) -> None:
        """Wait until the engine is built. Raises SamplerError if it cannot be, or takes too long."""
        import ray
        from ray.exceptions import RayError

        began_s = time.monotonic()
        while not ray.wait([self._starting], timeout=min(TELL_S, self._start_s))[0]:
            passed_s = time.monotonic() - began_s
            if passed_s > self._start_s:
                self.stop()
                raise SamplerError(
                    f"{self.name} was not ready within {self._start_s:g} s: raise 'cluster.deadline_s', or look at its "
                    "node"
                )
            logger.info("waiting for %s: %.0f of %g s", self.name, passed_s, self._start_s)
        try:
            error = ray.get(self._starting)
        except RayError as exc:
            self.stop()
            raise SamplerError(f"{self.name} did not start: {_first_line(exc)}") from exc
        if error is not None:
            self.stop()
            raise error
        logger.info("%s is ready after %.0f s", self.name, time.monotonic() - began_s)

    def ask_to_stop(self) -> None:
        """Tell the engine to end, and do not wait for it."""
        self.stop()

    def stop(self) -> None:
        """End the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            self._kill(actor)

    async def restart(self) -> None:
        """End the actor, and start another one where there is room for it."""
        self.detach("it is started again")
        await asyncio.to_thread(self._start_again)

    def _start_again(self) -> None:
        self.stop()
        self.start()
        self.wait_ready()

    # --- calls, in one event loop ---

    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Run a verb of the engine and return its result. Raises the engine's error, or ServerLostError."""
        import ray

        if self._actor is None:
            raise ServerLostError(f"{self.name} has ended")
        running = self._actor.run.remote(verb, arguments, named)
        answer = asyncio.ensure_future(_answer(running))
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open.add(lost)
        try:
            await asyncio.wait([answer, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise ServerLostError(f"{self.name}: {lost.result()}")
            value = answer.result()
        finally:
            self._open.discard(lost)
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(HeadraceError), boundary(SamplerError, "it is gone"):
                    ray.cancel(running)
        if isinstance(value, _Lost):
            raise ServerLostError(f"{self.name}: its process has ended ({value.reason})")
        if isinstance(value, HeadraceError):
            raise value
        return value

    def detach(self, reason: str) -> None:
        """Fail open calls."""
        self.fail_open(reason)

    def fail_open(self, reason: str) -> None:
        """Fail open calls with ServerLostError, and cancel them in the engine if it still listens."""
        for lost in tuple(self._open):
            if not lost.done():
                lost.set_result(reason)


class _Lost:
    def __init__(self, reason: str) -> None:
        self.reason = reason


async def _answer(running: Any) -> Any:
    from ray.exceptions import RayError

    try:
        return await running
    except RayError as exc:
        return _Lost(_first_line(exc))


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
