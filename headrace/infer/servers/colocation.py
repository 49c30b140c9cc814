"""Put inference servers to sleep while a trainer uses their GPUs, and wake them: routes, bodies and launch options.

A server that sleeps frees its keys and values. Its weights are dropped too, if the next thing it gets is a whole new
set of them; otherwise vLLM moves them to host memory, and SGLang keeps them on the GPU.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.errors import SamplerError
from headrace.infer.servers.json_http import JsonHttp

SLEEP_S = 600.0
WEIGHTS, KV_CACHE = "weights", "kv_cache"


class ServerMemory(Protocol):
    """The GPU memory of one idle server. Both verbs may be called twice. They raise SamplerError."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free keys and values, and the weights, which are dropped unless they are to be kept."""

    async def wake(self) -> None:
        """Take the memory again: first the weights, then keys and values. The server then runs."""


class VllmMemory:
    """Implements `ServerMemory` for vLLM 0.32 started with `--enable-sleep-mode`; on CPU sleeping is only a pause."""

    def __init__(self, url: str) -> None:
        self._http = JsonHttp(url, silence_s=SLEEP_S)
        self._asleep = False

    async def sleep(self, *, keep_weights: bool) -> None:
        if self._asleep:
            return
        level = 1 if keep_weights else 2
        await self._http.post(f"/sleep?level={level}&mode=abort", deadline_s=SLEEP_S)
        if not await self._is_sleeping():
            raise SamplerError(
                f"{self._http.url} does not sleep although it said so: start it with --enable-sleep-mode"
            )
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False
        if not await self._is_sleeping():
            return  # it was started again meanwhile
        reply: Any = None
        for tag in (WEIGHTS, KV_CACHE):  # one after the other: weights are the larger allocation
            reply = await self._http.post(f"/wake_up?tags={tag}", deadline_s=SLEEP_S)
        if not isinstance(reply, Mapping) or reply.get("status") != "awake":
            raise SamplerError(f"{self._http.url} did not wake up: {reply}")

    async def _is_sleeping(self) -> bool:
        reply = await self._http.get("/is_sleeping", deadline_s=SLEEP_S)
        return isinstance(reply, Mapping) and reply.get("is_sleeping") is True


class SglangMemory:
    """Implements `ServerMemory` for SGLang 0.5.23 started with `--enable-memory-saver`. Not run against an engine."""

    def __init__(self, url: str) -> None:
        self._http = JsonHttp(url, silence_s=SLEEP_S)
        self._released: tuple[str, ...] = ()

    async def sleep(self, *, keep_weights: bool) -> None:
        if self._released:
            return
        tags = (KV_CACHE,) if keep_weights else (KV_CACHE, WEIGHTS)
        await self._http.post("/release_memory_occupation", {"tags": list(tags)}, deadline_s=SLEEP_S)
        self._released = tags

    async def wake(self) -> None:
        released, self._released = self._released, ()
        for tag in (WEIGHTS, KV_CACHE):
            if tag in released:
                await self._http.post("/resume_memory_occupation", {"tags": [tag]}, deadline_s=SLEEP_S)

    def was_started_again(self) -> None:
        """Note that a new process holds all of its memory; SGLang has no route that tells."""
        self._released = ()


def sleep_arguments(kind: str, share: float) -> tuple[str, ...]:
    """Return the launch options of a server that can sleep and may take this share of a GPU's memory."""
    if kind == "vllm":
        return ("--enable-sleep-mode", "--gpu-memory-utilization", f"{share:.2f}")
    return ("--enable-memory-saver", "--mem-fraction-static", f"{share:.2f}")
