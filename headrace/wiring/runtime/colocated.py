"""Trainer and inference servers on the same GPUs, in turns: `cluster.colocate`.

While servers sample, the optimiser's state is in host memory; while the trainer trains, the servers sleep. Weights of
the trainer stay on the device, because they are written, scored with and compared in both turns.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import torch

from headrace.config import Config, keeps_weights
from headrace.errors import ConfigError, HeadraceError, SamplerError
from headrace.infer.servers.colocation import ServerMemory, SglangMemory, VllmMemory, sleep_arguments
from headrace.infer.servers.replicas import Replica, ReplicaSampler
from headrace.model.load import LanguageModel
from headrace.model.memory import ModelDims, Placement, choose_placement, colocated_memory, plan_memory
from headrace.wiring.build.model_sizes import folder_shape, memory_request

logger = logging.getLogger(__name__)

MEMORIES: Mapping[str, Callable[[str], ServerMemory]] = {"vllm": VllmMemory, "sglang": SglangMemory}
ROUNDS = 2  # attempts to put all servers to sleep; between them those that cannot are repaired
LEAST_FREED = 2**28  # bytes: the keys and values of a server that sleeps are more
LEAST_SHARE = 0.05  # of a GPU, for a server


class OffloadingBackend(Protocol):
    """A training backend whose optimiser state can leave the device."""

    def offload(self) -> "Future[None]": ...

    def reload(self) -> "Future[None]": ...


class GpuTurns:
    """Implements `Turns`; begins with the trainer's.

    `memories`: of the servers behind `sampler`, in its order. `free_bytes` measures the free memory of the trainer's
    GPU; None where there is none to measure.
    """

    def __init__(
        self,
        backend: OffloadingBackend,
        sampler: ReplicaSampler,
        memories: Sequence[ServerMemory],
        *,
        keep_weights: bool,  # in the servers while they sleep
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        assert len(memories) == len(sampler.replicas)
        self._backend, self._sampler = backend, sampler
        self._memories = dict(zip(sampler.replicas, memories, strict=True))
        self._keep_weights, self._free_bytes = keep_weights, free_bytes
        self._sampling = False

    async def to_sampling(self) -> None:
        """Move the optimiser's state to host memory, then wake the servers. Those that do not wake are taken out."""
        if self._sampling:
            return
        await asyncio.wrap_future(self._backend.offload())
        self._sampling = True
        await self._sampler.call_each(lambda replica: self._memories[replica].wake())
        if self._keep_weights:  # otherwise they have none: the publication that follows resumes them
            await self._sampler.resume()

    async def to_training(self) -> None:
        """Pause sampling, put all servers to sleep, then bring the optimiser's state back.

        Servers under repair are waited for: one that starts takes memory. Raises SamplerError if a server keeps its.
        """
        if not self._sampling:
            return
        await self._sampler.pause(interrupt=True)
        free = None if self._free_bytes is None else self._free_bytes()
        for _ in range(ROUNDS):
            await self._sampler.settle()
            if await self._sampler.call_each(self._sleep):
                break
        else:
            raise SamplerError("a server cannot be put to sleep, so that there is no room to train: look at its log")
        if free is not None and self._free_bytes is not None and self._free_bytes() - free < LEAST_FREED:
            raise SamplerError(
                "the servers sleep and the trainer's GPU has no more free memory than before: start them with "
                "--enable-sleep-mode (vLLM) or --enable-memory-saver (SGLang), on the trainer's GPU"
            )
        self._sampling = False
        await asyncio.wrap_future(self._backend.reload())

    async def start(self, start_servers: Callable[[], Awaitable[None]]) -> None:
        """Begin the first turn of sampling: servers start, awake, when the optimiser's state is out of the way.

        Those that run already may sleep: a run that was killed has left them so.
        """
        await asyncio.wrap_future(self._backend.offload())
        await self._wake_others()
        await start_servers()
        self._sampling = True

    async def finish(self) -> None:
        """Wake the servers that are not ours, for the next stage or whoever uses them."""
        with suppress(HeadraceError):  # the trainer or a server has failed
            if not self._sampling:
                await asyncio.wrap_future(self._backend.offload())
            await self._wake_others()

    async def _wake_others(self) -> None:
        for replica, memory in self._memories.items():
            if replica.restart is None:
                await memory.wake()

    async def _sleep(self, replica: Replica) -> None:
        await self._memories[replica].sleep(keep_weights=self._keep_weights)


def make_turns(config: Config, backend: OffloadingBackend, sampler: ReplicaSampler, lm: LanguageModel) -> GpuTurns:
    """Build the turns of a run with servers."""
    memories = [MEMORIES[config.engine.type](replica.url) for replica in sampler.replicas]
    for replica, memory in zip(sampler.replicas, memories, strict=True):
        if replica.restart is not None and isinstance(memory, SglangMemory):
            replica.restart = _then(replica.restart, memory.was_started_again)
    on_gpu = lm.device.type == "cuda"
    return GpuTurns(
        backend,
        sampler,
        memories,
        keep_weights=keeps_weights(config),
        free_bytes=(lambda: torch.cuda.mem_get_info(lm.device)[0]) if on_gpu else None,
    )


def server_arguments(config: Config, lm: LanguageModel) -> tuple[str, ...]:
    """Return the launch options of servers that share the trainer's GPU; none without one.

    Raises ConfigError if the trainer leaves too little.
    """
    if not config.cluster.colocate or lm.device.type != "cuda":
        return ()
    device = torch.cuda.get_device_properties(lm.device)
    placement = choose_placement(device="cuda", dtype=config.model.dtype, gpus=(device.name,), mps=False)
    return sleep_arguments(
        config.engine.type,
        engine_share(config, folder_shape(lm.source), placement, gpu_bytes=device.total_memory),
    )


def engine_share(config: Config, shape: ModelDims, placement: Placement, *, gpu_bytes: int) -> float:
    """Return the part of a GPU's memory that a server may take beside what the trainer keeps on it."""
    request, ranks = memory_request(config), config.cluster.ranks
    planned = plan_memory(request, shape, placement, gpu_bytes=gpu_bytes, ranks=ranks)
    phases = colocated_memory(planned, keep_weights=keeps_weights(config), gpu_bytes=gpu_bytes)
    share = int(100 * phases.engine_room / gpu_bytes) / 100
    if share < LEAST_SHARE:
        raise ConfigError(
            "'cluster.colocate': the trainer's weights and other models leave a server no room on the GPU: train "
            "adapters with [model.lora], or give the servers a GPU of their own"
        )
    return share


def _then(restart: Callable[[], Awaitable[None]], note: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def restart_and_note() -> None:
        await restart()
        note()

    return restart_and_note
