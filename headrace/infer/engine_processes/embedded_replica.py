"""An engine process as a replica: the verbs of a `Sampler`, and what `ReplicaSampler` needs to repair it.

Calls that come while paused wait here, so that weights can be loaded meanwhile. Nothing that was sampled comes back
from a process that is killed; its requests are sampled again elsewhere, and on a CPU they draw the same tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from headrace.errors import SamplerError
from headrace.infer.servers.api import ServerLostError, WeightsNotProvenError
from headrace.infer.servers.weight_sync import SyncedWeights, WeightSync
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, WeightsHandle, int_array


class EngineLink(Protocol):
    """Calls the verbs of an `EngineHost` in another process of this machine (`EngineProcess`), or of a cluster."""

    @property
    def name(self) -> str:
        """Return its name in messages."""

    @property
    def access(self) -> object | None:
        """Return what other processes reach the engine with; None if only this one does."""

    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Run a verb and return its result. Raises the host's error, or ServerLostError."""

    def fail_open(self, reason: str) -> None:
        """Fail open calls with ServerLostError."""

    def detach(self, reason: str) -> None:
        """Fail open calls and let go of the connection."""


class EmbeddedReplica:
    """Implements `ReplicaMember` over one process. `control_s`: deadline of all calls that do not sample."""

    resumes_draws = True
    scores_any_temperature = True

    def __init__(
        self, process: EngineLink, sync: WeightSync, *, hold_in_flight: bool = False, control_s: float = 600.0
    ) -> None:
        self.holds_in_flight = hold_in_flight
        self._process, self._sync, self._control_s = process, sync, control_s
        self._version = 0
        self._num_open = 0
        self._taken_out = False
        self._lent: set[asyncio.Future[Any]] = set()
        self._running, self._idle = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._idle.set()

    @property
    def url(self) -> str:
        """Return its name in messages."""
        return self._process.name

    @property
    def version(self) -> int:
        return self._version

    @property
    def load_now(self) -> int:
        """Return how many sequences are being sampled."""
        return self._num_open

    # --- verbs ---

    async def sample(self, request: SampleRequest) -> Completion:
        """See `Sampler`. Raises ServerLostError if the process is lost."""
        await self._running.wait()
        if self._taken_out:
            raise ServerLostError(f"{self.url} was taken out")
        self._num_open += 1
        self._idle.clear()
        try:
            completion: Completion = await self._process.call("sample", request)
            return completion
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    @property
    def lends(self) -> bool:
        return self._process.access is not None

    async def lend(self, use: Callable[[object, int], Awaitable[str]]) -> None:
        """See `ReplicaMember`."""
        await self._running.wait()
        access = self._process.access
        if self._taken_out or access is None:
            raise ServerLostError(f"{self.url} was taken out")
        self._num_open += 1
        self._idle.clear()
        using = asyncio.ensure_future(use(access, self._version))
        self._lent.add(using)
        try:
            await asyncio.wait([using])
            if using.cancelled():
                raise ServerLostError(f"{self.url} was taken out")
            if lost := using.result():
                raise ServerLostError(lost)
        finally:
            using.cancel()
            self._lent.discard(using)
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        scores: tuple[FloatArray, ...] = await self._process.call("score", tuple(sequences), temperature)
        return scores

    async def load(self, handle: WeightsHandle, version: int) -> str:
        if self._num_open:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        weights = await self._sync.prepare(handle, version)
        await self.install(weights)
        return weights.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        """See `Sampler`. Without an interrupt the caller sets the deadline: sequences may take any time to end."""
        self._running.clear()
        if interrupt:
            await self._control("pause", interrupt=True)
        else:
            await self._process.call("pause", interrupt=False)
        await self._idle.wait()

    async def resume(self) -> None:
        if not self._taken_out:
            await self._control("resume")
        self._running.set()

    # --- for the owner of several replicas ---

    async def start(self, handle: WeightsHandle) -> None:
        """Prove that the process holds the weights of version 0, with which it was started."""
        await self.install(await self._sync.prepare(handle, 0))

    async def install(self, weights: SyncedWeights, *, fresh: bool = False) -> None:
        """Load prepared weights, and compare the fingerprint of what the process then holds."""
        held = await self._control("publish", weights.folder, weights.version, partial=weights.is_adapter)
        if held != weights.fingerprint:
            raise WeightsNotProvenError(
                f"{self.url} holds weights {held} after version {weights.version} was loaded, and the trainer wrote "
                f"{weights.fingerprint}: they were altered or mixed up on the way"
            )
        self._version = weights.version
        self._taken_out = False

    async def record(self, version: int) -> None:
        """Do nothing: a fingerprint needs nothing of the trainer's but the one that came with the weights."""

    async def check(self) -> None:
        """Compute the log-prob of a token, between two steps of the engine. Raises SamplerError."""
        await self._process.call("score", (int_array([0, 0]),), 1.0)

    async def release(self) -> None:
        """Do nothing: a paused engine computes log-probs, which is all that is asked of it before it is loaded."""

    async def forget(self) -> None:
        """Fail open and waiting calls: the replica is taken out, until `install` succeeds."""
        self._taken_out = True
        self._running.set()
        self._process.fail_open("it was taken out")
        for using in tuple(self._lent):
            using.cancel()

    async def close(self) -> None:
        await self.forget()
        self._process.detach("it is closed")

    async def _control(self, verb: str, *arguments: Any, **named: Any) -> Any:
        try:
            async with asyncio.timeout(self._control_s):
                return await self._process.call(verb, *arguments, **named)
        except TimeoutError as exc:
            raise ServerLostError(f"{self.url} did not {verb} within {self._control_s:g} s") from exc
