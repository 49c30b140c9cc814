"""Plays groups within the staleness bound and hands them out in batches; synchronous training is its eta = 0.

One event loop owns all state: the books say what is known, admission decides, the runner plays, the journals keep what
runs, the publisher makes versions. A background task settles what has ended and starts what may start;
all else happens in the caller's own calls. At eta = 0 nothing starts before a batch is asked for and one task is drawn
for each group that was given up, so which tasks are drawn and which groups are taken depend on the rewards alone, never
on the order of completion (with over-sampling, which groups end first decides).

With `lockstep_tokens` the clock is virtual: all open sequences sample so many tokens, then wait for each other, what
has ended is settled in the order of ids, and nothing moves outside of `take_batch` and the wait for slow tasks. Then
batches depend on the state alone, for any eta.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from headrace.algo.staleness import StalenessPolicy, Verdict
from headrace.errors import CheckpointError, DataError, HeadraceError, RolloutError, boundary
from headrace.rollout.admission import Admission, Limit
from headrace.rollout.books import Books
from headrace.rollout.failures import too_few, why_failed
from headrace.rollout.filters import Filter, first_rejection
from headrace.rollout.journal import Journals
from headrace.rollout.keep import Keep, KeepBest, KeepFirst
from headrace.rollout.ledger import Drop, State, Ticket
from headrace.rollout.next_version import NextVersionScorer, fill_all
from headrace.rollout.publish import Publisher
from headrace.rollout.runner import Err, Ok, Outcome, TaskRunner
from headrace.rollout.settings import AsyncSettings, StaleAction
from headrace.rollout.stall import pending
from headrace.rollout.window import mean_length
from headrace.types import Group, Task, WeightsHandle

logger = logging.getLogger(__name__)

Play = Callable[[Task, int], Awaitable[Group]]
REPLAY_BATCHES = 8  # how many batches' worth of replayed groups are kept to choose from


class RolloutExecutor:
    """Use as `async with executor:`; leaving it cancels what runs and counts what was live as dropped (shutdown).

    `journals` are those that `play` keeps; without them groups in flight are not scored, and not part of a checkpoint.
    `cursor` is where `next_task` stands, saved with the rest.
    """

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
        keep: Keep | None = None,
        policy: StalenessPolicy | None = None,
        journals: Journals | None = None,
        cursor: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        assert batch_groups > 0
        rounds = 0 if journals is None else journals.gate.lockstep_tokens
        assert settings.lockstep_tokens == rounds, "the journals and the executor go by different clocks"
        self._play = play
        self._next_task = next_task
        self._batch_groups = batch_groups
        self._settings = settings
        self._publisher = publisher
        self._filters = tuple(filters)
        self._keep = keep or KeepFirst()
        self._policy = policy or settings.policy
        self._journals = journals
        self._cursor = cursor
        self._admission = Admission(
            batch_groups=batch_groups,
            max_staleness=settings.max_staleness,
            max_running=settings.max_running,
            oversampling=settings.oversampling,
            limits=tuple(limits),
        )
        self._runner = TaskRunner(timeout_s=settings.group_limit_s)
        self._books = Books(
            max_live=self._admission.max_live,
            max_replayed=REPLAY_BATCHES * settings.replay_groups,
            max_drops=settings.max_consecutive_drops,
        )
        self._ledger, self._ready, self._replay = self._books.ledger, self._books.ready, self._books.replay
        self._scorer = NextVersionScorer(publisher.samplers) if settings.next_logprobs else None
        self._doomed: dict[int, Drop] = {}  # running groups that were cancelled, and why
        self._worse: frozenset[int] = frozenset()  # ready groups that scored lower than those of the last batch
        self._ended: list[Outcome] = []  # not settled yet
        self._settler: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._waiting = False  # inside take_batch
        self._publishing = False
        self._failure: HeadraceError | None = None  # ends the run at the next take_batch
        self._source_failure: HeadraceError | None = None  # ends it once what has been started is used up
        self._barrier: Callable[[], dict[str, Any]] | None = None  # state at the last publish, before anything went on

    @property
    def version(self) -> int:
        return self._publisher.version

    @property
    def oldest(self) -> int:
        """Tokens of versions before this one must not be trained now."""
        return self._policy.oldest(self.version)

    @property
    def training(self) -> frozenset[int]:
        """Ids of the groups in training, without those that were trained before."""
        return frozenset(ticket.id for ticket in self._ledger.tickets(State.TRAINING))

    @property
    def _used_up(self) -> bool:
        """No task is left: the source has failed and none is to be tried again."""
        return self._source_failure is not None and not self._books.again

    @property
    def _lockstep(self) -> bool:
        return self._settings.lockstep_tokens > 0

    # --- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        assert self._settler is None, "an executor is entered once"
        self._settler = asyncio.create_task(self._settle_forever(), name="rollout-settler")
        self._settler.add_done_callback(lambda _: self._progress.set())  # its death wakes who waits for a batch
        if self._journals is not None and self._lockstep:
            self._journals.gate.changed = self._progress.set
        for ticket in self._ledger.tickets(State.RUNNING):  # restored
            self._runner.spawn(ticket.id, partial(self._play, self._books.tasks[ticket.id], ticket.id))
        self._cancel_late()
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
        self._ready.take([group.id for group in self._ready])
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
        """Exactly `batch_groups` groups that are fresh enough, oldest first, in training until `done`; behind them
        those that are trained again, if `replay_groups` asks for some.

        Raises RolloutError with the cause after `max_consecutive_drops` groups in a row were given up, when the task
        source or a filter fails, or when nothing ends although its timeout has passed.
        """
        assert self._settler is not None, "use `async with executor:`"
        assert not self._waiting, "one batch is taken at a time"
        assert not self._publishing, "a batch is taken after the weights were published"
        self._publisher.check()
        self._barrier = None
        self._waiting = True
        try:
            self._admit()
            while not self._batch_is_ready():
                await self._wait_for_progress()
            groups = self._take()
        finally:
            self._waiting = False
        if not self._settings.max_staleness:
            try:
                await self._drop_surplus()
            except asyncio.CancelledError:  # nobody will train on them
                for group in groups:
                    self._ledger.drop(group.id, Drop.CANCELLED)
                raise
        again = self._replay.draw(self._settings.replay_groups)
        self._books.window.replayed += len(again)
        self._books.window.take((*groups, *again), version=self.version, oldest=self.oldest)
        return (*groups, *again)

    def done(self, groups: Sequence[Group]) -> None:
        """The batch has been trained on, as a whole; after half of one, groups could start that are stale in time."""
        training = self.training
        self._ledger.consume(group.id for group in groups if group.id in training)
        assert not self._ledger.counts.training, "a batch is done as a whole"
        if self._settings.replay_groups:
            self._replay.add(groups)

    async def publish(self, handle: WeightsHandle) -> None:
        """Pause every sampler, score what waits and runs if next-version log-probs are wanted, load, version + 1, drop
        what became stale, resume; before all that, wait for slow tasks. Raises RolloutError."""
        assert not self._waiting, "weights are published between batches"
        await self._wait_for_slow()
        if self._lockstep:
            await self._rest()
        self._publishing = True
        cut_before = self._publisher.drains_cut
        if self._journals is not None:
            self._journals.gate.hold()
        try:
            async with self._publisher.publish(handle, before_load=self._collect):
                self._books.window.drains_cut += self._publisher.drains_cut - cut_before
                self._sweep()
                self._cancel_late()
                self._barrier = self._state()
        except RolloutError as exc:
            self._failure = exc  # samplers may hold different weights: no further batch
            raise
        finally:
            self._publishing = False
            if self._journals is not None:
                self._journals.gate.release()
        self._admit()

    async def catch_up(self, handle: WeightsHandle) -> None:
        """After `load_state_dict`: give fresh samplers the weights of the restored version."""
        await self._publisher.catch_up(handle)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, lag of the tokens taken since then, and how many groups run and wait now."""
        return self._books.metrics(version=self.version)

    # --- checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`snapshot` as JSON."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The state at the last publish if no batch was asked for since: partial sequences are as they were there.

        The call makes JSON of it, whenever that is and on any thread: most states are never written. Groups that train,
        or that run and cannot be taken up again, are dropped when it is loaded.
        """
        state, figures = self._barrier or self._state(), self._books.figures()
        return lambda: {**state(), **figures}

    def _state(self) -> Callable[[], dict[str, Any]]:
        """Of now, without the figures that are reported."""
        cursor = None if self._cursor is None else dict(self._cursor())
        here = {"version": self.version, "cursor": cursor}
        groups = self._books.snapshot()
        journals = dict if self._journals is None else self._journals.snapshot()
        return lambda: {**here, **groups(), "journals": journals()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when `state` is not what `state_dict` gave."""
        assert self._settler is None, "a state is loaded before the executor is entered"
        self._books.load_state_dict(state)
        with boundary(CheckpointError, "the rollout state in the checkpoint cannot be read"):
            self._publisher.version = int(state["version"])
            if self._journals is not None:
                self._journals.load_state_dict(state["journals"])
        self._books.forget_unresumable(self._journals)

    # --- starting and settling -----------------------------------------------------------------------------------

    async def _settle_forever(self) -> None:
        while True:
            ended = await self._runner.outcomes()
            self._ended += ended  # a statement of its own: the list may be another one after the wait
            if not self._lockstep:
                self._settle_ended()
                self._admit()
            self._progress.set()

    def _settle_ended(self) -> int:
        """In the order of ids where the clock is virtual, else as they came; returns how many there were."""
        ended, self._ended = self._ended, []
        for outcome in sorted(ended, key=lambda outcome: outcome.id) if self._lockstep else ended:
            self._settle(outcome)
        return len(ended)

    def _admit(self) -> None:
        """Start as many groups as may start now."""
        closed = self._settler is None or self._publishing or (self._lockstep and not self._waiting)
        if closed or self._failure is not None:
            return
        batch_open = self._waiting or self._ledger.counts.training > 0
        for _ in range(self._admission.capacity(self._ledger.counts, batch_open=batch_open, waiting=self._waiting)):
            if self._used_up:
                return
            try:
                with boundary(DataError, "the task source has no further task"):
                    task = self._books.again.popleft() if self._books.again else self._next_task()
            except HeadraceError as exc:
                self._source_failure = exc
                return
            ticket = self._books.start(task, version=self.version)
            self._runner.spawn(ticket.id, partial(self._play, task, ticket.id))

    def _settle(self, outcome: Outcome) -> None:
        """A group has ended: it becomes ready, or is dropped for a reason."""
        if (reason := self._doomed.pop(outcome.id, None)) is not None:
            if reason is Drop.STALE:
                assert self._journals is not None
                length = self._journals.mean_sampled(outcome.id)
                self._books.drop_stale(self._books.tasks[outcome.id], outcome.id, length)
            else:
                self._ledger.drop(outcome.id, reason)
            self._forget(outcome.id)
            return
        match outcome:
            case Err(id=id, reason=reason, text=text, ends_run=ends_run):
                if ends_run:
                    self._failure = self._failure or RolloutError(text)
                self._give_up(id, reason, text)
            case Ok(id=id, group=played):
                assert played.id == id, f"group {id} came back as {played.id}"
                group = replace(played, started_version=self._ledger.ticket(id).started_version)
                self._books.window.failed_episodes += len(group.failed)
                self._judge(group if self._journals is None else self._journals.refreshed(group))
        self._forget(outcome.id)

    def _judge(self, group: Group) -> None:
        try:
            rejection = None if too_few(group) else first_rejection(self._filters, group)
        except HeadraceError as exc:  # a filter that raises cannot be worked around by playing more groups
            self._failure = self._failure or exc
            self._ledger.drop(group.id, Drop.FAILED)
            return
        if too_few(group):
            self._give_up(group.id, Drop.FAILED, why_failed(group))
        elif rejection is not None:
            self._give_up(group.id, f"filtered_{rejection.reason}", "")
        elif self._decide(group) is Verdict.DROP:
            self._books.drop_stale(group.task, group.id, mean_length(group))
        else:
            self._books.keep(group)

    def _forget(self, id: int) -> None:
        """A group runs no more."""
        self._books.tasks.pop(id, None)
        if self._journals is not None:
            self._journals.close(id)

    def _give_up(self, id: int, reason: str, text: str) -> None:
        failure = self._books.give_up(id, reason, text)
        self._failure = self._failure or failure

    # --- a batch -------------------------------------------------------------------------------------------------

    def _batch_is_ready(self) -> bool:
        """Sweeps first; raises what makes a batch impossible."""
        assert self._settler is not None
        if self._settler.done():
            self._settler.result()
        if self._failure is not None:
            raise RolloutError(str(self._failure)) from self._failure
        self._sweep()
        enough = len(self._ready) >= self._keep.needed(self._batch_groups, self._settings.oversampling)
        if not enough and self._used_up and not self._ledger.counts.running:
            if len(self._ready) >= self._batch_groups:
                return True
            assert self._source_failure is not None
            raise self._source_failure
        return enough

    def _take(self) -> tuple[Group, ...]:
        chosen = self._keep.choose(tuple(self._ready), self._batch_groups, before=self._books.urgent)
        groups = self._books.take(group.id for group in chosen)
        self._worse = frozenset(group.id for group in self._ready if isinstance(self._keep, KeepBest))
        assert len(groups) == self._batch_groups
        for group in groups:
            assert self._decide(group) is not Verdict.DROP, "a stale group was taken"
        return groups

    async def _drop_surplus(self) -> None:
        """At eta = 0 what was started beyond the batch is of no use to the next one."""
        for group in self._ready.take([group.id for group in self._ready]):
            self._ledger.drop(group.id, Drop.SURPLUS)
        self._cancel(self._ledger.tickets(State.RUNNING), Drop.SURPLUS)
        while self._ledger.counts.running:
            await self._wait_for_progress()

    def _cancel(self, tickets: Iterable[Ticket], reason: Drop) -> None:
        """They are dropped for this reason when they have ended."""
        for ticket in tickets:
            if ticket.id not in self._doomed:
                self._doomed[ticket.id] = reason
                self._runner.cancel(ticket.id)

    async def _wait_for_progress(self) -> None:
        """Something ends within its timeout; when nothing does, say what is being waited for."""
        if not self._lockstep:
            self._progress.clear()
            await self._patiently(self._progress.wait())
            return
        assert self._journals is not None
        settled = await self._rest()
        self._admit()
        if settled:
            return
        if not self._ledger.counts.running:
            await self._patiently(asyncio.Event().wait())  # nothing may start: say so
        self._journals.gate.next_round()

    async def _rest(self) -> int:
        """By the virtual clock: settle what has ended when all else waits for the next round."""
        assert self._journals is not None
        while True:
            ended = {outcome.id for outcome in self._ended}
            running = [ticket.id for ticket in self._ledger.tickets(State.RUNNING) if ticket.id not in ended]
            if all(self._journals.quiet(id) for id in running):
                return self._settle_ended()
            self._progress.clear()
            await self._patiently(self._progress.wait())

    async def _patiently(self, waiting: Awaitable[object]) -> None:
        patience_s = self._settings.patience_s
        try:
            async with asyncio.timeout(patience_s):
                await waiting
        except TimeoutError as exc:
            paused = " (starting groups is paused)" if self._admission.paused else ""
            raise RolloutError(
                f"{len(self._ready)} of {self._batch_groups} groups are ready and none ended for {patience_s:g} s; "
                f"still running: {self.pending()}{paused}: they do not react to being cancelled, or nothing may start"
            ) from exc

    def pending(self) -> str:
        """The groups that run, in words: since which version, and how many tokens they have."""
        sampled = (lambda id: 0) if self._journals is None else self._journals.num_sampled
        return pending(self._ledger.tickets(State.RUNNING), sampled)

    # --- staleness -----------------------------------------------------------------------------------------------

    def _decide(self, group: Group) -> Verdict:
        return self._policy.verdict(group, version=self.version)

    def _sweep(self) -> None:
        """Drop ready groups that have become too old, which frees their slots."""
        self._replay.sweep(self._decide)
        stale = self._ready.sweep(self._decide)
        for group in stale:
            self._books.drop_stale(group.task, group.id, mean_length(group), slow=group.id not in self._worse)
        if stale:
            self._admit()

    def _cancel_late(self) -> None:
        """Running groups that have a token which is too old can only be dropped: that need not wait for their end."""
        if self._journals is not None and self._settings.stale_action is StaleAction.DROP:
            late = [ticket for ticket in self._ledger.tickets(State.RUNNING) if self._edge(ticket) < self.oldest]
            self._cancel(late, Drop.STALE)

    def _edge(self, ticket: Ticket) -> int:
        """Version of the token by whose age a running group is dropped: its oldest, or with masks its newest so far;
        without journals, of its start."""
        if self._journals is None:
            return ticket.started_version
        masks = self._settings.stale_action is StaleAction.MASK
        edge = self._journals.tail_version(ticket.id) if masks else self._journals.head_version(ticket.id)
        return self.version if edge is None else edge

    async def _wait_for_slow(self) -> None:
        """Groups of slow tasks that this publish brings to the bound are waited for: it is their last chance."""
        if not self._settings.max_staleness:
            return
        last = self.version + 1 - self._settings.max_staleness
        slow = [
            ticket.id
            for ticket in self._ledger.tickets(State.RUNNING)
            if ticket.task_id in self._books.slow and self._edge(ticket) == last
        ]
        self._books.window.slow_waits += len(slow)
        try:
            async with asyncio.timeout(self._settings.slow_limit_s):
                while any(id in self._books.tasks for id in slow) and self._failure is None:
                    await self._wait_for_progress()
        except TimeoutError:
            logger.warning("publishing without slow tasks: %s", self.pending())
        ready = {group.id for group in self._ready}
        self._books.urgent |= ready.intersection(slow)
        self._books.window.slow_missed += len(set(slow) - ready)

    async def _collect(self) -> None:
        """While all are paused: wait for what was cut, then score under this version what the one before it sampled and
        nobody has scored: of ready, replayed and running groups. The next version could not."""
        if self._journals is not None:
            await self._journals.collected(timeout_s=self._settings.grace_s)
        if self._scorer is not None:
            await fill_all(self._scorer, (self._ready, self._replay), self._journals, version=self.version)
