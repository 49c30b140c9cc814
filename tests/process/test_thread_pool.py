"""All threads of an event loop's pool are there from the start, and none keeps a process that is done."""

import asyncio
import subprocess
import sys
import threading

import pytest

from headrace.process.thread_pool import start_pool


def test_the_number_of_threads_does_not_grow_with_work() -> None:
    async def run() -> tuple[int, int]:
        await start_pool()
        before = threading.active_count()
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(100)))
        return before, threading.active_count()

    before, after = asyncio.run(run())
    assert before == after


ENDLESS = """
import asyncio, sys, threading, time
from headrace.process import last_threads, thread_pool
thread_pool.END_S = 0.3
async def run():
    await thread_pool.start_pool()
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    await asyncio.sleep(0.1)
    print("finished", flush=True)
with last_threads.leaving_threads(after_s=0.5):
    asyncio.run(run())
    CODE
"""


@pytest.mark.parametrize(
    ("ends_with", "code"), [("pass", 0), ("sys.exit(75)", 75), ("sys.exit('no')", 1), ("1 / 0", 1)]
)
def test_a_call_that_never_returns_does_not_keep_a_process_that_is_done(ends_with: str, code: int) -> None:
    program = ENDLESS.replace("CODE", ends_with)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, "finished\n")
    assert "threads have not ended after 0.5 s (headrace-pool_" in ended.stderr


def test_a_process_without_such_threads_ends_at_once() -> None:
    program = "from headrace.process.last_threads import leaving_threads\nwith leaving_threads(): pass"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_that_goes_on_after_the_command_is_not_ended() -> None:
    program = (
        "import time\nfrom headrace.process.last_threads import leaving_threads\n"
        "with leaving_threads(after_s=0.2): pass\ntime.sleep(1.0)\nprint('went on')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
