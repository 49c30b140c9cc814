"""Limits compose by minimum."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.staleness import LiveCounts
from headrace.rollout.executor.admission import Admission


@given(st.lists(st.integers(-5, 100), max_size=3))
def test_further_limits_only_lower_capacity(values: list[int]) -> None:
    limits = tuple((lambda counts, value=value: value) for value in values)
    admission = Admission(batch_groups=4, max_staleness=1, max_running=6, limits=limits)
    # free: min(6 - 1, 8 - 3) = 5
    got = admission.capacity(LiveCounts(running=1, ready=2), batch_open=True)
    assert got == max(0, min([5, *values]))


def test_limit_sees_the_counts() -> None:
    admission = Admission(batch_groups=4, max_staleness=0, limits=(lambda counts: 2 - counts.running,))
    assert admission.capacity(LiveCounts(), batch_open=True) == 2
    assert admission.capacity(LiveCounts(running=2), batch_open=True) == 0


def test_paused_admits_nothing_and_resumed_everything() -> None:
    admission = Admission(batch_groups=3, max_staleness=1)
    admission.paused = True
    assert admission.capacity(LiveCounts(), batch_open=True) == 0
    admission.paused = False
    assert admission.capacity(LiveCounts(), batch_open=True) == 6
