"""The trainer's end of a process group with the workers of one server; gloo and NCCL differ in its construction alone.

It needs no default process group, so it stands beside the ranks of sharded training. Its calls run in threads that
nobody waits for at the end of the process: a collective whose other end is gone waits for its timeout.
"""

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import TensorApi, TransferGroup

R = TypeVar("R")
_numbers = itertools.count()


class SendGroup:
    """Rank 0 of a group. A group that failed cannot be used again: `abandon` it and open another."""

    def __init__(self, group: TransferGroup, store: Store, device: torch.device) -> None:
        self.group = group
        self._store, self._device = store, device
        self._ranks: Any = None  # the process group, once the workers are there

    @classmethod
    async def open(
        cls, api: TensorApi, url: str, *, device: torch.device, join_s: float, timeout_s: float
    ) -> "SendGroup":
        """Meet the workers of a server within `join_s`; a broadcast may take `timeout_s`. Raises SamplerError."""
        num_ranks = 1 + await api.num_workers()
        host, timeout = own_address(url), timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        with boundary(SamplerError, f"the trainer cannot listen for the workers of {url}"):
            store = TCPStore(host, 0, num_ranks, True, timeout, wait_for_workers=False)
        name = f"headrace-{os.getpid()}-{next(_numbers)}"
        group = TransferGroup(name=name, host=host, port=store.port, backend=backend, num_ranks=num_ranks)
        opened = cls(group, store, device)
        joined = opened._in_thread(lambda: opened._join(api.group_store(store, group), timeout))
        await both(api.join_group(group), joined, what=f"the process group with {url}", timeout_s=join_s)
        return opened

    def send(self, tensors: Sequence[Tensor]) -> "asyncio.Future[None]":
        """Broadcast tensors one after another; done when they have left this process."""
        return self._in_thread(lambda: self._broadcast(tensors))

    def abandon(self) -> None:
        """Drop the group without a word to the workers, who may be gone, and do not wait for what it is doing."""
        held, self._ranks = [self._ranks], None

        def end() -> None:
            with suppress(RuntimeError, AttributeError):
                held.pop().abort()  # its last reference goes here: that waits for its threads

        threading.Thread(target=end, name="headrace-transfer-end", daemon=True).start()

    def _join(self, store: Store, timeout: timedelta) -> None:
        group = self.group
        if group.backend == "gloo":
            self._ranks = dist.ProcessGroupGloo(store, 0, group.num_ranks, timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._ranks = dist.ProcessGroupNCCL(store, 0, group.num_ranks, options)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.detach().to(self._device).contiguous()
            self._ranks.broadcast([whole], dist.BroadcastOptions()).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _in_thread(self, run: Callable[[], R]) -> "asyncio.Future[R]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def settle(call: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if future.done() else call())

        def body() -> None:
            try:
                with boundary(SamplerError, "the process group failed"):
                    result = run()
            except SamplerError as exc:
                error = exc
                settle(lambda: future.set_exception(error))
            else:
                settle(lambda: future.set_result(result))

        threading.Thread(target=body, name="headrace-transfer", daemon=True).start()
        return future


async def both(order: Any, here: "asyncio.Future[Any]", *, what: str, timeout_s: float) -> None:
    """Wait for a server's reply to an order and for this process's part in it; the first failure ends the wait."""
    reply = asyncio.ensure_future(order)
    parts = (reply, here)
    try:
        await asyncio.wait(parts, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for part in parts:  # the server's own words first
            if part.done():
                part.result()
        if not all(part.done() for part in parts):
            raise SamplerError(f"{what} did not come about within {timeout_s:g} s")
    finally:
        for part in parts:
            part.cancel()
            if part.done() and not part.cancelled():
                part.exception()  # nobody else asks for it


def own_address(url: str) -> str:
    """Return the address under which a server reaches this machine."""
    parts = urlsplit(url)
    with boundary(SamplerError, f"{url} has no address"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing: it looks up the route
        return str(probe.getsockname()[0])
