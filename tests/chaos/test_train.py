"""Disturb training runs of every kind, resume them and compare them with the undisturbed ones.

A fixed seed and one try of each fault in `make test-chaos`; another seed and any number of minutes with `make chaos
SEED=7 MINUTES=60`. Each failure names its seed and leaves its folder.
"""

import itertools
import os
from pathlib import Path

import pytest

from support.chaos_process import MINUTES, SEED, ChaosPool, ChaosProcess
from support.chaos_table import TABLE, Table
from support.chaos_train import SETUPS, Reference, attempt, faults_of, make_reference
from support.faulty_disk import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")
ONLY = os.environ.get("CHAOS_ONLY", "")  # a part of a configuration's name
TRIES = int(os.environ.get("CHAOS_TRIES", "1"))  # of each fault, if CHAOS_MINUTES does not say how long


@pytest.fixture(scope="module")
def first(pool: ChaosPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The first configuration, undisturbed; others start from its model."""
    with pool.borrow() as process:
        return make_reference(process, tmp_path_factory.mktemp("first"), SETUPS["sft, rl"])


@pytest.fixture(scope="module")
def references(pool: ChaosPool, first: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Every configuration, undisturbed."""
    folder, start = tmp_path_factory.mktemp("undisturbed"), first.run / "start"
    others = {name: setup for name, setup in SETUPS.items() if name != "sft, rl"}
    with pool.borrow() as process:
        made = {name: make_reference(process, folder / name, setup, start) for name, setup in others.items()}
    return {"sft, rl": first, **made}


@pytest.mark.parametrize("fault", ["killed at a file operation", "disk full", "write errors", "read errors"])
def test_a_disturbed_run_ends_as_the_undisturbed_one(
    fault: str, pool: ChaosPool, first: Reference, tmp_path: Path
) -> None:
    table = Table()
    with pool.borrow() as process:
        attempt(process, first, "sft, rl", fault, f"quick {fault}", tmp_path / "try", table)
    assert table.failures == []
    assert table.cells["sft, rl", fault].struck == 1


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_disturbed_runs_end_as_undisturbed_ones(
    pool: ChaosPool, references: dict[str, Reference], tmp_path: Path
) -> None:
    cells = [
        (name, fault) for name, reference in references.items() if ONLY in name for fault in faults_of(reference.setup)
    ]
    rounds = itertools.count() if MINUTES else range(TRIES)
    tries = ((name, fault, number) for number in rounds for name, fault in cells)

    def once(process: ChaosProcess, chosen: tuple[str, str, int]) -> None:
        name, fault, number = chosen
        folder = tmp_path / f"{name} {fault} {number}".replace(" ", "-").replace(",", "")
        attempt(process, references[name], name, fault, f"{SEED} {name} {fault} {number}", folder, TABLE)

    seconds = pool.each(tries, once)
    TABLE.notes.append(f"training: seed {SEED}, {seconds:.0f} s")
    assert [failure for failure in TABLE.failures if failure.startswith(tuple(SETUPS))] == []
