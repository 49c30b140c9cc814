"""All that an executor knows of its groups, which is also all that it saves of itself.

Which group is in which state, what waits, what may be trained again, which tasks are tried again and which are slow,
and the figures since the last report. Knows no clock, no sampler and nothing of how groups are played.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.errors import CheckpointError, RolloutError, boundary
from headrace.rollout.buffer import ReadyBuffer
from headrace.rollout.failures import DropsInARow
from headrace.rollout.group_json import from_json, to_json
from headrace.rollout.journal import Journals
from headrace.rollout.ledger import Drop, Ledger, State, Ticket
from headrace.rollout.replay import ReplayBuffer
from headrace.rollout.slow import SlowTasks
from headrace.rollout.window import Window, mean_length
from headrace.types import Group, Task

logger = logging.getLogger(__name__)


class Books:
    """`max_live` groups at most, `max_replayed` kept to be trained again; `max_drops` given up in a row end the run."""

    def __init__(self, *, max_live: int, max_replayed: int, max_drops: int) -> None:
        self.ledger = Ledger()
        self.ready = ReadyBuffer(max_groups=max_live)
        self.replay = ReplayBuffer(max_groups=max_replayed)
        self.tasks: dict[int, Task] = {}  # of running groups
        self.again: deque[Task] = deque()  # dropped as stale, to be tried before new ones
        self.slow = SlowTasks()
        self.urgent: set[int] = set()  # ready groups that a publish waited for
        self.window = Window()
        self._drops = DropsInARow(limit=max_drops)
        self._reported: dict[str, int] = {}

    # --- what happens to a group -------------------------------------------------------------------------------------

    def start(self, task: Task, *, version: int) -> Ticket:
        ticket = self.ledger.start(task.id, version=version)
        self.tasks[ticket.id] = task
        return ticket

    def keep(self, group: Group) -> None:
        """It has ended and may be trained."""
        self.ledger.ready(group.id)
        self.ready.put(group)
        self._drops.clear()
        self.slow.ended(group.task.id)
        self.window.end(mean_length(group), stale=False)

    def take(self, ids: Iterable[int]) -> tuple[Group, ...]:
        """Ready groups go into training."""
        groups = self.ready.take(ids)
        self.urgent -= {group.id for group in groups}
        self.ledger.take(group.id for group in groups)
        return groups

    def drop_stale(self, task: Task, id: int, num_tokens: float, *, slow: bool = True) -> None:
        """A group with episodes of `num_tokens` tokens on average is too old, and its task may be tried again.
        Not `slow`: it was there in time and others were better."""
        self.ledger.drop(id, Drop.STALE)
        self.urgent.discard(id)
        self.window.end(num_tokens, stale=True)
        if slow and self.slow.dropped(task.id):
            self.again.append(task)

    def give_up(self, id: int, reason: str, text: str) -> RolloutError | None:
        """Drop a group that is of no use; when that were too many in a row, the error that ends the run."""
        logger.debug("group %d dropped (%s): %s", id, reason, text)
        self.ledger.drop(id, reason)
        return self._drops.note(reason, text)

    # --- what is reported and saved ----------------------------------------------------------------------------------

    def metrics(self, *, version: int) -> dict[str, float]:
        """Counts since the last call, lag of the tokens taken since then, and how many groups run and wait now."""
        totals, counts, window = self.ledger.totals, self.ledger.counts, self.window
        since = {name: float(total - self._reported.get(name, 0)) for name, total in totals.items()}
        self._reported, self.window = totals, Window()
        values = since | window.values()
        values |= {"running": float(counts.running), "ready": float(counts.ready), "version": float(version)}
        return {f"rollout/{name}": value for name, value in values.items()}

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The groups of now: references to values that never change, and copies of what does. JSON by the call."""
        counts = {
            "ledger": self.ledger.state_dict(),
            "slow": self.slow.state_dict(),
            "urgent": sorted(self.urgent),
            "drops": self._drops.state_dict(),
        }
        ready, replay = self.ready.snapshot(), self.replay.snapshot()
        running, again = sorted(self.tasks.items()), tuple(self.again)
        return lambda: {
            **counts,
            "ready": ready(),
            "replay": replay(),
            "running": [{"id": id, "task": to_json(task)} for id, task in running],
            "again": [to_json(task) for task in again],
        }

    def figures(self) -> dict[str, Any]:
        """What was reported and what is to be, as JSON."""
        return {"reported": dict(self._reported), "window": self.window.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`snapshot` and `figures` together. Raises CheckpointError when they are not."""
        with boundary(CheckpointError, "the rollout state in the checkpoint cannot be read"):
            self.ledger.load_state_dict(state["ledger"])
            self.ready.load_state_dict(state["ready"])
            self.replay.load_state_dict(state["replay"])
            self.tasks = {int(entry["id"]): from_json(entry["task"], Task) for entry in state["running"]}
            self.again = deque(from_json(entry, Task) for entry in state["again"])
            self.slow.load_state_dict(state["slow"])
            self.urgent = {int(id) for id in state["urgent"]}
            self._drops.load_state_dict(state["drops"])
            totals = self.ledger.totals  # where the clock is real, some of what was reported comes again
            reported = {str(name): int(total) for name, total in state["reported"].items()}
            self._reported = {name: min(total, totals.get(name, 0)) for name, total in reported.items()}
            self.window = Window.from_state(state["window"])
            ready = [ticket.id for ticket in self.ledger.tickets(State.READY)]
            if ready != sorted(group.id for group in self.ready):
                raise CheckpointError(f"the ledger lists the ready groups {ready} and other groups are stored")

    def forget_unresumable(self, journals: Journals | None) -> None:
        """Groups that trained, or that ran and cannot be taken up from their journals, are dropped (resume)."""
        for ticket in self.ledger.tickets(State.RUNNING, State.TRAINING):
            if ticket.state is State.TRAINING or journals is None or not journals.resumable(ticket.id):
                self.tasks.pop(ticket.id, None)
                if journals is not None:
                    journals.close(ticket.id)
                self.ledger.drop(ticket.id, Drop.RESUME)
