"""The ways in which one server is given all weights of a version, while it is paused."""

import asyncio
from contextlib import suppress
from typing import Protocol

import torch

from headrace.errors import SamplerError
from headrace.infer.servers.api import EngineApi
from headrace.infer.servers.transfer.buckets import BUCKET_BYTES, specs_of, split_into_buckets
from headrace.infer.servers.transfer.process_group import SendGroup, both
from headrace.infer.servers.weight_sync import SyncedWeights
from headrace.infer.servers.wire_format import CONTROL_S, LOAD_S


class WeightSender(Protocol):
    """Gives weights to one server."""

    async def send(self, api: EngineApi, weights: SyncedWeights) -> None:
        """Replace the weights and name them after their version.

        Raises SamplerError; the server may then hold anything.
        """

    def reset(self) -> None:
        """Forget what was agreed with the server: it may have been started anew."""

    async def close(self, api: EngineApi) -> None: ...


class FolderSender:
    """Let the server read the folder of a version."""

    async def send(self, api: EngineApi, weights: SyncedWeights) -> None:
        await api.load_folder(weights.folder, weights.version)

    def reset(self) -> None: ...

    async def close(self, api: EngineApi) -> None: ...


class BroadcastSender:
    """Broadcast tensors to the server's workers, over gloo, or NCCL if `device` is a GPU.

    Each server has a process group of its own with the trainer, so that one that is lost takes no other with it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        join_s: float = CONTROL_S,
        timeout_s: float = LOAD_S,
    ) -> None:
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._bucket_bytes = bucket_bytes
        self._join_s, self._timeout_s = join_s, timeout_s
        self._group: SendGroup | None = None

    async def send(self, api: EngineApi, weights: SyncedWeights) -> None:
        try:
            if self._group is None:
                self._group = await SendGroup.open(
                    api.tensors, api.url, device=self._device, join_s=self._join_s, timeout_s=self._timeout_s
                )
            group = self._group
            await api.tensors.begin_update()
            for bucket in split_into_buckets(weights.held_tensors, self._bucket_bytes):
                sent = group.send([tensor for _, tensor in bucket])
                order = api.tensors.receive(specs_of(bucket), group.group)
                await both(order, sent, what=f"a broadcast to {api.url}", timeout_s=self._timeout_s)
            await api.tensors.end_update(weights.version)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    async def close(self, api: EngineApi) -> None:
        if self._group is not None:
            with suppress(SamplerError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await api.tensors.leave_group(self._group.group)
        self.reset()


class SharedMemorySender:
    """Let the server's workers read tensors on a GPU that both see, by CUDA IPC. Not run here."""

    def __init__(self, device: torch.device, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._device, self._bucket_bytes = device, bucket_bytes

    async def send(self, api: EngineApi, weights: SyncedWeights) -> None:
        await api.tensors.begin_update()
        for bucket in split_into_buckets(weights.held_tensors, self._bucket_bytes):
            there = [(name, tensor.to(self._device)) for name, tensor in bucket]
            torch.cuda.synchronize(self._device)
            await api.tensors.open_shared(there)  # `there` lives until the workers have read it
        await api.tensors.end_update(weights.version)

    def reset(self) -> None: ...

    async def close(self, api: EngineApi) -> None: ...
