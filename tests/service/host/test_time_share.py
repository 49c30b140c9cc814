"""Training and sampling share one worker: neither waits for all of the other."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.service.host.time_share import TimeShare
from headrace.types import CROSS_ENTROPY
from support.adapter_hosts import LIMIT_S, STEP, bits, data, opened, request, same, sample, saved


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail_after(seconds: float, share: TimeShare, clock: Clock) -> None:
    with share.training():
        clock.now += seconds
        raise ValueError("failed")


def test_sampling_has_what_training_took() -> None:
    clock, given = Clock(), list[float]()

    def sample_for(seconds: float, read: Callable[[], float]) -> None:
        assert read is clock
        given.append(seconds)
        clock.now += seconds  # all of it is used

    share = TimeShare(sample_for, clock)
    with share.training():
        clock.now += 3
        share.between()
        clock.now += 2
        share.between()
        clock.now += 1
    with pytest.raises(ValueError, match="failed"):
        fail_after(7, share, clock)
    with share.training():
        pass
    with share.training():
        pass
    assert given == [0, 3, 2, 1, 7, 0]


async def train_long(host: AdapterHost, *, beside: bool) -> tuple[int, object]:
    """How many calls were open when the request ended, and what the one beside it sampled."""
    call = asyncio.create_task(host.sample("base", request(5))) if beside else None
    await asyncio.sleep(0)  # it is in the queue
    still_open: list[int] = []
    long = host.forward_backward("mine", data(1, count=60), CROSS_ENTROPY)
    long.add_done_callback(lambda _: still_open.append(len(host._engine._scheduler.open)))
    await asyncio.wrap_future(long)
    return still_open[0], None if call is None else bits(await call)


def test_a_long_request_lets_others_sample_and_neither_changes(tmp_path: Path) -> None:
    """One request of sixty micro-batches, and a sequence of twelve tokens that was asked for before it."""
    found = []
    for beside in (False, True):
        ticks = iter(range(10**9))
        with opened(micro_batch_tokens=12, clock=lambda ticks=ticks: float(next(ticks))) as host:  # type: ignore[misc]
            host.open_sampler("base", None).result(LIMIT_S)
            host.create("mine", AdapterSpec(rank=2)).result(LIMIT_S)
            expected = bits(sample(host, [("base", request(5))])[0])
            still_open, drawn = asyncio.run(train_long(host, beside=beside))
            assert still_open == 0, "sampling went on while it was trained"
            assert drawn == (expected if beside else None)
            host.optim_step("mine", STEP).result(LIMIT_S)
            found.append(saved(host, "mine", tmp_path / f"{beside}"))
    assert same(*found)
