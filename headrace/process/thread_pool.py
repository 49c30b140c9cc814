"""Start the threads of an event loop's pool at once, so that a process has as many after a day as after a second."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

END_S = 30.0  # that calls may take when the loop is closed


class _PatientPool(ThreadPoolExecutor):
    """Waits for its threads for a stated time: a call of a user's function may never return."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        ends = time.monotonic() + END_S
        for thread in tuple(self._threads) if wait else ():
            thread.join(max(0.0, ends - time.monotonic()))


async def start_pool() -> None:
    """Give the running loop a default executor of the usual size whose threads are there already."""
    count = min(32, (os.cpu_count() or 1) + 4)
    pool = _PatientPool(count, thread_name_prefix="headrace-pool")
    all_started = threading.Barrier(count)
    starting = [pool.submit(all_started.wait) for _ in range(count)]
    asyncio.get_running_loop().set_default_executor(pool)
    await asyncio.gather(*map(asyncio.wrap_future, starting))
