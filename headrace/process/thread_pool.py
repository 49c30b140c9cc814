"""Start the threads of an event loop's pool at once, so that a process has as many after a day as after a second."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor


async def start_pool() -> None:
    """Give the running loop a default executor of the usual size whose threads are there already."""
    count = min(32, (os.cpu_count() or 1) + 4)
    pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-pool")
    all_started = threading.Barrier(count)
    starting = [pool.submit(all_started.wait) for _ in range(count)]
    asyncio.get_running_loop().set_default_executor(pool)
    await asyncio.gather(*map(asyncio.wrap_future, starting))
