"""Answer questions about requests that were accepted: find one, wait for its outcome, list finished ones, cancel."""

import asyncio

from headrace.errors import RequestError
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser
from headrace.service.requests.request_table import Outcome, PendingRequest, RequestTable
from headrace.service.sampling.sampling_queue import SamplingQueue
from headrace.service.store.journal import Journal, JournalRow
from headrace.service.store.registry import Gone, NotFound, Registry
from headrace.service.training.training_queue import TrainingQueue

CLONE_STRIDE = 1_000_000_000  # sequence numbers of one clone of a sampling client
FINISHED = "target = ? AND seq >= ? AND seq < ? AND state != 'queued' AND finished > ?"


class Polling:
    """Lives on one event loop. `poll_s`: the longest wait."""

    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        requests: RequestTable,
        training: TrainingQueue,
        sampling: SamplingQueue,
        *,
        poll_s: float,
    ) -> None:
        self._registry, self._journal, self._requests = registry, journal, requests
        self._training, self._sampling, self._poll_s = training, sampling, poll_s

    async def find(self, user: ApiUser, id: str) -> PendingRequest:
        """Return a request of the user's; raises NotFound, or Gone when the outcome was forgotten."""
        pending = self._requests.get(id) or await self._requests.load_from_journal(id)
        if pending is None or pending.row.owner != user.name:
            raise NotFound(f"there is no request '{id}'")
        if pending.outcome is None and pending.row.state != "queued":
            raise Gone(f"the outcome of '{id}' was not fetched in time and is forgotten")
        return pending

    async def wait(self, pending: PendingRequest) -> Outcome | None:
        """Return the outcome, or None when it has not come in time."""
        return await self._requests.wait(pending, self._poll_s)

    async def list_finished(self, user: ApiUser, body: schemas.RetrieveFutures) -> tuple[list[JournalRow], int]:
        """List requests of one client of a sampling session that finished after the cursor; waits for the first.

        Returns the requests and the new cursor.
        """
        sampler = self._registry.sampler(body.target.sampling_session_id, user.name)
        first = body.target.cloned_sampler_id * CLONE_STRIDE
        if not 0 <= first < 2**63 - CLONE_STRIDE or not -(2**63) <= body.prev_cursor < 2**63:
            raise RequestError("cloned_sampler_id or prev_cursor is out of range")
        timeout_s = self._poll_s if body.timeout is None else min(max(body.timeout, 0.0), self._poll_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        arguments = (sampler.id, first, first + CLONE_STRIDE, body.prev_cursor)
        while True:
            rows = await asyncio.wrap_future(self._journal.requests(FINISHED, arguments, lenient=True))
            left_s = deadline - asyncio.get_running_loop().time()
            if rows or left_s <= 0 or self._requests.closed:
                return rows, max((row.finished for row in rows), default=body.prev_cursor)
            await self._requests.watch(sampler.id, left_s)

    async def cancel(self, user: ApiUser, id: str) -> bool:
        """Keep queued work from starting and stop running sampling; False when it is too late."""
        pending = await self.find(user, id)
        if pending.outcome is not None:
            return False
        if pending.row.kind != "sample":
            return await self._training.cancel(pending)
        await self._sampling.cancel(pending)
        return True
