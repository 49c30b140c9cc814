"""Disturb training runs of every kind, resume them and compare them with the undisturbed ones.

A fixed seed and two tries of each fault in `make test-chaos`; another seed and any number of minutes with `make chaos
SEED=7 MINUTES=60`. Each failure names its seed and leaves its folder.
"""

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.chaos_process import ChaosProcess
from support.chaos_table import TABLE
from support.chaos_train import SETUPS, Reference, attempt, faults_of, make_reference
from support.faulty_disk import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")
SEED, MINUTES = os.environ.get("CHAOS_SEED", "1"), float(os.environ.get("CHAOS_MINUTES", "0"))
ONLY = os.environ.get("CHAOS_ONLY", "")  # a part of a configuration's name
PROCESSES, TRIES = 2, 2


@pytest.fixture(scope="module")
def processes() -> Iterator["queue.SimpleQueue[ChaosProcess]"]:
    """As many as run at once; whoever takes one puts it back."""
    idle: queue.SimpleQueue[ChaosProcess] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(PROCESSES):
            idle.put(stack.enter_context(contextlib.closing(ChaosProcess())))
        yield idle


@pytest.fixture(scope="module")
def references(
    processes: "queue.SimpleQueue[ChaosProcess]", tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reference]:
    """Every configuration, undisturbed."""
    folder, process = tmp_path_factory.mktemp("undisturbed"), processes.get()
    start = make_reference(process, folder / "first", SETUPS["critic"]).run / "start"
    chosen = {name: setup for name, setup in SETUPS.items() if ONLY in name}
    made = {name: make_reference(process, folder / name, setup, start) for name, setup in chosen.items()}
    processes.put(process)
    return made


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_disturbed_runs_end_as_undisturbed_ones(
    processes: "queue.SimpleQueue[ChaosProcess]", references: dict[str, Reference], tmp_path: Path
) -> None:
    cells = [(name, fault) for name, reference in references.items() for fault in faults_of(reference.setup)]
    rounds = itertools.count() if MINUTES else range(TRIES)
    tries = ((name, fault, number) for number in rounds for name, fault in cells)
    until = time.monotonic() + 60 * MINUTES if MINUTES else float("inf")
    lock = threading.Lock()

    def work() -> None:
        process = processes.get()
        while True:
            with lock:
                chosen = next(tries, None) if time.monotonic() < until else None
            if chosen is None:
                break
            name, fault, number = chosen
            folder = tmp_path / f"{name} {fault} {number}".replace(" ", "-").replace(",", "")
            attempt(process, references[name], name, fault, f"{SEED} {name} {fault} {number}", folder, TABLE)
        processes.put(process)

    began = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as threads:
        for future in [threads.submit(work) for _ in range(PROCESSES)]:
            future.result()
    TABLE.notes.append(f"training: seed {SEED}, {time.monotonic() - began:.0f} s")
    assert TABLE.failures == []
