"""The state of an executor: which group is where, and every transition between states. Also what a checkpoint saves.

The executor changes its groups through `ExecutorState` alone, so that ledger, buffers, retries and statistics cannot
disagree. Knows no clock, no sampler and nothing of how groups are played.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from headrace.algo.staleness import LiveCounts, Verdict
from headrace.errors import CheckpointError, RolloutError, boundary
from headrace.rollout.executor.drops import ConsecutiveDrops, SlowTasks
from headrace.rollout.executor.ledger import Drop, GroupEntry, GroupState, Ledger
from headrace.rollout.executor.parts import OUR_PARTS, ExecutorParts, ReadyStore, ReplayStore
from headrace.rollout.executor.ready_buffer import ReadyBuffer
from headrace.rollout.executor.replay_buffer import ReplayBuffer
from headrace.rollout.executor.stats import IntervalStats, mean_length
from headrace.rollout.group_json import from_json, to_json
from headrace.rollout.next_logprobs import GroupStore
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.types import Group, Task

logger = logging.getLogger(__name__)


class ExecutorState:
    """Own the groups of an executor from their start until they are consumed or dropped."""

    def __init__(
        self,
        *,
        max_live: int,
        max_replayed: int,  # groups kept to be trained again
        max_drops: int,  # given up in a row; then the run ends
        parts: ExecutorParts = OUR_PARTS,
    ) -> None:
        self.stats = IntervalStats()
        self._ledger = Ledger()
        self._ready: ReadyStore = ReadyBuffer(max_groups=max_live) if parts.ready is None else parts.ready
        self._replay: ReplayStore = ReplayBuffer(max_groups=max_replayed) if parts.replay is None else parts.replay
        self._tasks: dict[int, Task] = {}  # of running groups
        self._retries: deque[Task] = deque()  # dropped as stale, to be tried before new ones
        self._slow = SlowTasks()
        self._urgent: set[int] = set()  # ready groups that a publish waited for
        self._drops = ConsecutiveDrops(limit=max_drops)
        self._reported: dict[str, int] = {}  # lifetime counts at the last report

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> LiveCounts:
        """Return how many groups are in each state."""
        return self._ledger.counts

    @property
    def training(self) -> frozenset[int]:
        """Return the ids of the groups in training."""
        return self._ledger.ids(GroupState.TRAINING)

    @property
    def ready(self) -> tuple[Group, ...]:
        """Return the groups that wait to be trained, oldest first."""
        return tuple(self._ready)

    @property
    def urgent(self) -> Collection[int]:
        """Return the ids of ready groups that a publish waited for; they are taken first."""
        return self._urgent

    @property
    def stores(self) -> Sequence[GroupStore]:
        """Return the stores of finished groups, for scoring their tokens."""
        return self._ready, self._replay

    @property
    def has_retries(self) -> bool:
        """Return whether a task waits to be tried again."""
        return bool(self._retries)

    def entries(self, *states: GroupState) -> tuple[GroupEntry, ...]:
        """Return the entries of groups in these states, by id."""
        return self._ledger.entries(*states)

    def entry(self, id: int) -> GroupEntry:
        """Return the entry of a live group."""
        return self._ledger.entry(id)

    def running_tasks(self) -> tuple[tuple[int, Task], ...]:
        """Return (group id, task) of every group that runs, by id."""
        return tuple((entry.id, self._tasks[entry.id]) for entry in self._ledger.entries(GroupState.RUNNING))

    def is_running(self, id: int) -> bool:
        """Return whether the group has not ended yet."""
        return id in self._tasks

    def is_slow(self, task_id: str) -> bool:
        """Return whether the task was dropped as stale so often that a publish waits for it."""
        return task_id in self._slow

    # --- transitions of a group --------------------------------------------------------------------------------------

    def next_task(self, draw: Callable[[], Task]) -> Task:
        """Return the next task to start: one to be tried again, else a new one."""
        return self._retries.popleft() if self._retries else draw()

    def start(self, task: Task, *, version: int) -> GroupEntry:
        """Start a group of the task."""
        entry = self._ledger.start(task.id, version=version)
        self._tasks[entry.id] = task
        return entry

    def stop_running(self, id: int) -> None:
        """Forget the task of a group that has ended."""
        self._tasks.pop(id, None)

    def make_ready(self, group: Group) -> None:
        """Move a group that ended and may be trained into the ready buffer."""
        self._ledger.ready(group.id)
        self._ready.put(group)
        self._drops.clear()
        self._slow.ended(group.task.id)
        self.stats.add_ended(mean_length(group), stale=False)

    def mark_urgent(self, ids: Collection[int]) -> int:
        """Let those of `ids` that are ready go into the next batch; returns how many there are."""
        urgent = {group.id for group in self._ready}.intersection(ids)
        self._urgent |= urgent
        return len(urgent)

    def take(self, ids: Iterable[int]) -> tuple[Group, ...]:
        """Move ready groups into training."""
        groups = self._ready.take(ids)
        self._urgent -= {group.id for group in groups}
        self._ledger.take(group.id for group in groups)
        return groups

    def draw_replay(self, n: int) -> tuple[Group, ...]:
        """Draw up to `n` groups that were trained before."""
        groups = self._replay.draw(n)
        self.stats.replayed += len(groups)
        return groups

    def consume(self, groups: Sequence[Group], *, keep_for_replay: bool) -> None:
        """Count a trained batch as consumed; those of its groups that were replayed are consumed already."""
        training = self.training
        self._ledger.consume(group.id for group in groups if group.id in training)
        assert not self.counts.training, "a batch is done as a whole"
        if keep_for_replay:
            self._replay.add(groups)

    def drop(self, id: int, reason: Drop) -> None:
        """Drop a running group or one in training."""
        self._ledger.drop(id, reason)

    def drop_ready(self, reason: Drop) -> None:
        """Drop every ready group."""
        for group in self._ready.take_all():
            self._ledger.drop(group.id, reason)

    def drop_all(self, reason: Drop) -> None:
        """Drop every live group."""
        self._ready.take_all()
        for entry in self._ledger.entries(*GroupState):
            self._ledger.drop(entry.id, reason)

    def drop_running_as_stale(self, id: int, num_tokens: float) -> None:
        """Drop a group that was cancelled because it is too old; its episodes have a mean of `num_tokens` tokens."""
        self._drop_as_stale(self._tasks[id], id, num_tokens)

    def drop_ended_as_stale(self, group: Group) -> None:
        """Drop a group that was already too old when it ended."""
        self._drop_as_stale(group.task, group.id, mean_length(group))

    def sweep(self, decide: Callable[[Group], Verdict], *, outscored: Collection[int]) -> bool:
        """Drop ready and replayed groups that became too old. Returns whether a ready one was dropped.

        Groups in `outscored` ended in time and lost to better ones, so their tasks are not slow.
        """
        self._replay.sweep(decide)
        stale = self._ready.sweep(decide)
        for group in stale:
            self._drop_as_stale(group.task, group.id, mean_length(group), slow=group.id not in outscored)
        return bool(stale)

    def _drop_as_stale(self, task: Task, id: int, num_tokens: float, *, slow: bool = True) -> None:
        self._ledger.drop(id, Drop.STALE)
        self._urgent.discard(id)
        self.stats.add_ended(num_tokens, stale=True)
        if slow and self._slow.dropped(task.id):
            self._retries.append(task)

    def give_up(self, id: int, reason: str, text: str) -> RolloutError | None:
        """Drop a useless group. Returns the error that ends the run when there were too many in a row."""
        logger.debug("group %d dropped (%s): %s", id, reason, text)
        self._ledger.drop(id, reason)
        return self._drops.add(reason, text)

    # --- metrics and checkpoint --------------------------------------------------------------------------------------

    def metrics(self, *, version: int) -> dict[str, float]:
        """Return counts since the last call, lags of the tokens taken since then, and how many groups run and wait."""
        totals, counts, stats = self._ledger.totals, self._ledger.counts, self.stats
        since = {name: float(total - self._reported.get(name, 0)) for name, total in totals.items()}
        self._reported, self.stats = totals, IntervalStats()
        values = since | stats.values()
        values |= {"running": float(counts.running), "ready": float(counts.ready), "version": float(version)}
        return {f"rollout/{name}": value for name, value in values.items()}

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Capture the groups: references to values that never change, copies of those that do. Calling the result
        encodes them as JSON."""
        small = {
            "ledger": self._ledger.state_dict(),
            "slow": self._slow.state_dict(),
            "urgent": sorted(self._urgent),
            "drops": self._drops.state_dict(),
        }
        ready, replay = self._ready.snapshot(), self._replay.snapshot()
        running, retries = sorted(self._tasks.items()), tuple(self._retries)
        return lambda: {
            **small,
            "ready": ready(),
            "replay": replay(),
            "running": [{"id": id, "task": to_json(task)} for id, task in running],
            "again": [to_json(task) for task in retries],
        }

    def stats_state(self) -> dict[str, Any]:
        """Return the reported counts and the unreported statistics as JSON."""
        return {"reported": dict(self._reported), "window": self.stats.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` and `stats_state` gave together. Raises CheckpointError when that is not readable."""
        with boundary(CheckpointError, "the rollout state in the checkpoint cannot be read"):
            self._ledger.load_state_dict(state["ledger"])
            self._ready.load_state_dict(state["ready"])
            self._replay.load_state_dict(state["replay"])
            self._tasks = {int(entry["id"]): from_json(entry["task"], Task) for entry in state["running"]}
            self._retries = deque(from_json(entry, Task) for entry in state["again"])
            self._slow.load_state_dict(state["slow"])
            self._urgent = {int(id) for id in state["urgent"]}
            self._drops.load_state_dict(state["drops"])
            totals = self._ledger.totals  # on the real clock, some of what was reported happens again
            reported = {str(name): int(total) for name, total in state["reported"].items()}
            self._reported = {name: min(total, totals.get(name, 0)) for name, total in reported.items()}
            self.stats = IntervalStats.from_state(state["window"])
            ready = [entry.id for entry in self._ledger.entries(GroupState.READY)]
            if ready != sorted(group.id for group in self._ready):
                raise CheckpointError(f"the ledger lists the ready groups {ready} and other groups are stored")

    def drop_unresumable(self, partial_rollouts: PartialRollouts | None) -> None:
        """Drop, after a restart, groups that were in training, or that ran and cannot be resumed."""
        for entry in self._ledger.entries(GroupState.RUNNING, GroupState.TRAINING):
            resumable = partial_rollouts is not None and partial_rollouts.resumable(entry.id)
            if entry.state is GroupState.TRAINING or not resumable:
                self._tasks.pop(entry.id, None)
                if partial_rollouts is not None:
                    partial_rollouts.close(entry.id)
                self._ledger.drop(entry.id, Drop.RESUME)
