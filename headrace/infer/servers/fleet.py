"""The inference servers of a run: start those that are ours, load the weights into all, and stop ours at the end."""

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from headrace.infer.servers.replicas import ReplicaSampler
from headrace.infer.servers.weight_sync import WeightSync
from headrace.types import WeightsHandle


class ServerProcess(Protocol):
    """A process of ours that samples: an inference server or an engine. Its verbs block."""

    def start(self) -> None:
        """Start it, and return before it is ready."""

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises SamplerError if it ends or takes too long."""

    def ask_to_stop(self) -> None:
        """Tell it to end, and do not wait for it."""

    def stop(self) -> None:
        """End it."""


class ServerFleet:
    """Own the servers that were launched, the sampler over all of them, and the folder of their weights."""

    def __init__(
        self, sampler: ReplicaSampler, sync: WeightSync, root: Path, launched: Sequence[ServerProcess] = ()
    ) -> None:
        self.sampler = sampler
        self._sync, self._root, self._launched = sync, root, tuple(launched)

    async def start(self, handle: WeightsHandle) -> None:
        """Start the servers, load the weights as version 0 and prove that they hold them. Raises SamplerError."""
        await self._sync.prepare(handle, 0)
        for server in self._launched:
            await asyncio.to_thread(server.start)
        await asyncio.gather(*[asyncio.to_thread(server.wait_ready) for server in self._launched])
        await self.sampler.start(handle)

    def close(self) -> None:
        """Stop the servers and remove the weights."""
        with suppress(RuntimeError):  # its event loop is closed, and with it all tasks
            self.sampler.cancel()
        for server in self._launched:
            server.ask_to_stop()
        for server in self._launched:
            server.stop()
        shutil.rmtree(self._root, ignore_errors=True)
