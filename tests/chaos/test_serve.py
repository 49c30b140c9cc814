"""Disturb a server, its disk, its clock and its clients, under a training program over the public SDK.

The program notices nothing, or gets a sentence and goes on from its last checkpoint; its numbers are those of
undisturbed training.
"""

import itertools
from pathlib import Path

import pytest

from support.chaos_process import MINUTES, SEED, ChaosPool, ChaosProcess
from support.chaos_serve import FAULTS, NAME, ServedReference, attempt_served, lose_power, make_served_reference
from support.chaos_table import TABLE
from support.faulty_disk import library
from support.power_loss import POLICIES

pytest.importorskip("tinker", reason="pip install 'headrace[tinker]'")
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")


@pytest.fixture(scope="module")
def reference(pool: ChaosPool, tmp_path_factory: pytest.TempPathFactory) -> ServedReference:
    with pool.borrow() as process:
        return make_served_reference(process, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_clients_of_disturbed_servers_see_undisturbed_training(
    pool: ChaosPool, reference: ServedReference, tmp_path: Path
) -> None:
    rounds = itertools.count() if MINUTES else range(1)
    tries = ((fault, number) for number in rounds for fault in FAULTS)

    def once(process: ChaosProcess, chosen: tuple[str, int]) -> None:
        fault, number = chosen
        folder = tmp_path / f"{fault} {number}".replace(" ", "-")
        attempt_served(process, reference, fault, f"{SEED} {fault} {number}", folder, TABLE)

    seconds = pool.each(tries, once)
    TABLE.notes.append(f"serving: seed {SEED}, {seconds:.0f} s")
    assert [failure for failure in TABLE.failures if failure.startswith(NAME)] == []


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_server_goes_on_after_a_power_loss(pool: ChaosPool, reference: ServedReference, tmp_path: Path) -> None:
    rounds = itertools.count() if MINUTES else range(1)
    tries = ((policy, number) for number in rounds for policy in POLICIES)

    def once(process: ChaosProcess, chosen: tuple[str, int]) -> None:
        policy, number = chosen
        lose_power(process, reference, policy, f"{SEED} {policy} {number}", tmp_path / f"{policy} {number}", TABLE)

    seconds = pool.each(tries, once, at_once=1)  # the states have one port
    TABLE.notes.append(f"serving after a power loss: seed {SEED}, {seconds:.0f} s")
    assert [failure for failure in TABLE.failures if failure.startswith(f"{NAME}, power loss")] == []
