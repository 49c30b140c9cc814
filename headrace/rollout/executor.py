"""Plays groups within the staleness bound and hands them out in batches; synchronous training is its eta = 0.

One event loop owns all state: the ledger counts, admission decides, the runner plays, the buffer keeps, the publisher
makes versions. A background task settles what has ended and starts what may start; all else happens in the caller's
own calls. At eta = 0 nothing starts before a batch is asked for and one task is drawn for each group that was given up,
so which tasks are drawn and which groups are taken depend on the rewards alone, never on the order of completion.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from headrace.algo.staleness import Verdict, token_lags, verdict
from headrace.errors import CheckpointError, DataError, HeadraceError, RolloutError, boundary
from headrace.rollout.admission import Admission, Limit
from headrace.rollout.buffer import ReadyBuffer
from headrace.rollout.filters import Filter, first_rejection
from headrace.rollout.ledger import Drop, Ledger, State
from headrace.rollout.publish import Publisher
from headrace.rollout.runner import Err, Ok, Outcome, TaskRunner
from headrace.types import Group, Task, WeightsHandle

logger = logging.getLogger(__name__)

Play = Callable[[Task, int], Awaitable[Group]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """`max_running` None: as many groups as the staleness bound admits. `grace_s`: how long a cancelled group may
    take to end, and how much later than its timeout the wait for it is given up."""

    max_staleness: int = 0
    max_running: int | None = None
    task_timeout_s: float = 600.0
    max_consecutive_drops: int = 64
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        assert self.max_staleness >= 0
        assert self.max_running is None or self.max_running > 0
        assert self.task_timeout_s > 0
        assert self.max_consecutive_drops > 0
        assert self.grace_s > 0


@dataclass(slots=True)
class _Window:
    """What `metrics` reports besides the ledger's totals, since it was last called."""

    failed_episodes: int = 0
    lag_total: int = 0
    lag_tokens: int = 0
    lag_max: int = 0


class RolloutExecutor:
    """Use as `async with executor:`; leaving it cancels what runs and counts what was live as dropped (shutdown)."""

    def __init__(
        self,
        *,
        play: Play,
        next_task: Callable[[], Task],
        batch_groups: int,
        settings: AsyncSettings,
        publisher: Publisher,
        filters: Sequence[Filter] = (),
        limits: Sequence[Limit] = (),
    ) -> None:
        assert batch_groups > 0
        self._play = play
        self._next_task = next_task
        self._batch_groups = batch_groups
        self._settings = settings
        self._publisher = publisher
        self._filters = tuple(filters)
        self._ledger = Ledger()
        self._admission = Admission(
            batch_groups=batch_groups,
            max_staleness=settings.max_staleness,
            max_running=settings.max_running,
            limits=tuple(limits),
        )
        self._runner = TaskRunner(timeout_s=settings.task_timeout_s)
        self._ready = ReadyBuffer(max_groups=(settings.max_staleness + 1) * batch_groups)
        self._settler: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._waiting = False  # inside take_batch
        self._publishing = False
        self._failure: HeadraceError | None = None  # ends the run at the next take_batch
        self._source_failure: HeadraceError | None = None  # ends it once what has been started is used up
        self._drops_in_a_row: Counter[str] = Counter()
        self._last_error = ""
        self._window = _Window()
        self._reported: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._publisher.version

    # --- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        assert self._settler is None, "an executor is entered once"
        self._settler = asyncio.create_task(self._settle_forever(), name="rollout-settler")
        self._settler.add_done_callback(lambda _: self._progress.set())  # its death wakes who waits for a batch
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._settler is not None
        self._admission.paused = True
        self._settler.cancel()
        stuck = await self._runner.close(timeout_s=self._settings.grace_s)
        if stuck:
            logger.warning("groups %s did not end within %g s of being cancelled", stuck, self._settings.grace_s)
        for ticket in self._ledger.tickets(*State):
            self._ledger.drop(ticket.id, Drop.SHUTDOWN)
        self._ready.take(len(self._ready))
        (died,) = await asyncio.gather(self._settler, return_exceptions=True)
        if error is None and isinstance(died, Exception):
            raise died

    def pause(self) -> None:
        """No group starts until `resume`; those that run go on and are collected."""
        self._admission.paused = True

    def resume(self) -> None:
        self._admission.paused = False
        self._admit()

    # --- the trainer's side --------------------------------------------------------------------------------------

    async def take_batch(self) -> tuple[Group, ...]:
        """Exactly `batch_groups` groups that are fresh enough, oldest first; they are in training until `done`.

        Raises RolloutError with the cause after `max_consecutive_drops` groups in a row were given up, when the task
        source or a filter fails, or when nothing ends although its timeout has passed.
        """
        assert self._settler is not None, "use `async with executor:`"
        assert not self._waiting, "one batch is taken at a time"
        assert not self._publishing, "a batch is taken after the weights were published"
        self._publisher.check()
        self._waiting = True
        try:
            self._admit()
            while not self._batch_is_ready():
                await self._wait_for_progress()
            groups = self._ready.take(self._batch_groups)
            self._ledger.take(group.id for group in groups)
        finally:
            self._waiting = False
        self._note_lags(groups)
        return groups

    def done(self, groups: Sequence[Group]) -> None:
        """The batch has been trained on, as a whole; after half of one, groups could start that are stale in time."""
        self._ledger.consume(group.id for group in groups)
        assert not self._ledger.counts.training, "a batch is done as a whole"

    async def publish(self, handle: WeightsHandle) -> None:
        """Pause every sampler, load, version + 1, drop what became stale, resume. Raises RolloutError."""
        assert not self._waiting, "weights are published between batches"
        self._publishing = True
        try:
            async with self._publisher.publish(handle):
                self._sweep()
        except RolloutError as exc:
            self._failure = exc  # samplers may hold different weights: no further batch
            raise
        finally:
            self._publishing = False
        self._admit()

    async def catch_up(self, handle: WeightsHandle) -> None:
        """After `load_state_dict`: give fresh samplers the weights of the restored version."""
        await self._publisher.catch_up(handle)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, lag of the tokens taken since then, and how many groups run and wait now."""
        totals, counts, window = self._ledger.totals, self._ledger.counts, self._window
        since = {name: float(total - self._reported.get(name, 0)) for name, total in totals.items()}
        self._reported, self._window = totals, _Window()
        values = since | {
            "failed_episodes": float(window.failed_episodes),
            "running": float(counts.running),
            "ready": float(counts.ready),
            "lag_mean": window.lag_total / window.lag_tokens if window.lag_tokens else 0.0,
            "lag_max": float(window.lag_max),
            "version": float(self.version),
        }
        return {f"rollout/{name}": value for name, value in values.items()}

    # --- checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-like. Cut it at the publish barrier; groups that run or train then are dropped when it is loaded."""
        return {
            "version": self.version,
            "ledger": self._ledger.state_dict(),
            "ready": self._ready.state_dict(),
            "reported": self._reported,
            "window": asdict(self._window),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when `state` is not what `state_dict` wrote."""
        assert self._settler is None, "a state is loaded before the executor is entered"
        with boundary(CheckpointError, "the rollout state in the checkpoint cannot be read"):
            self._ledger.load_state_dict(state["ledger"])
            self._ready.load_state_dict(state["ready"])
            self._publisher.version = int(state["version"])
            self._reported = {str(name): int(total) for name, total in state["reported"].items()}
            self._window = _Window(**state["window"])
            ready = [ticket.id for ticket in self._ledger.tickets(State.READY)]
            if ready != sorted(group.id for group in self._ready):
                raise CheckpointError(f"the ledger lists the ready groups {ready} and other groups are stored")
        for ticket in self._ledger.tickets(State.RUNNING, State.TRAINING):
            self._ledger.drop(ticket.id, Drop.RESUME)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _settle_forever(self) -> None:
        while True:
            for outcome in await self._runner.outcomes():
                self._settle(outcome)
            self._admit()
            self._progress.set()

    def _admit(self) -> None:
        """Start as many groups as may start now."""
        closed = self._settler is None or self._publishing
        if closed or self._failure is not None or self._source_failure is not None:
            return
        batch_open = self._waiting or self._ledger.counts.training > 0
        for _ in range(self._admission.capacity(self._ledger.counts, batch_open=batch_open)):
            try:
                with boundary(DataError, "the task source has no further task"):
                    task = self._next_task()
            except HeadraceError as exc:
                self._source_failure = exc
                return
            ticket = self._ledger.start(task.id, version=self.version)
            self._runner.spawn(ticket.id, partial(self._play, task, ticket.id))

    def _settle(self, outcome: Outcome) -> None:
        """A group has ended: it becomes ready, or is dropped for a reason."""
        match outcome:
            case Err(id=id, reason=reason, text=text):
                self._give_up(id, reason, text)
            case Ok(id=id, group=played):
                assert played.id == id, f"group {id} came back as {played.id}"
                group = replace(played, started_version=self._ledger.ticket(id).started_version)
                self._window.failed_episodes += len(group.failed)
                try:
                    rejection = None if _too_few(group) else first_rejection(self._filters, group)
                except HeadraceError as exc:  # a filter that raises cannot be worked around by playing more groups
                    self._failure = self._failure or exc
                    self._ledger.drop(id, Drop.FAILED)
                    return
                if _too_few(group):
                    self._give_up(id, Drop.FAILED, _why_failed(group))
                elif rejection is not None:
                    self._give_up(id, f"filtered_{rejection.reason}", "")
                elif self._decide(group) is Verdict.DROP:
                    self._ledger.drop(id, Drop.STALE)
                else:
                    self._ledger.ready(id)
                    self._ready.put(group)
                    self._drops_in_a_row.clear()

    def _give_up(self, id: int, reason: str, text: str) -> None:
        """Drop a group that is of no use; too many in a row end the run."""
        logger.debug("group %d dropped (%s): %s", id, reason, text)
        self._ledger.drop(id, reason)
        self._drops_in_a_row[reason] += 1
        self._last_error = text or self._last_error
        total = self._drops_in_a_row.total()
        if total < self._settings.max_consecutive_drops or self._failure is not None:
            return
        most = ", ".join(f"{reason} {count} times" for reason, count in self._drops_in_a_row.most_common())
        last = f"; the last error was: {self._last_error}" if self._last_error else ""
        self._failure = RolloutError(
            f"{total} groups in a row were of no use ({most}){last}. "
            "Change the tasks, the reward or the filters, or raise max_consecutive_drops"
        )

    def _batch_is_ready(self) -> bool:
        """Sweeps first; raises what makes a batch impossible."""
        assert self._settler is not None
        if self._settler.done():
            self._settler.result()
        if self._failure is not None:
            raise RolloutError(str(self._failure)) from self._failure
        self._sweep()
        enough = len(self._ready) >= self._batch_groups
        if not enough and self._source_failure is not None and not self._ledger.counts.running:
            raise self._source_failure
        return enough

    async def _wait_for_progress(self) -> None:
        """Something ends within its timeout; when nothing does, say what is being waited for."""
        self._progress.clear()
        patience_s = self._settings.task_timeout_s + self._settings.grace_s
        try:
            async with asyncio.timeout(patience_s):
                await self._progress.wait()
        except TimeoutError as exc:
            running = self._ledger.tickets(State.RUNNING)
            shown = ", ".join(f"group {ticket.id} of task {ticket.task_id}" for ticket in running[:8]) or "nothing"
            more = f" and {len(running) - 8} more" if len(running) > 8 else ""
            paused = " (starting groups is paused)" if self._admission.paused else ""
            raise RolloutError(
                f"{len(self._ready)} of {self._batch_groups} groups are ready and none ended for {patience_s:g} s; "
                f"still running: {shown}{more}{paused}: they do not react to being cancelled, or nothing may start"
            ) from exc

    def _decide(self, group: Group) -> Verdict:
        return verdict(group, version=self.version, max_staleness=self._settings.max_staleness)

    def _sweep(self) -> None:
        """Drop ready groups that have become too old, which frees their slots."""
        stale = self._ready.sweep(self._decide)
        for group in stale:
            self._ledger.drop(group.id, Drop.STALE)
        if stale:
            self._admit()

    def _note_lags(self, groups: Sequence[Group]) -> None:
        for group in groups:
            lags = token_lags(group, version=self.version)
            assert not len(lags) or int(lags.max()) <= self._settings.max_staleness, "a stale token was taken"
            self._window.lag_total += int(lags.sum())
            self._window.lag_tokens += len(lags)
            self._window.lag_max = max(self._window.lag_max, int(lags.max(initial=0)))


def _too_few(group: Group) -> bool:
    """A group of several needs two valid episodes to be compared; a group of one needs that one."""
    return len(group.episodes) < min(2, len(group.episodes) + len(group.failed)) or not group.episodes


def _why_failed(group: Group) -> str:
    """The most frequent reason among its failed episodes."""
    reasons = Counter(failed.reason for failed in group.failed)
    return reasons.most_common(1)[0][0] if reasons else f"group {group.id} came back without episodes"
