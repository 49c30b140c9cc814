r"""Count groups: every group is in exactly one state, and every drop has a reason.

    start -> RUNNING -> READY -> TRAINING -> consumed
                  \        \         \-----> dropped(reason)
                   \        \--------------> dropped(reason)
                    \----------------------> dropped(reason)

Ids are 0, 1, 2, ... over the whole run, across checkpoints. Always: started = live + consumed + dropped. Only live
groups are kept, so memory does not grow with the run. A transition that is not in the drawing is our bug: it asserts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.algo.staleness import LiveCounts


class GroupState(StrEnum):
    """Name the states of a live group."""

    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"


class Drop(StrEnum):
    """Name why a group was dropped; a filter's rejection is named `filtered_<its reason>` instead."""

    FAILED = "failed"  # it raised, or too few of its episodes are valid
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    STALE = "stale"
    SURPLUS = "surplus"  # more were started than the batch needed, and none may wait for the next
    SHUTDOWN = "shutdown"
    RESUME = "resume"  # it was in flight when the checkpoint was written


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """Hold what the ledger knows of one live group. The field names are those of checkpoints."""

    id: int
    task_id: str
    started_version: int
    state: GroupState = GroupState.RUNNING


class Ledger:
    """Own the entries of all live groups, and the lifetime counts of all others."""

    def __init__(self) -> None:
        self._live: dict[int, GroupEntry] = {}
        self._ids: dict[GroupState, set[int]] = {state: set() for state in GroupState}  # of the live groups, by state
        self._started = 0
        self._consumed = 0
        self._dropped: Counter[str] = Counter()

    @property
    def counts(self) -> LiveCounts:
        """Return how many groups are in each state."""
        ids = self._ids
        return LiveCounts(
            running=len(ids[GroupState.RUNNING]),
            ready=len(ids[GroupState.READY]),
            training=len(ids[GroupState.TRAINING]),
        )

    @property
    def totals(self) -> dict[str, int]:
        """Return lifetime counts: started, consumed, `dropped_<reason>` for every reason, and `filtered_<reason>`."""
        dropped = {f"dropped_{reason}": self._dropped[reason] for reason in Drop}
        filtered = {reason: count for reason, count in sorted(self._dropped.items()) if reason not in set(Drop)}
        return {"started": self._started, "consumed": self._consumed, **dropped, **filtered}

    def entry(self, id: int) -> GroupEntry:
        """Return the entry of a live group."""
        assert id in self._live, f"group {id} is not live"
        return self._live[id]

    def entries(self, *states: GroupState) -> tuple[GroupEntry, ...]:
        """Return the entries of groups in these states, by id."""
        return tuple(self._live[id] for id in sorted(set().union(*(self._ids[state] for state in states))))

    def ids(self, state: GroupState) -> frozenset[int]:
        """Return the ids of groups in this state."""
        return frozenset(self._ids[state])

    def start(self, task_id: str, *, version: int) -> GroupEntry:
        """Count a new running group."""
        entry = GroupEntry(id=self._started, task_id=task_id, started_version=version)
        self._started += 1
        self._add(entry)
        return entry

    def ready(self, id: int) -> None:
        """Count a running group as ready."""
        self._move(id, GroupState.RUNNING, GroupState.READY)

    def take(self, ids: Iterable[int]) -> None:
        """Count ready groups as in training."""
        for id in ids:
            self._move(id, GroupState.READY, GroupState.TRAINING)

    def consume(self, ids: Iterable[int]) -> None:
        """Count groups in training as consumed."""
        for id in ids:
            assert self.entry(id).state is GroupState.TRAINING, f"group {id} is {self.entry(id).state}, not in training"
            self._remove(id)
            self._consumed += 1
        self.check()

    def drop(self, id: int, reason: str) -> None:
        """Count a live group as dropped; `reason` is a `Drop` or `filtered_<reason>`."""
        assert reason in set(Drop) or reason.startswith("filtered_"), f"{reason!r} is no reason"
        self._remove(id)
        self._dropped[reason] += 1
        self.check()

    def _move(self, id: int, before: GroupState, after: GroupState) -> None:
        entry = self.entry(id)
        assert entry.state is before, f"group {id} is {entry.state}; only a {before} group becomes {after}"
        self._remove(id)
        self._add(GroupEntry(id=id, task_id=entry.task_id, started_version=entry.started_version, state=after))
        self.check()

    def _add(self, entry: GroupEntry) -> None:
        self._live[entry.id] = entry
        self._ids[entry.state].add(entry.id)

    def _remove(self, id: int) -> None:
        entry = self.entry(id)
        del self._live[id]
        self._ids[entry.state].remove(id)

    def check(self) -> None:
        """Assert conservation: no group is lost, none counted twice."""
        assert self._started == len(self._live) + self._consumed + self._dropped.total()
        assert len(self._live) == self.counts.live

    def state_dict(self) -> dict[str, Any]:
        return {
            "started": self._started,
            "consumed": self._consumed,
            "dropped": dict(sorted(self._dropped.items())),
            "live": [
                {"id": e.id, "task_id": e.task_id, "started_version": e.started_version, "state": e.state}
                for e in self.entries(*GroupState)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        live = [GroupEntry(**{**saved, "state": GroupState(saved["state"])}) for saved in state["live"]]
        self._started, self._consumed = int(state["started"]), int(state["consumed"])
        self._dropped = Counter({str(reason): int(count) for reason, count in state["dropped"].items()})
        self._live, self._ids = {}, {state: set() for state in GroupState}
        for entry in live:
            self._add(entry)
        self.check()
