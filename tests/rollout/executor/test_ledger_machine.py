"""Every order of events that a ledger can see, against a model of a few lines, and the capacity that follows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.staleness import LiveCounts, capacity
from support.ledger_machine import LedgerMachine

TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 5),
    moves=st.lists(st.sampled_from(["start", "end", "train"]), max_size=80),
)
def test_counting_live_groups_is_areals_formula_when_nothing_is_dropped(eta: int, batch: int, moves: list[str]) -> None:
    # (eta + version + 1) B - accepted - running = (eta + 1) B - live, for a fixed batch (arXiv 2505.24298, eq. 3)
    running = ready = accepted = version = 0
    for move in moves:
        counts = LiveCounts(running=running, ready=ready)
        room = capacity(counts, batch_groups=batch, max_staleness=eta, max_running=10**6)
        assert room == (eta + version + 1) * batch - accepted - running
        if move == "start" and room > 0:
            running += 1
        elif move == "end" and running:
            running, ready, accepted = running - 1, ready + 1, accepted + 1
        elif move == "train" and ready >= batch:
            ready, version = ready - batch, version + 1
