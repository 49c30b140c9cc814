"""Adapt the service to the package's `TrainBackend` and `Sampler` protocols.

This file adds what the protocols promise and the wire does not: a step waits until its gradients are known to be
complete, a state in a folder is a file that names the checkpoint at the server, a version is a snapshot. What the
service cannot do is refused by name: functions as losses, reversible updates, scores at a temperature.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from headrace.algo.random import derive_seed
from headrace.config.paths import SERVICE_STATE
from headrace.errors import BackendError, NoGradientError, SamplerError, boundary
from headrace.process.watchdog import Activity, watching
from headrace.service.client.futures import RequestFuture
from headrace.service.client.sampling import SamplingClient
from headrace.service.client.session import ServiceClient
from headrace.service.client.training import TrainingClient, failed_request
from headrace.service.store.entities import CheckpointKind, checkpoint_path
from headrace.types import (
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    SampleRequest,
    ScaleUpdate,
    ServedSnapshot,
    StopReason,
    UpdateOut,
    WeightsHandle,
    float_array,
    int_array,
    known_next_logprobs,
)

POINTER = SERVICE_STATE
T = TypeVar("T")


class _OpenRequests:
    """Lets the watchdog see requests whose answers somebody waits for; every answer is progress for all."""

    def __init__(self) -> None:
        self._open: set[Activity] = set()

    def watch(self, what: str, future: "Future[T]") -> "Future[T]":
        if future.done():
            return future
        entered = contextlib.ExitStack()
        activity = entered.enter_context(watching(f"the service: {what}"))
        self._open.add(activity)

        def end(_: object) -> None:
            self._open.discard(activity)
            entered.close()
            for other in tuple(self._open):
                other.beat()

        future.add_done_callback(end)
        return future


class ServiceBackend:
    """A `TrainBackend` over the service.

    A service that answers polls and never with a result is a stall of the run that waits (`headrace.process.watchdog`).
    If a request fails after others have added to a gradient, the step fails with NoGradientError and the whole
    gradient is discarded, also what was added after the failure.
    """

    def __init__(self, client: TrainingClient) -> None:
        self.client = client
        self._gradients: list[RequestFuture[ForwardOut]] = []
        self._saved: dict[Path, str] = {}  # paths at the server
        self._num_saved = 0
        self._watch = _OpenRequests().watch

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._watch("forward", self.client.forward(data, loss).finished.future)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        request = self.client.forward_backward(data, loss)
        self._gradients.append(request)
        return self._watch("forward_backward", request.finished.future)

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        if isinstance(update, ScaleUpdate):
            return self.client.optim_step(update).finished.future  # refused
        gradients, self._gradients = self._gradients, []
        if isinstance(update, DiscardGradient):
            return self.client.optim_step(update).finished.future
        if not gradients:
            return failed_request(NoGradientError("optim_step needs a forward_backward before it")).finished.future
        return self._watch("optim_step", self.client.optim_step(update, after=gradients).finished.future)

    def save_state(self, folder: Path) -> "Future[None]":
        """Save the state at the server, and write its path there into a file in the folder."""
        self._num_saved += 1
        name = f"{re.sub(r'[^A-Za-z0-9_]+', '-', folder.name).strip('-')[:80]}-{self._num_saved:06d}"
        saving = self.client.save_state(f"state-{name}")
        self._saved[folder.resolve()] = checkpoint_path(self.client.model_id, CheckpointKind.TRAINING, f"state-{name}")

        async def point() -> None:
            path = await asyncio.wrap_future(saving.finished.future)
            with boundary(BackendError, f"{folder} cannot be written"):
                await asyncio.to_thread(_write_pointer, folder, path)

        return self._watch("save_state", self.client.transport.spawn(point()).future)

    def load_state(self, folder: Path) -> "Future[None]":
        """Load a state that this client, or another of the same key, saved into the folder."""
        return self._load(folder, optimizer=True)

    def start_from(self, folder: Path) -> "Future[None]":
        """Load the weights of a saved state, with a new optimiser."""
        return self._load(folder, optimizer=False)

    def _load(self, folder: Path, *, optimizer: bool) -> "Future[None]":
        try:
            path = self._saved.get(folder.resolve()) or read_pointer(folder)
        except BackendError as exc:
            return failed_request(exc).finished.future
        if self._gradients:
            self.optim_step(DiscardGradient())
        loading = self.client.load_state(path, optimizer=optimizer)

        async def load() -> None:
            await asyncio.wrap_future(loading.finished.future)

        return self._watch("load_state", self.client.transport.spawn(load()).future)

    def export_weights(self) -> "Future[WeightsHandle]":
        return self._watch("snapshot", cast("Future[WeightsHandle]", self.client.snapshot().finished.future))


def _write_pointer(folder: Path, path: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POINTER).write_text(json.dumps({"path": path}))


def read_pointer(folder: Path) -> str:
    """Read the server's path of the state that was saved into this folder; raises BackendError."""
    if not (folder / POINTER).is_file():
        raise BackendError(f"{folder} holds no state of this backend: it has no {POINTER}")
    with boundary(BackendError, f"{folder / POINTER} cannot be read"):
        return str(json.loads((folder / POINTER).read_text())["path"])


class ServiceSampler:
    """A `Sampler` over the service; `load` switches to another snapshot. Belongs to the event loop that calls it.

    An interrupted call returns what it was to continue: the server returns no unfinished sequences.
    """

    scores_any_temperature = False

    def __init__(self, service: ServiceClient, client: SamplingClient) -> None:
        self._service = service
        self._client = client
        self._version = 0
        self._open = 0
        self._running, self._idle, self._interrupted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._running.set()
        self._idle.set()

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest) -> Completion:
        if request.params.temperature != 1.0:
            raise SamplerError("the service tells log-probs of one distribution only: sample at temperature 1")
        if request.images:
            raise SamplerError("pictures are not sent to a service: sample on this machine")
        done = request.continue_from
        num_done = 0 if done is None else len(done.tokens)
        await self._running.wait()
        if num_done >= request.params.max_tokens and done is not None:
            return replace(done, stop=StopReason.LENGTH, prefix_logprobs=None)
        prompt = request.prompt if done is None else int_array(np.concatenate([request.prompt, done.tokens]))
        seed = (
            derive_seed(request.params.seed, num_done) if num_done else request.params.seed
        )  # not the same draws again
        params = replace(request.params, max_tokens=request.params.max_tokens - num_done, seed=seed)
        pending = self._client.sample(prompt, params, version=self._version)
        with self._counted():
            drawn = await self._result_or_interrupt(pending)
        return _append(done, drawn[0] if drawn else None)

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        if temperature != 1.0:
            raise SamplerError("the service scores at temperature 1 only")
        requests = [self._client.logprobs(sequence) for sequence in sequences]
        with watching("the service: log-probs of sequences") as activity:
            scores = []
            for request in requests:
                scores.append(await request.finished)
                activity.beat()
        return tuple(scores)

    async def load(self, handle: WeightsHandle, version: int) -> str:
        if self._open:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        if not isinstance(handle, ServedSnapshot):
            raise SamplerError("the service samples from its own snapshots only: publish what its client exports")
        self._client = await self._service.create_sampling(snapshot=handle)
        self._version = version
        return handle.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._running.clear()
        if interrupt:
            self._interrupted.set()
        await self._idle.wait()
        self._interrupted.clear()

    async def resume(self) -> None:
        self._running.set()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _result_or_interrupt(self, pending: RequestFuture[tuple[Completion, ...]]) -> tuple[Completion, ...]:
        """Return what was sampled, or () if an interrupt came first, which cancels the request."""
        finished: asyncio.Future[Any] = asyncio.wrap_future(pending.finished.future)
        interrupted: asyncio.Future[Any] = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait([finished, interrupted], return_when=asyncio.FIRST_COMPLETED)
            return tuple(finished.result()) if finished.done() else ()
        finally:
            interrupted.cancel()
            if not finished.done():
                finished.cancel()
                pending.cancel()


def _append(done: Completion | None, more: Completion | None) -> Completion:
    """Append `more` to the completion it continues. If `more` is None, return that completion as interrupted."""
    tail = more or _empty_completion(StopReason.INTERRUPTED)
    if done is None:
        return tail
    return Completion(
        tokens=int_array(np.concatenate([done.tokens, tail.tokens])),
        sampler_logprobs=float_array(np.concatenate([done.sampler_logprobs, tail.sampler_logprobs])),
        raw_logprobs=float_array(np.concatenate([done.raw_logprobs, tail.raw_logprobs])),
        versions=int_array(np.concatenate([done.versions, tail.versions])),
        stop=tail.stop,
        next_logprobs=known_next_logprobs(done, len(done.tokens) + len(tail.tokens)),
    )


def _empty_completion(stop: StopReason) -> Completion:
    none = float_array([])
    return Completion(tokens=int_array([]), sampler_logprobs=none, raw_logprobs=none, versions=int_array([]), stop=stop)
