"""Publish new weights to every sampler; the only place that makes a version.

The phases are fixed: pause (open sequences are interrupted or drained), score under the old version (the caller), load,
compare fingerprints, version + 1, sweep stale groups (the caller), resume. Samplers acknowledge each phase; nothing is
guessed by sleeping.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TypeVar

from headrace.errors import ConfigError, HeadraceError, RolloutError, boundary
from headrace.process.watchdog import watching
from headrace.protocols import Sampler, sampler_flags
from headrace.types import WeightsHandle

T = TypeVar("T")


class Interrupt(StrEnum):
    """Choose what happens to open sequences when the weights change."""

    ABORT = "abort"  # cut, and continued after computing their keys and values again under the new weights
    INFLIGHT = "inflight"  # cut, and continued with the keys and values of the old weights
    DRAIN = "drain"  # waited for; sequences still open at the deadline are cut


class Publisher:
    """Own the version: the number of published weights. It starts at the version its samplers have."""

    def __init__(
        self,
        samplers: Sequence[Sampler] = (),
        *,
        interrupt: Interrupt = Interrupt.ABORT,
        drain_s: float = 60.0,  # with Interrupt.DRAIN: how long open sequences may take to end
        timeout_s: float = 600.0,  # of each phase
    ) -> None:
        self.samplers = tuple(samplers)
        self._interrupt = interrupt
        self._drain_s = drain_s
        self._timeout_s = timeout_s
        self.drains_cut = 0  # publishes that did not wait for all open sequences
        self.version = self.samplers[0].version if self.samplers else 0
        for index, sampler in enumerate(self.samplers):
            if interrupt is Interrupt.INFLIGHT and not sampler_flags(sampler).holds_in_flight:
                raise ConfigError(
                    f"{_name(index, sampler)} cannot keep the keys and values of open sequences over a change of "
                    'weights: write rl.async.interrupt = "abort" or "drain"'
                )

    @asynccontextmanager
    async def publish(
        self, handle: WeightsHandle, *, before_load: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[int]:
        """Load new weights. Inside the `with` all samplers are paused and hold the new version; after it they sample.

        `before_load` runs when all samplers are paused and still hold the old version. When a phase fails the samplers
        stay paused, because they may hold different weights. Raises RolloutError that names the sampler.
        """
        await self._pause(self.samplers)
        if before_load is not None:
            await before_load()
        await self._load(self.samplers, handle, self.version + 1)
        self.version += 1
        yield self.version
        await _call_all(self.samplers, "resume", lambda sampler: sampler.resume(), timeout_s=self._timeout_s)

    async def load_current(self, handle: WeightsHandle) -> None:
        """Load the weights of the current version into samplers that do not hold it yet, as after a restart."""
        behind = [sampler for sampler in self.samplers if sampler.version != self.version]
        await self._pause(behind)
        await self._load(behind, handle, self.version)
        await _call_all(behind, "resume", lambda sampler: sampler.resume(), timeout_s=self._timeout_s)

    def check(self) -> None:
        """Raise RolloutError when a sampler holds another version than the run: its tokens would be mislabelled."""
        for index, sampler in enumerate(self.samplers):
            if sampler.version != self.version:
                raise RolloutError(
                    f"{_name(index, sampler)} holds version {sampler.version} and the run is at {self.version}: "
                    "load the weights of this version into it (load_current) before sampling"
                )

    async def _pause(self, samplers: Sequence[Sampler]) -> None:
        if self._interrupt is Interrupt.DRAIN:
            await self._drain(samplers)
        await _call_all(samplers, "pause", lambda sampler: sampler.pause(interrupt=True), timeout_s=self._timeout_s)

    async def _load(self, samplers: Sequence[Sampler], handle: WeightsHandle, version: int) -> None:
        fingerprints = await _call_all(
            samplers, "load the weights", lambda sampler: sampler.load(handle, version), timeout_s=self._timeout_s
        )
        for index, (sampler, fingerprint) in enumerate(zip(samplers, fingerprints, strict=True)):
            if fingerprint != handle.fingerprint:
                raise RolloutError(
                    f"{_name(index, sampler)} holds weights {fingerprint} after loading version {version} and the "
                    f"trainer exported {handle.fingerprint}: they were altered or mixed up on the way"
                )

    async def _drain(self, samplers: Sequence[Sampler]) -> None:
        """Wait for open sequences to end; those that take longer than `drain_s` are cut by the pause that follows."""
        try:
            async with asyncio.timeout(self._drain_s):
                await _call_all(
                    samplers, "drain", lambda sampler: sampler.pause(interrupt=False), timeout_s=self._timeout_s
                )
        except TimeoutError:
            self.drains_cut += 1


async def _call_all(
    samplers: Sequence[Sampler], phase: str, call: Callable[[Sampler], Awaitable[T]], *, timeout_s: float
) -> list[T]:
    """Run one phase on all samplers at once. Waits for all of them before it raises the first failure."""

    async def call_one(index: int, sampler: Sampler) -> T:
        try:
            with watching(f"publishing: {_name(index, sampler)} to {phase}", has_deadline=True):
                async with asyncio.timeout(timeout_s):
                    with boundary(RolloutError, "unexpected failure"):
                        return await call(sampler)
        except TimeoutError as exc:
            raise RolloutError(f"{_name(index, sampler)} did not {phase} within {timeout_s:g} s") from exc
        except HeadraceError as exc:
            raise RolloutError(f"{_name(index, sampler)} could not {phase}: {exc}") from exc

    calls = [call_one(index, sampler) for index, sampler in enumerate(samplers)]
    replies: list[T] = []
    for reply in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(reply, BaseException):
            raise reply
        replies.append(reply)
    return replies


def _name(index: int, sampler: Sampler) -> str:
    return f"sampler {index} ({type(sampler).__name__})"
