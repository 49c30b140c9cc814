"""Disturb the processes of a run besides its coordinator: engine processes, ranks, and workers that Ray places.

Engine processes and workers are replaced, and the result is that of the undisturbed run; the loss of a rank ends it
with a sentence, and it is resumed. When the coordinator is killed, the others end, and the run is resumed.
"""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.chaos_process import MINUTES, SEED, ChaosPool, ChaosProcess
from support.chaos_table import TABLE
from support.chaos_train import ROLE_FAULTS, ROLES, attempt, make_reference
from support.faulty_disk import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c"),
]


@pytest.mark.parametrize("name", ROLES)
def test_runs_whose_processes_are_disturbed_end_as_undisturbed_ones(name: str, pool: ChaosPool, tmp_path: Path) -> None:
    if "Ray" in name and find_spec("ray") is None:
        pytest.skip("pip install 'headrace[ray]'")
    with pool.borrow() as process:
        reference = make_reference(process, tmp_path / "undisturbed", ROLES[name])
    rounds = itertools.count() if MINUTES else range(1)

    def once(process: ChaosProcess, chosen: tuple[str, int]) -> None:
        fault, number = chosen
        folder = tmp_path / f"{fault} {number}".replace(" ", "-")
        attempt(process, reference, name, fault, f"{SEED} {name} {fault} {number}", folder, TABLE)

    seconds = pool.each(((fault, number) for number in rounds for fault in ROLE_FAULTS), once, at_once=1)
    TABLE.notes.append(f"{name}: seed {SEED}, {seconds:.0f} s")
    assert [failure for failure in TABLE.failures if failure.startswith(f"{name},")] == []
    assert TABLE.cells[name, "role killed"].struck > 0, "no process of a role was there to be killed"
