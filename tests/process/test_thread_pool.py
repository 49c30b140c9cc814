"""All threads of an event loop's pool are there from the start."""

import asyncio
import threading

from headrace.process.thread_pool import start_pool


def test_the_number_of_threads_does_not_grow_with_work() -> None:
    async def run() -> tuple[int, int]:
        await start_pool()
        before = threading.active_count()
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(100)))
        return before, threading.active_count()

    before, after = asyncio.run(run())
    assert before == after
