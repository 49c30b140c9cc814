r"""The one place that counts groups: every ticket is in exactly one state, and every drop has a reason.

    start -> RUNNING -> READY -> TRAINING -> consumed
                  \        \         \-----> dropped(reason)
                   \        \--------------> dropped(reason)
                    \----------------------> dropped(reason)

Ids are 0, 1, 2, ... over the whole run, across checkpoints. Always: started = live + consumed + dropped. Only live
tickets are kept, so memory does not grow with the run. A transition that is not in the drawing is our bug: it asserts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.algo.staleness import Counts


class State(StrEnum):
    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"


class Drop(StrEnum):
    """Why a group was given up; a filter's rejection is named `filtered_<its reason>` instead."""

    FAILED = "failed"  # it raised, or too few of its episodes are valid
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    STALE = "stale"
    SURPLUS = "surplus"  # more were started than the batch needed, and none may wait for the next
    SHUTDOWN = "shutdown"
    RESUME = "resume"  # it was in flight when the checkpoint was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    id: int
    task_id: str
    started_version: int
    state: State = State.RUNNING


class Ledger:
    """Owns the tickets of all groups."""

    def __init__(self) -> None:
        self._live: dict[int, Ticket] = {}
        self._started = 0
        self._consumed = 0
        self._dropped: Counter[str] = Counter()

    @property
    def counts(self) -> Counts:
        states = Counter(ticket.state for ticket in self._live.values())
        return Counts(running=states[State.RUNNING], ready=states[State.READY], training=states[State.TRAINING])

    @property
    def totals(self) -> dict[str, int]:
        """Lifetime counts by name: started, consumed, `dropped_<reason>` for every reason, and `filtered_<reason>`."""
        dropped = {f"dropped_{reason}": self._dropped[reason] for reason in Drop}
        filtered = {reason: count for reason, count in sorted(self._dropped.items()) if reason not in set(Drop)}
        return {"started": self._started, "consumed": self._consumed, **dropped, **filtered}

    def ticket(self, id: int) -> Ticket:
        assert id in self._live, f"group {id} is not live"
        return self._live[id]

    def tickets(self, *states: State) -> tuple[Ticket, ...]:
        """Live tickets in these states, by id."""
        return tuple(self._live[id] for id in sorted(self._live) if self._live[id].state in states)

    def start(self, task_id: str, *, version: int) -> Ticket:
        ticket = Ticket(id=self._started, task_id=task_id, started_version=version)
        self._started += 1
        self._live[ticket.id] = ticket
        return ticket

    def ready(self, id: int) -> None:
        self._move(id, State.RUNNING, State.READY)

    def take(self, ids: Iterable[int]) -> None:
        for id in ids:
            self._move(id, State.READY, State.TRAINING)

    def consume(self, ids: Iterable[int]) -> None:
        for id in ids:
            assert self.ticket(id).state is State.TRAINING, f"group {id} is {self.ticket(id).state}, not in training"
            del self._live[id]
            self._consumed += 1
        self.check()

    def drop(self, id: int, reason: str) -> None:
        """`reason` is a `Drop` or `filtered_<reason>`."""
        assert reason in set(Drop) or reason.startswith("filtered_"), f"{reason!r} is no reason"
        self.ticket(id)
        del self._live[id]
        self._dropped[reason] += 1
        self.check()

    def _move(self, id: int, before: State, after: State) -> None:
        ticket = self.ticket(id)
        assert ticket.state is before, f"group {id} is {ticket.state}; only a {before} group becomes {after}"
        self._live[id] = replace(ticket, state=after)
        self.check()

    def check(self) -> None:
        """Conservation: no group is lost, none counted twice."""
        assert self._started == len(self._live) + self._consumed + self._dropped.total()

    def state_dict(self) -> dict[str, Any]:
        return {
            "started": self._started,
            "consumed": self._consumed,
            "dropped": dict(sorted(self._dropped.items())),
            "live": [asdict(ticket) for ticket in self.tickets(*State)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        live = [Ticket(**{**entry, "state": State(entry["state"])}) for entry in state["live"]]
        self._started, self._consumed = int(state["started"]), int(state["consumed"])
        self._dropped = Counter({str(reason): int(count) for reason, count in state["dropped"].items()})
        self._live = {ticket.id: ticket for ticket in live}
        self.check()
