"""The statistics of bench/soak.py: what grows is told from what only varies, by the bound that a soak is held to."""

import importlib.util
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.paths import ROOT

MINUTES = 30


@pytest.fixture(scope="module")
def soak() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        spec = importlib.util.spec_from_file_location("soak", ROOT / "bench" / "soak.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def seen(value: Callable[[float], float]) -> tuple[list[float], list[float]]:
    """What a process was seen to have, once a second for half an hour, by minutes."""
    times = [float(second) for second in range(60 * MINUTES)]
    return times, [value(second / 60) for second in times]


def test_a_straight_line_has_its_slope_and_no_interval(soak: Any) -> None:
    # 1000 MiB and 1 MiB a minute: 1440 MiB a day; the mean of the minima of the last 15 minutes is 1022 MiB
    grown = soak.growth(*seen(lambda minute: 1000.0 + minute))
    assert grown["mean"] == pytest.approx(1022, abs=0.1)
    assert grown["per_day"] == pytest.approx(100 * 1440 / 1022, rel=1e-3)
    assert grown["bound"] == pytest.approx(grown["per_day"], abs=0.01)
    assert not soak.is_steady([grown["bound"]], [])


def test_garbage_that_comes_and_goes_is_no_growth_and_a_leak_behind_it_is(soak: Any) -> None:
    luck = random.Random(3)
    _, still = seen(lambda minute: 500.0 + 80.0 * luck.random())
    times, leaking = seen(lambda minute: 500.0 + 80.0 * luck.random() + minute)
    assert soak.growth(times, leaking)["bound"] > soak.BAR_PERCENT
    assert abs(soak.growth(times, still)["per_day"]) < 100 * 1440 / 500, "a leak of 1 MiB a minute is far above"


def test_what_varies_widens_the_bound_and_warm_up_does_not_count(soak: Any) -> None:
    luck = random.Random(5)
    jumps = [10.0 * luck.random() for _ in range(MINUTES)]
    varying = soak.growth(*seen(lambda minute: 500.0 + jumps[int(minute)]))
    assert varying["bound"] > varying["per_day"] + soak.BAR_PERCENT, "half an hour cannot tell that this does not grow"
    warm = soak.growth(*seen(lambda minute: min(500.0, 100.0 + 40 * minute)))
    assert (warm["per_day"], warm["bound"]) == (0.0, 0.0)
    assert soak.is_steady([warm["bound"]], [{"ratio": 1.1}])


def test_a_worker_that_is_missing_for_a_moment_is_no_growth_and_one_more_every_minute_is(soak: Any) -> None:
    counted = statistics.median_low
    replaced = soak.growth(*seen(lambda minute: 7.0 if 17.0 < minute < 17.2 else 9.0), counted)
    assert replaced["bound"] == 0.0
    times, left_over = seen(lambda minute: 9.0)
    assert soak.growth([*times, 60.0 * MINUTES], [*left_over, 12.0], counted)["bound"] == 0.0, "one look is no minute"
    assert soak.growth(*seen(lambda minute: 9.0 + int(minute)), counted)["bound"] > soak.BAR_PERCENT


@pytest.mark.parametrize(("late", "steady"), [(0.1, True), (0.12, True), (0.2, False)])
def test_latency_is_compared_late_and_earlier(soak: Any, late: float, steady: bool) -> None:
    latencies = [(float(second), 5.0 if second < 600 else 0.1 if second < 1200 else late) for second in range(1800)]
    drift = soak.drift(latencies)
    assert drift["ratio"] == pytest.approx(late / 0.1, rel=0.02)
    assert soak.is_steady([0.0], [drift]) == steady
    assert not soak.is_steady([0.0], [soak.drift([])]), "nothing was measured"
