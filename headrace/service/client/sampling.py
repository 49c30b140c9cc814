"""Sample from weights that do not change: the base model, a saved checkpoint, or a snapshot of a training client."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from headrace.errors import SamplerError
from headrace.service.client.codec import read_samples, read_scores, write_sample
from headrace.service.client.futures import RequestFuture, RequestStatus, SyncAsyncFuture, promise
from headrace.service.client.training import failed_request
from headrace.service.client.transport import API, Transport
from headrace.types import Completion, FloatArray, IntArray, SamplingParams

T = TypeVar("T")
CLONE_STRIDE = 1_000_000_000  # request numbers for each client of a sampling session
FIRST_TOKEN = SamplingParams(max_tokens=1, stop_tokens=())


class SamplingClient:
    """Samples from one sampling session. Made by `ServiceClient`."""

    def __init__(
        self, transport: Transport, sampler_id: str, *, number: int, context: int, max_open: int = 256
    ) -> None:
        assert max_open > 0
        self.sampler_id = sampler_id
        self.context = context  # of the model, in tokens
        self._transport = transport
        self._limit = asyncio.Semaphore(max_open)
        self._lock = threading.Lock()
        self._seq = number * CLONE_STRIDE  # `number` is this client's own within the sampling session

    def sample(
        self, prompt: IntArray, params: SamplingParams, *, num_samples: int = 1, version: int = 0
    ) -> RequestFuture[tuple[Completion, ...]]:
        """Sample `num_samples` sequences, the first with `params.seed`, the others with hashes of it and their place.
        They are cut where the context ends."""
        room = max(self.context - len(prompt), 1)  # the server refuses a prompt that leaves none
        fitting = replace(params, max_tokens=min(params.max_tokens, room))
        return self._submit(
            prompt, fitting, num_samples, False, lambda response: read_samples(response.content, version=version)
        )

    def logprobs(self, sequence: IntArray) -> RequestFuture[FloatArray]:
        """Return the log-prob of every token given those before it; entry 0 is NaN."""
        return self._submit(sequence, FIRST_TOKEN, 1, True, lambda response: read_scores(response.content))

    def _submit(
        self,
        prompt: IntArray,
        params: SamplingParams,
        num_samples: int,
        score: bool,
        read: Callable[[httpx.Response], T],
    ) -> RequestFuture[T]:
        try:
            body = write_sample(prompt, params, num_samples=num_samples, score=score)
        except SamplerError as exc:
            return failed_request(exc)
        with self._lock:
            seq, self._seq = self._seq, self._seq + 1

        async def send() -> str:
            numbered = {"sampling_session_id": self.sampler_id, "seq_id": seq, **body}
            return str((await self._transport.call(f"{API}/asample", json=numbered)).json()["request_id"])

        return self._transport.submit(self._limit, send, read, error=SamplerError, status=_status)


def _status(request_id: str, finished: "Future[Any]") -> SyncAsyncFuture[RequestStatus]:
    """Return the state as far as the client knows it."""
    state = "queued" if not finished.done() else "done" if finished.exception() is None else "failed"
    future = promise()
    future.set_result(RequestStatus(state=state))
    return SyncAsyncFuture(future)
