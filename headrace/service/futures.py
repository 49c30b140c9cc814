"""Promises: a request is journalled, then acknowledged; its outcome is journalled, then told to whoever waits.

Lives on one event loop. A poll that waits is one future in a list, so thousands of them cost their memory only.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, JournalError, RequestError, SamplerGoneError
from headrace.service.journal import Journal, JournalRow, Statement, finish_request, insert_request
from headrace.service.registry import Gone, ServerFault
from headrace.service.wire import PROTOBUF

JSON = "application/json"
RETRY_S = 1.0  # until the journal can be written again
BINARY_KINDS = frozenset({"forward_backward", "forward", "sample"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    media: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`category`: user, when the request was wrong; server, when we were; gone, when what it was about is no more."""

    message: str
    category: str


Outcome = Done | Failed


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that has not ended, or has ended lately. `work` is its body made ready."""

    row: JournalRow
    work: Any
    accepted: "asyncio.Future[None]"
    since: float
    waiters: "list[asyncio.Future[None]]" = field(default_factory=list)
    outcome: Outcome | None = None
    finished: int = 0
    running: bool = False
    replay: bool = False  # it has ended before; run again only for what it does to the model


class RequestTable:
    """All tickets by id; outcomes beyond `keep_bytes` are read from the journal again."""

    def __init__(self, journal: Journal, *, keep_bytes: int = 256 * 2**20) -> None:
        self._journal = journal
        self._open: dict[str, PendingRequest] = {}
        self._recent: OrderedDict[str, PendingRequest] = OrderedDict()
        self._recent_bytes = 0
        self._keep_bytes = keep_bytes
        self._last_finished = 0
        self._open_by_owner: Counter[str] = Counter()
        self._bytes_by_owner: Counter[str] = Counter()
        self._watchers: dict[str, list[asyncio.Future[None]]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_open_of(self, owner: str) -> int:
        return self._open_by_owner[owner]

    def open_bytes_of(self, owner: str) -> int:
        """Of bodies that wait."""
        return self._bytes_by_owner[owner]

    @contextlib.contextmanager
    def held(self, owner: str, size: int) -> Iterator[None]:
        """A request that no ticket is made for counts as one of its owner's, inside."""
        self._open_by_owner[owner] += 1
        self._bytes_by_owner[owner] += size
        try:
            yield
        finally:
            self._open_by_owner[owner] -= 1
            self._bytes_by_owner[owner] -= size

    def get(self, id: str) -> PendingRequest | None:
        return self._open.get(id) or self._recent.get(id)

    def open_requests(self) -> tuple[PendingRequest, ...]:
        return tuple(self._open.values())

    async def register(self, row: JournalRow, work: Any, *also: Statement) -> tuple[PendingRequest, bool]:
        """The ticket of a request once it is on disk, and whether it is a new one; a repeat gets the first one's."""
        known = self.get(row.id)
        if known is not None:
            await asyncio.shield(known.accepted)
            return known, False
        pending = self.restore(row, work)
        try:
            await asyncio.wrap_future(self._journal.write([insert_request(row), *also]))
        except HeadraceError as exc:
            self._leave(row)
            pending.accepted.set_exception(exc)
            pending.accepted.exception()  # whoever waits gets it; nobody waiting is no fault
            raise
        pending.accepted.set_result(None)
        return pending, True

    def restore(self, row: JournalRow, work: Any) -> PendingRequest:
        """A ticket for a request that needs none of the journal's time, or is in it already."""
        pending = PendingRequest(
            row=row, work=work, accepted=asyncio.get_running_loop().create_future(), since=time.time()
        )
        self._open[row.id] = pending
        self._open_by_owner[row.owner] += 1
        self._bytes_by_owner[row.owner] += len(row.body or b"")
        return pending

    def _leave(self, row: JournalRow) -> None:
        if self._open.pop(row.id, None) is not None:
            self._open_by_owner[row.owner] -= 1
            self._bytes_by_owner[row.owner] -= len(row.body or b"")

    async def finish(self, pending: PendingRequest, outcome: Outcome, also: Sequence[Statement] = ()) -> None:
        """Journal the outcome together with what else became true, then wake whoever waits."""
        if pending.outcome is not None:
            return
        finished = self._next_moment()
        result = outcome.body if isinstance(outcome, Done) else _failure(outcome)
        state = "done" if isinstance(outcome, Done) else "failed"
        forget = pending.row.kind == "sample"
        statement = finish_request(pending.row.id, state=state, result=result, finished=finished, forget_body=forget)
        while True:
            try:
                await asyncio.wrap_future(self._journal.write([statement, *also]))
                break
            except JournalError:  # logged by the journal; nothing is told before it is written
                await asyncio.sleep(RETRY_S)
        self.notify(pending, outcome, finished)

    def notify(self, pending: PendingRequest, outcome: Outcome, finished: int) -> None:
        pending.outcome, pending.finished, pending.work = outcome, finished, None
        self._leave(pending.row)
        self._recent[pending.row.id] = pending
        self._recent_bytes += _size(outcome)
        while self._recent_bytes > self._keep_bytes and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            assert oldest.outcome is not None
            self._recent_bytes -= _size(oldest.outcome)
        for waiter in pending.waiters:
            _stop_waiting(waiter)
        pending.waiters.clear()
        for watcher in self._watchers.pop(pending.row.target, ()):
            _stop_waiting(watcher)

    async def wait(self, pending: PendingRequest, timeout_s: float) -> Outcome | None:
        """The outcome, or None when it has not come by then."""
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
        """Until some request of the target has ended, or so long."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.setdefault(target, []).append(watcher)
        timer = asyncio.get_running_loop().call_later(timeout_s, _stop_waiting, watcher)
        try:
            await watcher
        finally:
            timer.cancel()
            if watcher in (watching := self._watchers.get(target, [])):
                watching.remove(watcher)

    def wake_all(self) -> None:
        """Nobody waits any longer: the server ends."""
        waiting = [waiter for pending in self._open.values() for waiter in pending.waiters]
        for waiter in [*waiting, *(watcher for watchers in self._watchers.values() for watcher in watchers)]:
            _stop_waiting(waiter)

    async def load_from_journal(self, id: str) -> tuple[JournalRow, Outcome | None] | None:
        """An ended request from the journal; its outcome is None when it was forgotten."""
        plain = id.isascii() and id.isprintable()  # no other id was ever given out
        rows = await asyncio.wrap_future(self._journal.requests("id = ?", (id,))) if plain else []
        if not rows:
            return None
        return rows[0], outcome_of(rows[0])

    def _next_moment(self) -> int:
        """Microseconds, and never the same twice: the order of completions, also over restarts."""
        self._last_finished = max(self._last_finished + 1, time.time_ns() // 1000)
        return self._last_finished


def outcome_of(row: JournalRow) -> Outcome | None:
    if row.result is None:
        return None
    if row.state == "failed":
        told = json.loads(row.result)
        return Failed(message=told["error"], category=told["category"])
    return Done(media=PROTOBUF if row.kind in BINARY_KINDS else JSON, body=row.result)


def failed(exc: HeadraceError, hide: Path | None = None) -> Failed:
    """A refusal is the caller's doing, what came out of foreign code is ours; the folder to `hide` is not named."""
    foreign = exc.__cause__ is not None and not isinstance(exc.__cause__, HeadraceError)
    ours = isinstance(exc, ServerFault) or foreign
    message = str(exc) if hide is None else str(exc).replace(str(hide), "the server's folder")
    if isinstance(exc, SamplerGoneError | Gone):
        return Failed(message=message, category="gone")
    return Failed(message=message, category="server" if ours and not isinstance(exc, RequestError) else "user")


def done_json(value: object) -> Done:
    return Done(media=JSON, body=json.dumps(value).encode())


def _failure(outcome: Failed) -> bytes:
    return json.dumps({"error": outcome.message, "category": outcome.category}).encode()


def _size(outcome: Outcome) -> int:
    return len(outcome.body) if isinstance(outcome, Done) else len(outcome.message)


def _stop_waiting(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
