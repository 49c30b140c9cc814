"""Every order of events that a ledger can see, against a model of a few lines."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.rollout.executor.admission import Admission
from headrace.rollout.executor.ledger import Drop, GroupState, Ledger


class LedgerMachine(RuleBasedStateMachine):
    """The model: a dictionary of live ids to states, and two counts. `ledger_class` and `admission_class` are what a
    test may plant a fault in."""

    ledger_class: type[Ledger] = Ledger
    admission_class: type[Admission] = Admission

    @initialize(eta=st.integers(0, 3), batch=st.integers(1, 4), concurrency=st.integers(1, 12), lower=st.integers(0, 9))
    def begin(self, eta: int, batch: int, concurrency: int, lower: int) -> None:
        self.eta, self.batch, self.concurrency = eta, batch, concurrency
        self.limit = 100 - lower  # of a user: never in the way, so it may change nothing
        self.ledger, self.admission = self.ledger_class(), self._admission()
        self.live: dict[int, GroupState] = {}
        self.started = self.consumed = self.dropped = self.version = 0
        self.first_version: dict[int, int] = {}

    def _admission(self) -> Admission:
        return self.admission_class(
            batch_groups=self.batch,
            max_staleness=self.eta,
            max_running=self.concurrency,
            limits=(lambda counts: self.limit,),
        )

    def _ids(self, *states: GroupState) -> list[int]:
        return [id for id, state in sorted(self.live.items()) if state in states]

    # --- events ------------------------------------------------------------------------------------------------------

    @rule()
    def admit(self) -> None:
        for _ in range(self.admission.capacity(self.ledger.counts, batch_open=True)):
            entry = self.ledger.start(f"t{self.started}", version=self.version)
            assert entry.id == self.started, "ids are counted up and never used again"
            self.live[entry.id] = GroupState.RUNNING
            self.first_version[entry.id] = self.version
            self.started += 1
        assert len(self._ids(GroupState.RUNNING)) <= self.concurrency  # I3
        assert len(self.live) <= (self.eta + 1) * self.batch  # I3

    @precondition(lambda self: self._ids(GroupState.RUNNING))
    @rule(data=st.data(), ending=st.sampled_from(["ready", Drop.FAILED, Drop.TIMEOUT, "filtered_length"]))
    def end(self, data: Any, ending: str) -> None:
        id = data.draw(st.sampled_from(self._ids(GroupState.RUNNING)))
        if ending == "ready":
            self.ledger.ready(id)
            self.live[id] = GroupState.READY
        else:
            self._drop(id, ending)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from([Drop.CANCELLED, Drop.STALE]))
    def lose(self, data: Any, reason: str) -> None:
        self._drop(data.draw(st.sampled_from(sorted(self.live))), reason)

    def _drop(self, id: int, reason: str) -> None:
        self.ledger.drop(id, reason)
        del self.live[id]
        self.dropped += 1

    @precondition(lambda self: len(self._ids(GroupState.READY)) >= self.batch and not self._ids(GroupState.TRAINING))
    @rule()
    def take(self) -> None:
        ids = self._ids(GroupState.READY)[: self.batch]
        self.ledger.take(ids)
        self.live |= dict.fromkeys(ids, GroupState.TRAINING)

    @precondition(lambda self: self._ids(GroupState.TRAINING))
    @rule()
    def train_and_publish(self) -> None:
        ids = self._ids(GroupState.TRAINING)
        self.ledger.consume(ids)
        for id in ids:
            del self.live[id]
        self.consumed += len(ids)
        self.version += 1

    @rule()
    def save_and_load(self) -> None:
        restored, self.admission = self.ledger_class(), self._admission()
        restored.load_state_dict(self.ledger.state_dict())
        self.ledger = restored

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def an_illegal_move_is_our_bug(self, data: Any) -> None:
        id = data.draw(st.integers(0, self.started - 1))
        state = self.live.get(id)
        if state is not GroupState.RUNNING:
            with pytest.raises(AssertionError):
                self.ledger.ready(id)
        if state is not GroupState.TRAINING:
            with pytest.raises(AssertionError):
                self.ledger.consume([id])
        if state is None:
            with pytest.raises(AssertionError):
                self.ledger.drop(id, Drop.FAILED)

    @precondition(lambda self: self.live)
    @rule()
    def everything_ends_and_all_room_is_back(self) -> None:
        for id in sorted(self.live):
            self._drop(id, Drop.CANCELLED)
        free = self.admission.capacity(self.ledger.counts, batch_open=True)
        assert free == min(self.concurrency, (self.eta + 1) * self.batch)  # I4

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_the_model(self) -> None:  # I1, I2, I10
        states = [list(self.live.values()).count(state) for state in GroupState]
        counts = self.ledger.counts
        assert [counts.running, counts.ready, counts.training] == states
        totals = self.ledger.totals
        dropped = sum(count for name, count in totals.items() if name.startswith(("dropped_", "filtered_")))
        assert (totals["started"], totals["consumed"], dropped) == (self.started, self.consumed, self.dropped)
        assert self.started == counts.live + self.consumed + self.dropped
        assert {entry.id: entry.state for entry in self.ledger.entries(*GroupState)} == self.live
        for entry in self.ledger.entries(*GroupState):
            assert entry.started_version == self.first_version[entry.id]

    @invariant()
    def capacity_is_within_all_limits(self) -> None:  # I3, I5
        running, live = len(self._ids(GroupState.RUNNING)), len(self.live)
        room = min(self.concurrency - running, (self.eta + 1) * self.batch - live)
        free = self.admission.capacity(self.ledger.counts, batch_open=True)
        assert free == max(0, room)
        assert free <= min(self.concurrency, (self.eta + 1) * self.batch)
