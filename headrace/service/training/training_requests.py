"""Accept training requests: check the owner, the session and the quota, journal the request, queue it.

Nothing here waits for the host.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from headrace.errors import RequestError
from headrace.service.http.auth import ApiUser
from headrace.service.requests.admission import RequestAdmission
from headrace.service.requests.request_table import PendingRequest, RequestTable
from headrace.service.requests.sessions import Sessions
from headrace.service.store.entities import ModelEntity
from headrace.service.store.journal import JournalRow
from headrace.service.store.registry import Change, NotFound, Registry
from headrace.service.training.operations import Operation, forward_operation, parse_operation
from headrace.service.training.training_queue import TrainingQueue
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks
from headrace.service.wire.messages import decompress, parse_forward

MAX_SEQ_AHEAD = 1_000_000
SMALL_BYTES = 2**18

A = TypeVar("A")
R = TypeVar("R")


class TrainingRequests:
    """Lives on one event loop. `body_bytes`: the limit of a compressed body."""

    def __init__(
        self,
        registry: Registry,
        requests: RequestTable,
        sessions: Sessions,
        queue: TrainingQueue,
        admission: RequestAdmission,
        *,
        body_bytes: int,
        images: ImageChunks = TEXT_ONLY,
    ) -> None:
        self._registry, self._requests, self._sessions, self._queue = registry, requests, sessions, queue
        self._admission, self._body_bytes, self._images = admission, body_bytes, images

    async def forward_backward(self, user: ApiUser, body: bytes, encoding: str | None) -> PendingRequest:
        """Accept a forward or forward_backward request, a protobuf body."""
        plain = decompress(body, encoding, limit=self._body_bytes * 4)
        message = await _off_loop(len(plain), parse_forward, plain)
        model = self._registry.model(message.model_id, user.name)
        seq = message.seq_id
        if seq < 1:
            raise RequestError("a forward_backward request needs a seq_id from 1 on")
        kind = "forward" if message.forward_only else "forward_backward"
        operation = None
        if not self._requests.get(request_id(model.id, seq)) and not self._queue.is_finished(model.id, seq):
            operation = await _off_loop(len(plain), partial(forward_operation, images=self._images), message)
        return await self.accept(user, model, seq, kind, plain, operation)

    async def submit(self, user: ApiUser, kind: str, model: str, seq: int, body: bytes) -> PendingRequest:
        """Accept another training request, a JSON body."""
        return await self.accept(user, self._registry.model(model, user.name), seq, kind, body)

    async def accept(
        self,
        user: ApiUser,
        model: ModelEntity,
        seq: int,
        kind: str,
        body: bytes,
        operation: Operation | None = None,
        *changes: Change,
    ) -> PendingRequest:
        """Journal and queue a request with the changes it brings; a repeat gets the first one.

        `operation` is the body, if it is parsed already.
        """
        id = request_id(model.id, seq)
        if self._requests.get(id) is None:
            if self._queue.is_finished(model.id, seq):
                return await self.find_repeated(id)
            self._check(user, model, seq)
        row = JournalRow(id=id, target=model.id, seq=seq, kind=kind, owner=user.name, body=body)
        pending, is_new = await self._requests.register(
            row, operation or parse_operation(kind, body, images=self._images), *changes
        )
        if is_new:
            self._queue.enqueue(pending)
        return pending

    def _check(self, user: ApiUser, model: ModelEntity, seq: int) -> None:
        self._sessions.check_open(self._registry.sessions[model.session])
        if model.frozen:
            raise RequestError(f"'{model.id}' holds a copy and cannot be trained: make a new model from its path")
        if not self._queue.is_awaited(model.id, seq):  # one that others wait for is taken, or they would wait for ever
            self._admission.check(user)
        if seq > model.saved_seq + MAX_SEQ_AHEAD:
            raise RequestError(f"seq_id {seq} is too far ahead")

    async def find_repeated(self, id: str) -> PendingRequest:
        """Return a request that was acknowledged before."""
        pending = self._requests.get(id)
        if pending is not None:
            await asyncio.shield(pending.accepted)
            return pending
        model = self._registry.models.get(id.rpartition(":")[0])
        if model is not None and model.frozen:
            raise RequestError(f"'{model.id}' holds a copy: choose another model_seq_id for a new model")
        finished = await self._requests.load_from_journal(id)
        if finished is None:  # its model was forgotten meanwhile
            raise NotFound(f"there is no request '{id}'")
        return finished


def request_id(model: str, seq: int) -> str:
    return f"{model}:{seq}"


async def _off_loop(size: int, parse: Callable[[A], R], body: A) -> R:
    """Parse large bodies on a thread, so that other clients' polls do not wait for them."""
    return parse(body) if size < SMALL_BYTES else await asyncio.to_thread(parse, body)
