"""The ledger as a state machine: conservation, legal moves, and a capacity that neither leaks nor inflates."""

import json

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.algo.staleness import LiveCounts
from headrace.rollout.executor.admission import Admission
from headrace.rollout.executor.ledger import Drop, GroupState, Ledger

REASONS = [*Drop, "filtered_reward_spread"]


class LedgerMachine(RuleBasedStateMachine):
    """A model that counts every group by hand, against the ledger and the admission rule over it."""

    @initialize(batch=st.integers(1, 4), eta=st.integers(0, 3), running=st.integers(1, 20))
    def begin(self, batch: int, eta: int, running: int) -> None:
        self.batch, self.eta, self.max_running = batch, eta, running
        self.ledger = Ledger()
        self.admission = Admission(batch_groups=batch, max_staleness=eta, max_running=running)
        self.states: dict[int, str] = {}  # of every group ever
        self.version = 0

    def ids(self, *states: str) -> list[int]:
        return [id for id, state in self.states.items() if state in states]

    def capacity(self) -> int:
        return self.admission.capacity(self.ledger.counts, batch_open=True)

    @rule(wanted=st.integers(1, 6))
    def start(self, wanted: int) -> None:
        for _ in range(min(wanted, self.capacity())):
            entry = self.ledger.start("t", version=self.version)
            assert entry.id not in self.states, "ids are never used twice"
            self.states[entry.id] = "running"
            counts = self.ledger.counts  # I3: right after an admission
            assert counts.running <= self.max_running
            assert counts.live <= (self.eta + 1) * self.batch

    @precondition(lambda self: self.ids("running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids("running")))
        self.ledger.ready(id)
        self.states[id] = "ready"

    @precondition(lambda self: self.ids("running", "ready", "training"))
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def drop(self, data: st.DataObject, reason: str) -> None:
        id = data.draw(st.sampled_from(self.ids("running", "ready", "training")))
        self.ledger.drop(id, reason)
        self.states[id] = f"dropped {reason}"

    @precondition(lambda self: len(self.ids("ready")) >= self.batch)
    @rule()
    def take(self) -> None:
        ids = self.ids("ready")[: self.batch]
        self.ledger.take(ids)
        self.states |= dict.fromkeys(ids, "training")

    @rule()
    def consume_and_publish(self) -> None:
        ids = self.ids("training")
        self.ledger.consume(ids)
        self.states |= dict.fromkeys(ids, "consumed")
        self.version += 1

    @rule()
    def save_and_load(self) -> None:
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self.ledger = Ledger()
        self.ledger.load_state_dict(state)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def no_illegal_move_is_taken(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.states)))
        moves = {
            "running": lambda: self.ledger.ready(id),
            "ready": lambda: self.ledger.take([id]),
            "training": lambda: self.ledger.consume([id]),
        }
        for state in moves.keys() - {self.states[id]}:
            with pytest.raises(AssertionError):
                moves[state]()
        if self.states[id].startswith(("dropped", "consumed")):  # I2: terminal states are never left
            with pytest.raises(AssertionError):
                self.ledger.drop(id, Drop.FAILED)

    @invariant()
    def conservation(self) -> None:  # I1
        if not hasattr(self, "ledger"):
            return
        counts, totals = self.ledger.counts, self.ledger.totals
        for state in GroupState:
            assert [entry.id for entry in self.ledger.entries(state)] == sorted(self.ids(state))
        assert counts == LiveCounts(
            running=len(self.ids("running")), ready=len(self.ids("ready")), training=len(self.ids("training"))
        )
        assert totals["started"] == len(self.states)
        assert totals["consumed"] == len(self.ids("consumed"))
        for reason in REASONS:
            name = f"dropped_{reason}" if reason in set(Drop) else reason
            assert totals.get(name, 0) == len(self.ids(f"dropped {reason}"))

    @invariant()
    def capacity_neither_leaks_nor_inflates(self) -> None:  # I4, I5
        if not hasattr(self, "ledger"):
            return
        full = min(self.max_running, (self.eta + 1) * self.batch)
        assert self.capacity() <= full
        if not self.ids("running", "ready", "training"):
            assert self.capacity() == full


TestLedger = LedgerMachine.TestCase


def test_unknown_reason_is_our_bug() -> None:
    ledger = Ledger()
    ledger.start("t", version=0)
    with pytest.raises(AssertionError, match="no reason"):
        ledger.drop(0, "because")
    assert ledger.counts.running == 1


def test_state_that_does_not_add_up_is_refused() -> None:
    ledger = Ledger()
    ledger.start("t", version=3)
    state = ledger.state_dict()
    assert state["live"] == [{"id": 0, "task_id": "t", "started_version": 3, "state": "running"}]
    with pytest.raises(AssertionError):
        Ledger().load_state_dict(state | {"consumed": 1})
