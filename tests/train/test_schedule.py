"""The learning rate against numbers worked out by hand, and what holds for every schedule."""

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.train import schedule
from headrace.train.schedule import ScheduleType, learning_rate, make_schedule

TYPES: tuple[ScheduleType, ...] = ("constant", "linear", "cosine")


def rates(steps: int, **settings: object) -> list[float]:
    made = make_schedule(steps, **settings)  # type: ignore[arg-type]
    return [made(step) for step in range(steps)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(3, peak=0.5) == [0.5, 0.5, 0.5]


def test_warm_up_rises_evenly_and_reaches_the_peak_on_its_step() -> None:
    # warmup_steps = 3: 1/4, 2/4, 3/4 of the peak, then the peak at step 3
    assert rates(5, peak=2.0, warmup_steps=3) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_to_final_times_peak_on_the_last_step() -> None:
    # from 1 to 0.2 over four intervals: 0.2 apart
    assert rates(5, peak=1.0, type="linear", final=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_after_warm_up() -> None:
    # warm-up step 0 at 1/2; then 4 -> 0 over steps 1..5, p = 0, 1/4, 1/2, 3/4, 1
    assert rates(6, peak=4.0, type="linear", warmup_steps=1) == pytest.approx([2.0, 4.0, 3.0, 2.0, 1.0, 0.0])


def test_cosine_at_thirds() -> None:
    # p = 0, 1/3, 2/3, 1: (1 + cos) / 2 = 1, 3/4, 1/4, 0
    assert rates(4, peak=1.0, type="cosine") == pytest.approx([1.0, 0.75, 0.25, 0.0])
    # with final = 0.5 the range is halved and lifted: 0.5 + 0.5 * the above
    assert rates(4, peak=2.0, type="cosine", final=0.5) == pytest.approx([2.0, 1.75, 1.25, 1.0])


def test_one_step_is_trained_at_the_peak() -> None:
    for type in TYPES:
        assert rates(1, peak=3.0, type=type) == [3.0]


def test_steps_beyond_the_last_stay_at_the_end_value() -> None:
    assert learning_rate(99, 4, peak=1.0, type="linear", final=0.25) == pytest.approx(0.25)
    assert learning_rate(99, 4, peak=1.0, type="cosine", final=0.25) == pytest.approx(0.25)


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(2, peak=1.0, type="cosine", warmup_steps=3) == [0.25, 0.5]


@given(
    total=st.integers(1, 200),
    warmup_steps=st.integers(0, 250),
    final=st.floats(0, 1),
    peak=st.floats(1e-8, 10),
    type=st.sampled_from(TYPES),
)
def test_every_schedule_rises_then_falls_within_its_bounds(
    total: int, warmup_steps: int, final: float, peak: float, type: ScheduleType
) -> None:
    values = rates(total, peak=peak, type=type, warmup_steps=warmup_steps, final=final)
    slack = 1e-12 * peak
    rising, falling = values[: warmup_steps + 1], values[warmup_steps:]
    assert all(0.0 < low < high for low, high in itertools.pairwise(rising))
    assert all(low <= high + slack for high, low in itertools.pairwise(falling))
    assert all(final * peak - slack <= value <= peak + slack for value in falling)
    if len(falling) > 1:
        assert falling[0] == pytest.approx(peak)
        assert falling[-1] == pytest.approx(peak if type == "constant" else final * peak, abs=slack)


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(schedule).failed == 0
    assert doctest.testmod(schedule).attempted == 2
