"""The ledger counts groups by state in constant time, and agrees with its entries after every transition."""

from headrace.rollout.executor.ledger import Drop, GroupState, Ledger


def counted(ledger: Ledger) -> list[int]:
    counts = ledger.counts
    for state, count in zip(GroupState, (counts.running, counts.ready, counts.training), strict=True):
        assert [entry.id for entry in ledger.entries(state)] == sorted(ledger.ids(state))
        assert len(ledger.ids(state)) == count
    return [counts.running, counts.ready, counts.training]


def test_counts_follow_every_transition_and_a_reload() -> None:
    ledger = Ledger()
    for number in range(5):
        ledger.start(f"t{number}", version=0)
    assert counted(ledger) == [5, 0, 0]
    for id in (3, 1, 2):
        ledger.ready(id)
    ledger.take([1, 3])
    assert counted(ledger) == [2, 1, 2]
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert counted(again) == [2, 1, 2]
    assert again.entries(*GroupState) == ledger.entries(*GroupState)
    ledger.consume([1])
    ledger.drop(2, Drop.STALE)
    ledger.drop(0, Drop.FAILED)
    assert counted(ledger) == [1, 0, 1]
    assert [entry.id for entry in ledger.entries(*GroupState)] == [3, 4]
