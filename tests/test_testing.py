"""The loop that does not wait: order and instants as on a real clock, and a hang is an error."""

import asyncio

import pytest

from headrace.testing import Deadlock, run_virtual


def test_timers_fire_in_their_order_and_cost_no_time() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(note("late", 5000.0), note("early", 0.5), note("middle", 20.0))

    run_virtual(main())  # on a real clock it would take more than an hour
    assert [name for name, _ in seen] == ["early", "middle", "late"]
    assert [at for _, at in seen] == pytest.approx([0.5, 20.0, 5000.0])


def test_timeouts_are_of_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.sleep(601)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(600)


def test_a_hang_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        asyncio.current_task().set_name("the one that waits")  # type: ignore[union-attr]
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="the one that waits"):
        run_virtual(main())
