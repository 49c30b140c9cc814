"""Keep every request that was acknowledged, from its journal entry to its outcome.

A request is journalled, then acknowledged; its outcome is journalled, then its waiters are notified. Outcomes are
numbered in the order in which the journal gets them, and clients poll by these numbers. Lives on one event loop. A poll
that waits is one future in a list, so thousands of them cost their memory only.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import DamageError, HeadraceError, JournalError, RequestError, SamplerGoneError, StorageError
from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.sampling.sample_job import SampleJob
from headrace.service.store.journal import Journal, JournalRow, Statement, finish_request, insert_request
from headrace.service.store.registry import Change, Gone, ServerFault
from headrace.service.training.operations import Operation
from headrace.service.wire.messages import PROTOBUF

JSON = "application/json"
ENTRY_BYTES = 2048  # of a finished request besides its outcome
RETRY_S = 1.0  # until the journal can be written again
BINARY_KINDS = frozenset({"forward_backward", "forward", "sample"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    media: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    message: str
    category: str  # user: the request was wrong; server: we were; gone: what the request was about is no more


Outcome = Done | Failed


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that waits, runs, or finished lately."""

    row: JournalRow
    operation: Operation | SampleJob | None  # the parsed body; None once the request has finished
    accepted: "asyncio.Future[None]"  # resolves when the request is in the journal
    since: float  # by the monotonic clock
    waiters: "list[asyncio.Future[None]]" = field(default_factory=list)
    outcome: Outcome | None = None
    finished: int = 0
    finishing: "asyncio.Task[None] | None" = None  # writes the outcome
    ended: float = 0.0  # by the monotonic clock
    running: bool = False
    replay: bool = False  # finished before a restart; runs again only for what it does to the model


class RequestTable:
    """Look requests up by id, journal them and their outcomes, and wake the waiters for an outcome.

    Finished requests are kept in memory for `keep_s`, as long as they take no more than `keep_bytes` together; later
    polls read them from the journal.
    """

    def __init__(self, journal: Journal, *, keep_bytes: int = 64 * 2**20, keep_s: float) -> None:
        self._journal = journal
        self._open: dict[str, PendingRequest] = {}
        self._recent: OrderedDict[str, PendingRequest] = OrderedDict()
        self._recent_bytes = 0
        self._keep_bytes, self._keep_s = keep_bytes, keep_s
        self._last_finished = self.last_journalled = journal.last_finished()
        self._open_by_owner: Counter[str] = Counter()
        self._bytes_by_owner: Counter[str] = Counter()
        self._watchers: dict[str, list[asyncio.Future[None]]] = {}
        self.num_finished = 0  # since the start
        self.closed = False  # no call waits any longer

    # --- quotas ---

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_by_owner(self) -> dict[str, int]:
        """Count the open requests of every owner who has some."""
        return {owner: count for owner, count in self._open_by_owner.items() if count > 0}

    def check_quota(self, user: ApiUser) -> None:
        """Raise RateLimited when the user's open requests, or their bodies, take all the room of its key."""
        if self._open_by_owner[user.name] >= user.quota.open_requests:
            raise RateLimited(f"this key has {user.quota.open_requests} requests waiting", retry_s=1.0)
        if self._bytes_by_owner[user.name] >= user.quota.open_bytes:
            raise RateLimited(f"this key has requests of {user.quota.open_bytes} bytes waiting", retry_s=1.0)

    @contextlib.contextmanager
    def counted(self, user: ApiUser, size: int) -> Iterator[None]:
        """Count a request of `size` bytes that is answered at once and not journalled. Raises RateLimited."""
        self.check_quota(user)
        self._open_by_owner[user.name] += 1
        self._bytes_by_owner[user.name] += size
        try:
            yield
        finally:
            self._open_by_owner[user.name] -= 1
            self._bytes_by_owner[user.name] -= size

    # --- lookup ---

    def get(self, id: str) -> PendingRequest | None:
        """Return a request that is in memory."""
        return self._open.get(id) or self._recent.get(id)

    def open_requests(self) -> tuple[PendingRequest, ...]:
        return tuple(self._open.values())

    async def load_from_journal(self, id: str) -> PendingRequest | None:
        """Return a finished request that is no longer in memory; without its outcome when that was forgotten."""
        plain = id.isascii() and id.isprintable()  # no other id was ever given out
        rows = await asyncio.wrap_future(self._journal.requests("id = ?", (id,), lenient=True)) if plain else []
        if not rows:
            return None
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.set_result(None)
        return PendingRequest(
            row=rows[0],
            operation=None,
            accepted=accepted,
            since=0.0,
            outcome=outcome_of(rows[0]),
            finished=rows[0].finished,
        )

    # --- a request's way ---

    async def register(
        self, row: JournalRow, operation: Operation | SampleJob, *changes: Change
    ) -> tuple[PendingRequest, bool]:
        """Journal a request with the changes it brings, and return it, and whether it is new; a repeat gets the first
        one."""
        earlier = self.get(row.id)
        if earlier is not None:
            await asyncio.shield(earlier.accepted)
            return earlier, False
        pending = self.restore(row, operation)
        try:
            statements = [insert_request(row), *(change.statement for change in changes)]
            await asyncio.wrap_future(self._journal.write(statements))
        except HeadraceError as exc:
            self._remove_open(row)
            pending.accepted.set_exception(exc)
            pending.accepted.exception()  # retrieved here, so that asyncio does not warn when no call waits
            raise
        for change in changes:
            change.apply()
        pending.accepted.set_result(None)
        return pending, True

    def restore(self, row: JournalRow, operation: Operation | SampleJob | None) -> PendingRequest:
        """Add a request that is in the journal already, or about to be."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(row=row, operation=operation, accepted=accepted, since=time.monotonic())
        self._open[row.id] = pending
        self._open_by_owner[row.owner] += 1
        self._bytes_by_owner[row.owner] += len(row.body or b"")
        return pending

    def _remove_open(self, row: JournalRow) -> None:
        if self._open.pop(row.id, None) is not None:
            self._open_by_owner[row.owner] -= 1
            self._bytes_by_owner[row.owner] -= len(row.body or b"")

    async def finish(self, pending: PendingRequest, outcome: Outcome, *, never_ran: bool = False) -> None:
        """Journal the outcome, as often as it takes, then wake its waiters."""
        while True:
            try:
                return await self.finish_once(pending, outcome, never_ran=never_ran)
            except JournalError:  # logged by the journal; waiters are notified only after the write
                await asyncio.sleep(RETRY_S)

    async def finish_once(
        self,
        pending: PendingRequest,
        outcome: Outcome,
        *,
        changes: Sequence[Change] = (),
        also: Sequence[Statement] = (),
        then: Callable[[], object] = lambda: None,
        never_ran: bool = False,
    ) -> None:
        """Journal the outcome together with what else becomes true, make the changes, call `then`, wake its waiters.

        The first outcome counts. Raises JournalError, and nothing has changed then. A caller that stops waiting does
        not stop it. A request that `never_ran` is not run again for its effects either.
        """
        if pending.outcome is not None:
            return
        if pending.finishing is None:
            writing = self._write_outcome(pending, outcome, changes, also, then, never_ran)
            pending.finishing = asyncio.get_running_loop().create_task(writing)
        await asyncio.shield(pending.finishing)

    async def _write_outcome(
        self,
        pending: PendingRequest,
        outcome: Outcome,
        changes: Sequence[Change],
        also: Sequence[Statement],
        then: Callable[[], object],
        never_ran: bool,
    ) -> None:
        self._last_finished += 1  # with no await before the write: the journal has outcomes in the order of numbers
        finished = self._last_finished
        statement = finish_request(
            pending.row.id,
            state="done" if isinstance(outcome, Done) else "failed",
            result=outcome.body if isinstance(outcome, Done) else _failure_json(outcome),
            finished=finished,
            forget_body=pending.row.kind == "sample",
            never_ran=never_ran,
        )
        try:
            await asyncio.wrap_future(
                self._journal.write([statement, *(change.statement for change in changes), *also])
            )
        finally:
            pending.finishing = None
        self.last_journalled = max(self.last_journalled, finished)
        for change in changes:
            change.apply()
        then()
        self.notify(pending, outcome, finished)

    def notify(self, pending: PendingRequest, outcome: Outcome, finished: int) -> None:
        """Set the outcome and wake its waiters."""
        pending.outcome, pending.finished, pending.operation = outcome, finished, None
        pending.ended = time.monotonic()
        self._remove_open(pending.row)
        pending.row = replace(pending.row, body=None)  # the journal has it, if it is still of use
        self.num_finished += 1
        self._recent[pending.row.id] = pending
        self._recent_bytes += _size(outcome)
        while self._recent_bytes > self._keep_bytes and len(self._recent) > 1:
            self._forget_oldest()
        for waiter in pending.waiters:
            _stop_waiting(waiter)
        pending.waiters.clear()
        for watcher in self._watchers.pop(pending.row.target, ()):
            _stop_waiting(watcher)

    def forget_old(self) -> None:
        """Leave requests that finished more than `keep_s` ago to the journal."""
        before = time.monotonic() - self._keep_s
        while self._recent and next(iter(self._recent.values())).ended < before:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, oldest = self._recent.popitem(last=False)
        assert oldest.outcome is not None
        self._recent_bytes -= _size(oldest.outcome)

    # --- waiting ---

    async def wait(self, pending: PendingRequest, timeout_s: float) -> Outcome | None:
        """Return the outcome, or None when there is none yet after `timeout_s` or when the server closes."""
        if self.closed:
            return None
        if pending.outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            pending.waiters.append(waiter)
            timer = asyncio.get_running_loop().call_later(timeout_s, _stop_waiting, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                if waiter in pending.waiters:
                    pending.waiters.remove(waiter)
        return pending.outcome

    async def watch(self, target: str, timeout_s: float) -> None:
        """Wait until some request of the target has finished, or for `timeout_s`."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.setdefault(target, []).append(watcher)
        timer = asyncio.get_running_loop().call_later(timeout_s, _stop_waiting, watcher)
        try:
            await watcher
        finally:
            timer.cancel()
            if watcher in (watching := self._watchers.get(target, [])):
                watching.remove(watcher)

    def close(self) -> None:
        """Wake all waiters: the server ends."""
        self.closed = True
        waiting = [waiter for pending in self._open.values() for waiter in pending.waiters]
        for waiter in [*waiting, *(watcher for watchers in self._watchers.values() for watcher in watchers)]:
            _stop_waiting(waiter)


def outcome_of(row: JournalRow) -> Outcome | None:
    """Read the outcome of a journalled request; None when there is none, or none any more. What was damaged failed."""
    if row.damage:
        return Failed(message=row.damage, category="server")
    if row.result is None:
        return None
    if row.state == "failed":
        failure = json.loads(row.result)
        return Failed(message=failure["error"], category=failure["category"])
    return Done(media=PROTOBUF if row.kind in BINARY_KINDS else JSON, body=row.result)


def to_failure(exc: HeadraceError, hide: Path | None = None) -> Failed:
    """Say whose fault an error is: the caller's when we refused, ours when foreign code raised it.

    The folder to `hide` is not named.
    """
    foreign = exc.__cause__ is not None and not isinstance(exc.__cause__, HeadraceError)
    ours = isinstance(exc, ServerFault | DamageError | StorageError | JournalError) or foreign
    message = str(exc) if hide is None else str(exc).replace(str(hide), "the server's folder")
    if isinstance(exc, SamplerGoneError | Gone):
        return Failed(message=message, category="gone")
    return Failed(message=message, category="server" if ours and not isinstance(exc, RequestError) else "user")


def done_json(value: object) -> Done:
    return Done(media=JSON, body=json.dumps(value).encode())


def _failure_json(outcome: Failed) -> bytes:
    return json.dumps({"error": outcome.message, "category": outcome.category}).encode()


def _size(outcome: Outcome) -> int:
    """Count the bytes of an outcome and, roughly, of the objects around it."""
    return ENTRY_BYTES + (len(outcome.body) if isinstance(outcome, Done) else len(outcome.message))


def _stop_waiting(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
