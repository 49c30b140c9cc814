"""Play groups within the staleness bound and hand them out in batches; synchronous training is its eta = 0.

One event loop owns all state: `ExecutorState` holds it, `Admission` decides what starts, `TaskRunner` runs groups,
`PartialRollouts` records what runs, `Publisher` makes versions. A background task settles groups that have ended and
starts new ones; all else happens in the caller's calls (the package's docstring draws it). At eta = 0 nothing starts
before a batch is asked for, and one task is drawn for each group that was given up, so which tasks are drawn and which
groups are taken depends on the rewards alone, never on the order of completion (except with over-sampling, where the
groups that end first are taken).

With `lockstep_tokens` the clock is virtual: all open sequences sample so many tokens, then wait for each other; groups
that have ended are settled in the order of their ids, and nothing moves outside `take_batch` and the wait for slow
tasks. Then batches depend on the state alone, for any eta.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from headrace.algo.staleness import Verdict
from headrace.errors import CheckpointError, DataError, HeadraceError, RolloutError, boundary
from headrace.process.watchdog import watching
from headrace.rollout.executor.admission import Admission, Limit
from headrace.rollout.executor.drops import describe_running, has_too_few_episodes, why_failed
from headrace.rollout.executor.ledger import Drop, GroupEntry, GroupState
from headrace.rollout.executor.parts import OUR_PARTS, ExecutorParts
from headrace.rollout.executor.selection import GroupSelection, TakeBest, TakeFirst
from headrace.rollout.executor.settings import AsyncSettings, StaleAction
from headrace.rollout.executor.state import ExecutorState
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.executor.task_runner import GroupDone, GroupFailed, Outcome, TaskRunner
from headrace.rollout.executor.turns import NO_TURNS, Turns
from headrace.rollout.filters import Filter, first_rejection
from headrace.rollout.next_logprobs import NextVersionScorer, score_all
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.types import Group, Task, WeightsHandle

logger = logging.getLogger(__name__)

Play = Callable[[Task, int], Awaitable[Group]]  # such as `rollout.group.GroupPlayer`
LIMIT_POLL_S = 1.0  # between two questions to the limits while no group ends
REPLAY_BATCHES = 8  # how many batches' worth of replayed groups are kept to choose from


class OutcomeLearner(Protocol):
    """Learns from the groups that were played which tasks to draw (`data.curriculum.Curriculum`)."""

    def add(self, group: Group) -> None:
        """Collect a group that was trained on, or rejected by a filter."""

    def apply(self) -> None:
        """Let what was collected count, after a training step."""

    def metrics(self) -> Mapping[str, float]: ...


class RolloutExecutor:
    """Run groups in the background. Use as `async with executor:`; leaving it cancels and drops what is live."""

    def __init__(
        self,
        *,
        play: Play,
        next_task: Callable[[], Task],
        batch_groups: int,
        settings: AsyncSettings,
        publisher: Publisher,
        filters: Sequence[Filter] = (),
        selection: GroupSelection | None = None,
        parts: ExecutorParts = OUR_PARTS,
        # What `play` records into. Without it running groups are neither scored nor part of a checkpoint.
        partial_rollouts: PartialRollouts | None = None,
        utilization: SamplerUtilization | None = None,  # counts the groups that run
        cursor: Callable[[], Mapping[str, Any]] | None = None,  # where `next_task` stands; saved with the state
        outcomes: OutcomeLearner | None = None,  # told of groups that were trained on or rejected
        turns: Turns = NO_TURNS,  # of sampling and training; others than these need eta = 0
    ) -> None:
        assert batch_groups > 0
        assert turns is NO_TURNS or not settings.max_staleness, "sampling and training take turns"
        lockstep_tokens = 0 if partial_rollouts is None else partial_rollouts.gate.lockstep_tokens
        assert settings.lockstep_tokens == lockstep_tokens, "the gate and the executor go by different clocks"
        self._play = play
        self._next_task = next_task
        self._batch_groups = batch_groups
        self._settings = settings
        self._publisher = publisher
        self._filters = tuple(filters)
        self._selection = selection or TakeFirst()
        self._policy = parts.policy or settings.policy
        self._partial_rollouts = partial_rollouts
        self._utilization = utilization or SamplerUtilization()
        self._cursor = cursor
        self._outcomes = outcomes
        self._turns = turns
        self._admission = Admission(
            batch_groups=batch_groups,
            max_staleness=settings.max_staleness,
            max_running=settings.max_running,
            oversampling=settings.oversampling,
            limits=parts.limits,
        )
        self._runner = TaskRunner(timeout_s=settings.group_limit_s)
        self._state = ExecutorState(
            max_live=self._admission.max_live,
            max_replayed=REPLAY_BATCHES * settings.replay_groups,
            max_drops=settings.max_consecutive_drops,
            parts=parts,
        )
        self._scorer = parts.scorer
        if self._scorer is None and settings.next_logprobs:
            self._scorer = NextVersionScorer(publisher.samplers)
        self._cancelled: dict[int, Drop] = {}  # running groups that were cancelled, and why
        self._outscored: frozenset[int] = frozenset()  # ready groups that scored lower than those of the last batch
        self._swept_version: int | None = None  # by which the ready groups were judged last
        self._unsettled: list[Outcome] = []
        self._settler: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._waiting = False  # inside take_batch
        self._publishing = False
        self._failure: HeadraceError | None = None  # ends the run at the next take_batch
        self._source_failure: HeadraceError | None = None  # ends the run once all started groups are used up
        self._state_at_publish: Callable[[], dict[str, Any]] | None = None  # before any group continued

    @property
    def version(self) -> int:
        """Return the version of the published weights."""
        return self._publisher.version

    @property
    def oldest(self) -> int:
        """Return the oldest version whose tokens may be trained now."""
        return self._policy.oldest(self.version)

    @property
    def training(self) -> frozenset[int]:
        """Return the ids of the groups in training, without those that are trained again."""
        return self._state.training

    @property
    def _used_up(self) -> bool:
        """Return whether no task is left: the source has failed and no task is to be tried again."""
        return self._source_failure is not None and not self._state.has_retries

    @property
    def _lockstep(self) -> bool:
        return self._settings.lockstep_tokens > 0

    # --- entering and leaving --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        assert self._settler is None, "an executor is entered once"
        self._settler = asyncio.create_task(self._settle_forever(), name="rollout-settler")
        self._settler.add_done_callback(lambda _: self._progress.set())  # if it dies, take_batch wakes and raises
        if self._partial_rollouts is not None and self._lockstep:
            self._partial_rollouts.gate.changed = self._progress.set
        for id, task in self._state.running_tasks():  # restored
            self._spawn(id, task)
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
        self._state.drop_all(Drop.SHUTDOWN)
        (settler_result,) = await asyncio.gather(self._settler, return_exceptions=True)
        if error is None and isinstance(settler_result, Exception):
            raise settler_result

    def pause(self) -> None:
        """Start no group until `resume`; running groups go on and are collected."""
        self._admission.paused = True

    def resume(self) -> None:
        """Start groups again."""
        self._admission.paused = False
        self._admit()

    def register_limit(self, limit: Limit) -> None:
        """Add a limit on the groups that may start, from now on.

        It is called with the counts of live groups whenever groups could start, and returns how many more it would let
        start. The smallest answer counts, so it can only lower what staleness and concurrency admit. If it raises, the
        next `take_batch` does.
        """
        self._admission.register(limit)

    # --- the trainer's calls ---------------------------------------------------------------------------------------

    async def take_batch(self) -> tuple[Group, ...]:
        """Return exactly `batch_groups` groups that are fresh enough, oldest first, in training until `done`; after
        them the groups that are trained again, if `replay_groups` asks for some.

        Raises RolloutError with the cause after `max_consecutive_drops` groups in a row were given up, when the task
        source or a filter fails, or when nothing ends although its timeout has passed.
        """
        assert self._settler is not None, "use `async with executor:`"
        assert not self._waiting, "one batch is taken at a time"
        assert not self._publishing, "a batch is taken after the weights were published"
        self._publisher.check()
        await self._turns.to_sampling()
        self._state_at_publish = None
        self._waiting = True
        try:
            self._admit()
            with watching("a batch of groups", detail=self.pending, has_deadline=True) as activity:
                while not self._batch_is_ready():
                    await self._wait_for_progress()
                    activity.beat()
            groups = self._take()
        finally:
            self._waiting = False
        if not self._settings.max_staleness:
            try:
                await self._drop_surplus()
                await self._turns.to_training()
            except asyncio.CancelledError:  # they will not be trained on
                for group in groups:
                    self._state.drop(group.id, Drop.CANCELLED)
                raise
        batch = (*groups, *self._state.draw_replay(self._settings.replay_groups))
        self._state.stats.add_batch(batch, version=self.version, oldest=self.oldest)
        return batch

    def done(self, groups: Sequence[Group]) -> None:
        """Mark a whole batch as trained. Marking half of one would let groups start that must become stale."""
        if self._outcomes is not None:
            for group in groups:
                if group.id in self._state.training:  # not those that are trained again
                    self._outcomes.add(group)
            self._outcomes.apply()
        self._state.consume(groups, keep_for_replay=self._settings.replay_groups > 0)

    async def publish(self, handle: WeightsHandle) -> None:
        """Publish weights: wait for slow tasks, pause every sampler, score next-version log-probs if they are wanted,
        load, version + 1, drop stale groups, resume. Raises RolloutError."""
        assert not self._waiting, "weights are published between batches"
        await self._turns.to_sampling()
        await self._wait_for_slow()
        if self._lockstep:
            await self._wait_until_idle()
        self._publishing = True
        drains_cut_before = self._publisher.drains_cut
        if self._partial_rollouts is not None:
            self._partial_rollouts.gate.hold()
        try:
            async with self._publisher.publish(handle, before_load=self._score_before_load):
                self._state.stats.drains_cut += self._publisher.drains_cut - drains_cut_before
                self._sweep()
                self._cancel_late()
                self._state_at_publish = self._capture_state()
        except RolloutError as exc:
            self._failure = exc  # samplers may hold different weights: no further batch
            raise
        finally:
            self._publishing = False
            if self._partial_rollouts is not None:
                self._partial_rollouts.gate.release()
        self._admit()

    async def load_current(self, handle: WeightsHandle) -> None:
        """Load the restored version's weights into fresh samplers, after `load_state_dict`."""
        await self._publisher.load_current(handle)

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call, lags of the tokens taken since then, and how many groups run and wait."""
        learned = {} if self._outcomes is None else self._outcomes.metrics()
        return {**self._state.metrics(version=self.version), **learned}

    # --- checkpoint ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return `snapshot` as JSON."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Capture the state at the last publish, or of now if a batch was asked for since.

        Calling the result encodes it as JSON, at any time and on any thread: most states are never written. Groups
        that train, or that run and cannot be resumed, are dropped when the state is loaded.
        """
        state, stats = self._state_at_publish or self._capture_state(), self._state.stats_state()
        return lambda: {**state(), **stats}

    def _capture_state(self) -> Callable[[], dict[str, Any]]:
        """Capture the state of now without its statistics."""
        cursor = None if self._cursor is None else dict(self._cursor())
        small = {"version": self.version, "cursor": cursor}
        groups = self._state.snapshot()
        partial_rollouts = dict if self._partial_rollouts is None else self._partial_rollouts.snapshot()
        return lambda: {**small, **groups(), "journals": partial_rollouts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises CheckpointError when it cannot be read."""
        assert self._settler is None, "a state is loaded before the executor is entered"
        self._state.load_state_dict(state)
        with boundary(CheckpointError, "the rollout state in the checkpoint cannot be read"):
            self._publisher.version = int(state["version"])
            if self._partial_rollouts is not None:
                self._partial_rollouts.load_state_dict(state["journals"])
        self._state.drop_unresumable(self._partial_rollouts)

    # --- starting and settling groups ------------------------------------------------------------------------------

    async def _settle_forever(self) -> None:
        """Wait for outcomes and settle them; the body of the settler task."""
        while True:
            outcomes = await self._runner.outcomes()
            self._unsettled += outcomes  # a statement of its own: the list may be another one after the wait
            if not self._lockstep:
                self._settle_outcomes()
                self._admit()
            self._progress.set()

    def _settle_outcomes(self) -> int:
        """Settle all outcomes, in lockstep in the order of ids, else as they came; returns how many there were."""
        outcomes, self._unsettled = self._unsettled, []
        for outcome in sorted(outcomes, key=lambda outcome: outcome.id) if self._lockstep else outcomes:
            self._settle(outcome)
        return len(outcomes)

    def _admit(self) -> None:
        """Start as many groups as may start now."""
        closed = self._settler is None or self._publishing or (self._lockstep and not self._waiting)
        if closed or self._failure is not None:
            return
        counts = self._state.counts
        batch_open = self._waiting or counts.training > 0
        try:
            num_groups = self._admission.capacity(counts, batch_open=batch_open, waiting=self._waiting)
        except HeadraceError as exc:  # a limit failed
            self._failure = exc
            return
        for _ in range(num_groups):
            if self._used_up:
                return
            try:
                with boundary(DataError, "the task source has no further task"):
                    task = self._state.next_task(self._next_task)
            except HeadraceError as exc:
                self._source_failure = exc
                return
            entry = self._state.start(task, version=self.version)
            self._spawn(entry.id, task)

    def _spawn(self, id: int, task: Task) -> None:
        self._runner.spawn(id, partial(self._play_group, task, id))

    async def _play_group(self, task: Task, id: int) -> Group:
        """Play one group, counted as running; the body of a group's task."""
        with self._utilization.running_group():
            return await self._play(task, id)

    def _settle(self, outcome: Outcome) -> None:
        """Make a group that has ended ready, or drop it for a reason."""
        if (drop := self._cancelled.pop(outcome.id, None)) is not None:
            if drop is Drop.STALE:
                assert self._partial_rollouts is not None
                self._state.drop_running_as_stale(outcome.id, self._partial_rollouts.mean_sampled(outcome.id))
            else:
                self._state.drop(outcome.id, drop)
            self._stop_running(outcome.id)
            return
        match outcome:
            case GroupFailed(id=id, reason=reason, text=text, ends_run=ends_run):
                if ends_run:
                    self._failure = self._failure or RolloutError(text)
                self._give_up(id, reason, text)
            case GroupDone(id=id, group=played):
                assert played.id == id, f"group {id} came back as {played.id}"
                group = replace(played, started_version=self._state.entry(id).started_version)
                self._state.stats.failed_episodes += len(group.failed)
                self._accept_or_drop(
                    group if self._partial_rollouts is None else self._partial_rollouts.refreshed(group)
                )
        self._stop_running(outcome.id)

    def _accept_or_drop(self, group: Group) -> None:
        """Make the group ready unless it has too few episodes, is rejected by a filter, or is too old."""
        try:
            rejection = None if has_too_few_episodes(group) else first_rejection(self._filters, group)
        except HeadraceError as exc:  # a filter that raises cannot be worked around by playing more groups
            self._failure = self._failure or exc
            self._state.drop(group.id, Drop.FAILED)
            return
        if has_too_few_episodes(group):
            self._give_up(group.id, Drop.FAILED, why_failed(group))
        elif rejection is not None:
            if self._outcomes is not None:
                self._outcomes.add(group)
            self._give_up(group.id, f"filtered_{rejection.reason}", "")
        elif self._decide(group) is Verdict.DROP:
            self._state.drop_ended_as_stale(group)
        else:
            self._state.make_ready(group)

    def _stop_running(self, id: int) -> None:
        """Forget what is kept of a group while it runs."""
        self._state.stop_running(id)
        if self._partial_rollouts is not None:
            self._partial_rollouts.close(id)

    def _give_up(self, id: int, reason: str, text: str) -> None:
        failure = self._state.give_up(id, reason, text)
        self._failure = self._failure or failure

    # --- a batch ---------------------------------------------------------------------------------------------------

    def _batch_is_ready(self) -> bool:
        """Drop stale groups, then return whether enough are ready; raises what makes a batch impossible."""
        assert self._settler is not None
        if self._settler.done():
            self._settler.result()
        if self._failure is not None:
            raise RolloutError(str(self._failure)) from self._failure
        if self._swept_version != self.version:  # since then, every group was judged by this version when it ended
            self._sweep()
        counts = self._state.counts
        enough = counts.ready >= self._selection.needed(self._batch_groups, self._settings.oversampling)
        if not enough and self._used_up and not counts.running:
            if counts.ready >= self._batch_groups:
                return True
            assert self._source_failure is not None
            raise self._source_failure
        return enough

    def _take(self) -> tuple[Group, ...]:
        """Choose the batch and move it into training."""
        chosen = self._selection.choose(self._state.ready, self._batch_groups, before=self._state.urgent)
        groups = self._state.take(group.id for group in chosen)
        left_over = self._state.ready if isinstance(self._selection, TakeBest) else ()
        self._outscored = frozenset(group.id for group in left_over)
        assert len(groups) == self._batch_groups
        for group in groups:
            assert self._decide(group) is not Verdict.DROP, "a stale group was taken"
        return groups

    async def _drop_surplus(self) -> None:
        """Drop, at eta = 0, all groups started beyond the batch: they are of no use to the next one."""
        self._state.drop_ready(Drop.SURPLUS)
        self._cancel(self._state.entries(GroupState.RUNNING), Drop.SURPLUS)
        while self._state.counts.running:
            await self._wait_for_progress()

    def _cancel(self, entries: Iterable[GroupEntry], reason: Drop) -> None:
        """Cancel running groups; they are dropped for this reason when they have ended."""
        for entry in entries:
            if entry.id not in self._cancelled:
                self._cancelled[entry.id] = reason
                self._runner.cancel(entry.id)

    async def _wait_for_progress(self) -> None:
        """Wait until a group has ended; in lockstep, settle what has ended and open the next round."""
        if not self._lockstep:
            self._progress.clear()
            await self._with_timeout(self._poll_limits() if self._admission.has_limits else self._progress.wait())
            return
        assert self._partial_rollouts is not None
        num_settled = await self._wait_until_idle()
        self._admit()
        if num_settled:
            return
        if not self._state.counts.running:
            await self._with_timeout(asyncio.Event().wait())  # nothing may start: say so
        self._partial_rollouts.gate.next_round()

    async def _poll_limits(self) -> None:
        """Wait until a group has ended, and ask the limits again now and then: they may look at other things too."""
        while not self._progress.is_set() and self._failure is None:
            try:
                async with asyncio.timeout(LIMIT_POLL_S):
                    await self._progress.wait()
            except TimeoutError:
                self._admit()

    async def _wait_until_idle(self) -> int:
        """Wait, in lockstep, until every running group waits for the next round, then settle those that have ended.

        Returns how many were settled.
        """
        assert self._partial_rollouts is not None
        while True:
            ended = {outcome.id for outcome in self._unsettled}
            running = [entry.id for entry in self._state.entries(GroupState.RUNNING) if entry.id not in ended]
            if all(self._partial_rollouts.all_waiting(id) for id in running):
                return self._settle_outcomes()
            self._progress.clear()
            await self._with_timeout(self._progress.wait())

    async def _with_timeout(self, waiting: Awaitable[object]) -> None:
        """Wait for at most `patience_s`; then raise RolloutError that says which groups have not ended."""
        patience_s = self._settings.patience_s
        try:
            async with asyncio.timeout(patience_s):
                await waiting
        except TimeoutError as exc:
            ready, paused = self._state.counts.ready, " (starting groups is paused)" if self._admission.paused else ""
            if closed_by := self._admission.closed_by(self._state.counts):
                paused += f" (no group may start by the limit {', '.join(closed_by)})"
            raise RolloutError(
                f"{ready} of {self._batch_groups} groups are ready and none ended for {patience_s:g} s; "
                f"still running: {self.pending()}{paused}: they do not react to being cancelled, or nothing may start"
            ) from exc

    def pending(self) -> str:
        """Describe the groups that run: since which version, and how many tokens they have."""
        num_sampled = (lambda id: 0) if self._partial_rollouts is None else self._partial_rollouts.num_sampled
        return describe_running(self._state.entries(GroupState.RUNNING), num_sampled)

    # --- staleness -------------------------------------------------------------------------------------------------

    def _decide(self, group: Group) -> Verdict:
        return self._policy.verdict(group, version=self.version)

    def _sweep(self) -> None:
        """Drop ready groups that have become too old, and start others in their place."""
        self._swept_version = self.version
        if self._state.sweep(self._decide, outscored=self._outscored):
            self._admit()

    def _cancel_late(self) -> None:
        """Cancel running groups with a token that is too old: they can only be dropped, so need not be waited for."""
        if self._partial_rollouts is not None and self._settings.stale_action is StaleAction.DROP:
            running = self._state.entries(GroupState.RUNNING)
            self._cancel([entry for entry in running if self._deciding_version(entry) < self.oldest], Drop.STALE)

    def _deciding_version(self, entry: GroupEntry) -> int:
        """Return the version by which a running group is judged too old: that of its oldest token, or with masks of its
        newest so far; without partial rollouts, that of its start."""
        if self._partial_rollouts is None:
            return entry.started_version
        masks = self._settings.stale_action is StaleAction.MASK
        version_of = self._partial_rollouts.tail_version if masks else self._partial_rollouts.head_version
        version = version_of(entry.id)
        return self.version if version is None else version

    async def _wait_for_slow(self) -> None:
        """Wait for running groups of slow tasks that this publish brings to the bound: the next would drop them."""
        if not self._settings.max_staleness:
            return
        last_version = self.version + 1 - self._settings.max_staleness
        slow = [
            entry.id
            for entry in self._state.entries(GroupState.RUNNING)
            if self._state.is_slow(entry.task_id) and self._deciding_version(entry) == last_version
        ]
        self._state.stats.slow_waits += len(slow)
        try:
            async with asyncio.timeout(self._settings.slow_limit_s):
                while any(self._state.is_running(id) for id in slow) and self._failure is None:
                    await self._wait_for_progress()
        except TimeoutError:
            logger.warning("publishing without slow tasks: %s", self.pending())
        self._state.stats.slow_missed += len(slow) - self._state.mark_urgent(slow)

    async def _score_before_load(self) -> None:
        """Wait, with all samplers paused, for interrupted calls; then score the tokens of the version before this one
        that have no next-version log-prob yet. Once the next version is loaded they cannot be scored any more."""
        if self._partial_rollouts is not None:
            await self._partial_rollouts.wait_until_returned(timeout_s=self._settings.grace_s)
        if self._scorer is not None:
            running = () if self._partial_rollouts is None else tuple(self._partial_rollouts)
            await score_all(self._scorer, self._state.stores, running, version=self.version)
