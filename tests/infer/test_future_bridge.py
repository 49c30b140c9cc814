"""Answers from a thread reach the loop that waits, many at once, and none is lost or told twice."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import pytest

from headrace.infer.future_bridge import FutureBridge


async def test_all_answers_that_came_while_the_loop_was_busy_wake_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, loop, wakes = FutureBridge(), asyncio.get_running_loop(), list[object]()
    futures = [Future[int]() for _ in range(50)]
    waiting = [asyncio.ensure_future(bridge.answer(future)) for future in futures]
    await asyncio.sleep(0)
    real = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: wakes.append(call) or real(*call))

    def end_them() -> None:
        for number, future in enumerate(futures):
            future.set_result(number)

    thread = threading.Thread(target=end_them)
    thread.start()
    thread.join()  # this loop does nothing else meanwhile
    assert await asyncio.gather(*waiting) == list(range(50))
    assert len(wakes) == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_answers_that_are_collected_arrive_together_at_the_end_even_of_a_failure(fails: bool) -> None:
    bridge, futures = FutureBridge(), [Future[int]() for _ in range(3)]
    waiting = [asyncio.ensure_future(bridge.answer(future)) for future in futures]
    await asyncio.sleep(0)
    inside, go_on = threading.Event(), threading.Event()

    def end_them() -> None:
        with contextlib.suppress(ValueError), bridge.batch_replies():
            for number, future in enumerate(futures):
                future.set_result(number)
            inside.set()
            go_on.wait(60)
            if fails:
                raise ValueError

    thread = threading.Thread(target=end_them)
    thread.start()
    await asyncio.to_thread(inside.wait, 60)
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in waiting)  # the worker has not finished with them
    go_on.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [0, 1, 2]
    thread.join()
    later = Future[int]()
    asking = asyncio.ensure_future(bridge.answer(later))
    await asyncio.sleep(0)
    later.set_result(7)
    assert await asyncio.wait_for(asking, 60) == 7  # and from then on at once


async def test_every_answer_arrives_whatever_the_two_threads_do() -> None:
    bridge = FutureBridge()
    futures = [Future[int]() for _ in range(2000)]
    waiting = [asyncio.ensure_future(bridge.answer(future)) for future in futures]
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: [future.set_result(n) for n, future in enumerate(futures)])
    thread.start()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == list(range(2000))
    thread.join()


async def test_failures_arrive_too_and_whoever_left_is_left_alone() -> None:
    bridge = FutureBridge()
    left, failing, already = Future[int](), Future[int](), Future[int]()
    already.set_result(3)
    tasks = [asyncio.ensure_future(bridge.answer(future)) for future in (left, failing)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    left.set_result(1)
    failing.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await tasks[1]
    assert await bridge.answer(already) == 3
    assert tasks[0].cancelled()


def test_a_loop_that_is_closed_hears_nothing_and_stops_nobody() -> None:
    bridge, future = FutureBridge(), Future[int]()

    async def leave() -> None:
        asking = asyncio.ensure_future(bridge.answer(future))
        await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(leave())
    future.set_result(1)
    assert not bridge._pending

    async def ask() -> int:
        return await bridge.answer(future)

    assert asyncio.run(ask()) == 1


def test_letters_that_a_loop_did_not_live_to_fetch_are_thrown_away() -> None:
    bridge, future, loop = FutureBridge(), Future[int](), asyncio.new_event_loop()
    future.set_result(1)
    bridge._post(loop, loop.create_future(), future)
    loop.close()
    assert len(bridge._pending) == 1  # it was told, and did not come
    assert asyncio.run(bridge.answer(future)) == 1
    assert not bridge._pending
