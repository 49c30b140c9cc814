"""Train one model at the service. Every verb returns at once; requests run in the order of the calls, exactly once.

A request has the next sequence number of its model. The server runs numbers without gaps, so a number whose request the
server refused is given to a request that does nothing, and a number that never arrived ends the client.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from headrace.errors import BackendError, HeadraceError, NoGradientError
from headrace.service.client.codec import read_forward, read_step, write_forward, write_step
from headrace.service.client.futures import RequestFuture, RequestStatus, SyncAsyncFuture, promise
from headrace.service.client.transport import API, RequestRefused, Transport, Unreachable
from headrace.service.http.evaluation_schemas import Compare, Comparison, Evaluate, Evaluation
from headrace.service.wire.server_inputs import NO_SERVER_INPUTS, ServerInputs
from headrace.types import Adam, Datum, DiscardGradient, ForwardOut, LossSpec, ScaleUpdate, ServedSnapshot, UpdateOut

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Numbers of requests that wait or run."""

    open: int  # of this model
    all_models: int
    sampling: int
    saved: int  # the last sequence number that is in the saved state


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The server's description of a model."""

    base_model: str
    rank: int
    tokenizer: str | None  # the folder or hub name of the tokenizer for clients to load


class TrainingClient:
    """Sends training requests for one model. Made by `ServiceClient`.

    At most `max_open` requests are with the server at a time; more wait here, in order.
    """

    def __init__(
        self, transport: Transport, model_id: str, *, next_number: Callable[[], int], max_open: int = 64
    ) -> None:
        assert max_open > 0
        self.model_id = model_id
        self.transport = transport
        self._limit = asyncio.Semaphore(max_open)
        self._next_number = next_number  # of the session's sampling sessions
        self._lock = threading.Lock()
        self._seq = 0
        self._lost: str | None = None  # why no further request can run

    # --- verbs ---

    def forward(
        self, data: Sequence[Datum], loss: LossSpec, prepare: ServerInputs = NO_SERVER_INPUTS
    ) -> RequestFuture[ForwardOut]:
        """Compute the loss. `prepare` names arrays that the server computes first."""
        return self._forward(data, loss, prepare, backward=False)

    def forward_backward(
        self, data: Sequence[Datum], loss: LossSpec, prepare: ServerInputs = NO_SERVER_INPUTS
    ) -> RequestFuture[ForwardOut]:
        """Accumulate a gradient until the step; a request that fails leaves the gradient as it was."""
        return self._forward(data, loss, prepare, backward=True)

    def optim_step(
        self, update: Adam | DiscardGradient | ScaleUpdate, *, after: Sequence[RequestFuture[ForwardOut]] | None = None
    ) -> RequestFuture[UpdateOut]:
        """Update the weights with the accumulated gradient.

        `after`: the requests whose gradients this step applies. The step is then sent when they have ended, and made
        only if the gradient is complete (see `is_complete`); else the gradient is discarded and NoGradientError raised.
        """
        try:
            body = write_step(update)
        except BackendError as exc:
            return failed_request(exc)
        if after is None:
            return self._post("optim_step", body, lambda response: read_step(response.json()))
        before = tuple(after)
        outcome: list[HeadraceError] = []

        async def body_when_ended() -> dict[str, object]:
            waited = [asyncio.wrap_future(request.finished.future) for request in before]
            ended = await asyncio.gather(*waited, return_exceptions=True)
            errors = [result if isinstance(result, BaseException) else None for result in ended]
            if is_complete([error is None for error in errors]):
                return body
            why = next((f": {error}" for error in errors if error is not None), "")
            outcome.append(NoGradientError(f"optim_step needs a forward_backward before it that succeeded{why}"))
            return write_step(DiscardGradient())

        def read(response: httpx.Response) -> UpdateOut:
            if outcome:
                raise outcome[0]
            return read_step(response.json())

        return self._post("optim_step", body_when_ended, read)

    def save_state(self, name: str) -> RequestFuture[str]:
        """Save weights, optimiser and counters under a name; any client of the same key can load the returned path."""
        return self._post("save_weights", {"path": name}, lambda response: str(response.json()["path"]))

    def load_state(self, path: str, *, optimizer: bool = True) -> RequestFuture[str]:
        body = {"path": path, "optimizer": optimizer}
        return self._post("load_weights", body, lambda response: str(response.json()["path"]))

    def save_for_sampler(self, name: str) -> RequestFuture[str]:
        """Save the weights alone under a name; the path is for `ServiceClient.create_sampling`."""
        return self._post("save_weights_for_sampler", {"path": name}, lambda response: str(response.json()["path"]))

    def snapshot(self) -> RequestFuture[ServedSnapshot]:
        """Copy the weights in their turn, to sample from; later updates do not change the copy."""

        def read(response: httpx.Response) -> ServedSnapshot:
            answer = response.json()
            return ServedSnapshot(sampler=answer["sampling_session_id"], fingerprint=answer["fingerprint"])

        return self._post("save_weights_for_sampler", {"sampling_session_seq_id": self._next_number()}, read)

    # --- questions ---

    def info(self) -> SyncAsyncFuture[ModelInfo]:
        async def ask() -> ModelInfo:
            answer = (await self.transport.call(f"{API}/get_info", json={"model_id": self.model_id})).json()
            tokenizer = answer["model_data"].get("tokenizer_id")
            return ModelInfo(
                base_model=answer["model_name"], rank=int(answer.get("lora_rank") or 0), tokenizer=tokenizer
            )

        return self.transport.spawn(ask())

    def stats(self) -> SyncAsyncFuture[QueueStats]:
        async def ask() -> QueueStats:
            answer = await self.transport.get(f"/runs/{self.model_id}/queue/stats")
            return QueueStats(
                open=answer["waiting_or_running"],
                all_models=answer["all_models"],
                sampling=answer["sampling"],
                saved=answer["saved_seq"],
            )

        return self.transport.spawn(ask())

    def status(self, request_id: str) -> SyncAsyncFuture[RequestStatus]:
        """Ask where a request of this model stands."""

        async def ask() -> RequestStatus:
            answer = await self.transport.get(f"/runs/{self.model_id}/requests/{request_id}/status")
            state = "running" if answer.get("running") else answer["state"]
            return RequestStatus(state=state, position=answer.get("position"), waited_s=answer.get("waited_s"))

        return self.transport.spawn(ask())

    def evaluate(self, request: Evaluate, *, timeout_s: float = 600.0) -> SyncAsyncFuture[Evaluation]:
        """Evaluate the model on prompts or sequences, as it was after its last update."""

        async def ask() -> Evaluation:
            body = request.model_dump(mode="json")
            answer = await self.transport.call(f"/runs/{self.model_id}/evaluate", json=body, timeout_s=timeout_s)
            return Evaluation.model_validate(answer.json())

        return self.transport.spawn(ask())

    def compare(self, request: Compare, *, timeout_s: float = 600.0) -> SyncAsyncFuture[Comparison]:
        """Compare the model with another policy on the same prompts."""

        async def ask() -> Comparison:
            body = request.model_dump(mode="json")
            answer = await self.transport.call(f"/runs/{self.model_id}/compare", json=body, timeout_s=timeout_s)
            return Comparison.model_validate(answer.json())

        return self.transport.spawn(ask())

    # --- sending ---

    def _forward(
        self, data: Sequence[Datum], loss: LossSpec, prepare: ServerInputs, *, backward: bool
    ) -> RequestFuture[ForwardOut]:
        try:
            message = write_forward(data, loss, backward=backward, prepare=prepare)
        except BackendError as exc:
            return failed_request(exc)

        async def send(seq: int) -> str:
            message.model_id, message.seq_id = self.model_id, seq
            body = bytes(message.SerializeToString())
            return _request_id(await self.transport.call(f"{API}/forward_backward", content=body))

        return self._submit(send, lambda response: read_forward(response.content))

    def _post(
        self, verb: str, body: dict[str, object] | Callable[[], Any], read: Callable[[httpx.Response], T]
    ) -> RequestFuture[T]:
        async def send(seq: int) -> str:
            chosen = await body() if callable(body) else body
            return _request_id(
                await self.transport.call(f"{API}/{verb}", json={"model_id": self.model_id, "seq_id": seq, **chosen})
            )

        return self._submit(send, read)

    def _submit(self, send: Callable[[int], Any], read: Callable[[httpx.Response], T]) -> RequestFuture[T]:
        with self._lock:
            self._seq += 1
            seq = self._seq

            async def numbered() -> str:
                if self._lost is not None:
                    raise Unreachable(self._lost)
                try:
                    return str(await send(seq))
                except RequestRefused:
                    await self._fill_number(seq)
                    raise
                except Unreachable as exc:
                    self._lost = (
                        f"request {seq} of this model did not reach the service, so none after it can run: {exc}"
                    )
                    raise

            return self.transport.submit(
                self._limit,
                numbered,
                read,
                error=BackendError,
                status=lambda id, finished: self.status(id),
                lost=lambda: self._lost,
            )

    async def _fill_number(self, seq: int) -> None:
        """Send an empty step under this number, which fails in its turn, so that later numbers can run."""
        try:
            await self.transport.call(f"{API}/optim_step", json={"model_id": self.model_id, "seq_id": seq})
        except (RequestRefused, Unreachable) as exc:
            self._lost = f"the service takes no more requests of this model: {exc}"


def is_complete(succeeded: Sequence[bool]) -> bool:
    """Say whether the accumulated gradient is complete: something accumulated, and nothing failed after it.

    >>> is_complete([True, True]), is_complete([False, True]), is_complete([True, False, True])
    (True, True, False)
    >>> is_complete([False]), is_complete([])
    (False, False)
    """
    first = next((place for place, fine in enumerate(succeeded) if fine), None)
    return first is not None and all(succeeded[first:])


def failed_request(exc: HeadraceError) -> RequestFuture[Any]:
    """Make the future of a request that failed before it was sent."""

    def failed_future() -> "Future[Any]":
        future = promise()
        future.set_exception(exc)
        return future

    def cancel() -> SyncAsyncFuture[bool]:
        future = promise()
        future.set_result(False)
        return SyncAsyncFuture(future)

    return RequestFuture(failed_future(), failed_future(), cancel)


def _request_id(response: httpx.Response) -> str:
    return str(response.json()["request_id"])
