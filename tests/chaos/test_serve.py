"""Disturb a server, its disk, its clock and its clients: a training program over the public SDK notices nothing, or gets
a sentence and goes on from its last checkpoint, and the numbers are those of undisturbed training."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from support.chaos_process import ChaosProcess
from support.chaos_serve import FAULTS, ServedReference, attempt_served, make_served_reference
from support.chaos_table import TABLE
from support.faulty_disk import library

pytest.importorskip("tinker", reason="pip install 'headrace[tinker]'")
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")
SEED, MINUTES = os.environ.get("CHAOS_SEED", "1"), float(os.environ.get("CHAOS_MINUTES", "0"))
PROCESSES = 2


@pytest.fixture(scope="module")
def processes() -> Iterator["queue.SimpleQueue[ChaosProcess]"]:
    idle: queue.SimpleQueue[ChaosProcess] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(PROCESSES):
            idle.put(stack.enter_context(contextlib.closing(ChaosProcess())))
        yield idle


@pytest.fixture(scope="module")
def reference(
    processes: "queue.SimpleQueue[ChaosProcess]", tmp_path_factory: pytest.TempPathFactory
) -> ServedReference:
    process = processes.get()
    made = make_served_reference(process, tmp_path_factory.mktemp("undisturbed"))
    processes.put(process)
    return made


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_clients_of_disturbed_servers_see_undisturbed_training(
    processes: "queue.SimpleQueue[ChaosProcess]", reference: ServedReference, tmp_path: Path
) -> None:
    rounds = count() if MINUTES else range(1)
    tries = ((fault, number) for number in rounds for fault in FAULTS)
    until = time.monotonic() + 60 * MINUTES if MINUTES else float("inf")
    lock = threading.Lock()

    def work() -> None:
        process = processes.get()
        while True:
            with lock:
                chosen = next(tries, None) if time.monotonic() < until else None
            if chosen is None:
                break
            fault, number = chosen
            folder = tmp_path / f"{fault} {number}".replace(" ", "-")
            attempt_served(process, reference, fault, f"{SEED} {fault} {number}", folder, TABLE)
        processes.put(process)

    began = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as threads:
        for future in [threads.submit(work) for _ in range(PROCESSES)]:
            future.result()
    TABLE.notes.append(f"serving: seed {SEED}, {time.monotonic() - began:.0f} s")
    assert [failure for failure in TABLE.failures if failure.startswith("serve")] == []
