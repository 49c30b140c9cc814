"""A power loss at any moment of a run: the newest checkpoint that was reported is there, and the run goes on from it.

The file operations of one run are recorded; states that a power loss may leave are made from them under the model of
`support/power_loss.py`, and opened as a resume opens them.
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chaos_power import Recorded, check_state, lay_out, record_run, resume_really
from support.chaos_process import ChaosProcess
from support.chaos_table import TABLE
from support.chaos_train import SETUPS, LostError
from support.faulty_disk import library
from support.power_loss import POLICIES

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")
SEED, MINUTES = os.environ.get("CHAOS_SEED", "1"), float(os.environ.get("CHAOS_MINUTES", "0"))


@pytest.fixture(scope="module")
def process() -> Iterator[ChaosProcess]:
    with contextlib.closing(ChaosProcess()) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(process: ChaosProcess, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_run(process, tmp_path_factory.mktemp("power"), SETUPS["sft, rl"])


def check_states(recorded: Recorded, process: ChaosProcess, cases: list[tuple[int, str]], *, really: int) -> None:
    """Check every state; every `really`-th is also resumed to the end."""
    found: Counter[str] = Counter()
    for number, (after, policy) in enumerate(cases):
        luck, failure, outcome = random.Random(f"{SEED} {after} {policy} {number}"), None, ""
        lay_out(recorded, after, policy, luck)
        try:
            outcome = check_state(recorded, after)
            found[outcome] += 1
            if number % really == really - 1 and outcome != "refused":
                lay_out(recorded, after, policy, random.Random(f"{SEED} {after} {policy} {number}"))
                resume_really(recorded, process)
                found["resumed to the end"] += 1
        except LostError as exc:
            failure = f"after operation {after} of {recorded.num_operations}, {policy}, case {number}: {exc}"
        TABLE.add(
            "sft, rl", f"power loss, {policy}", struck=True, refused=outcome == "refused",
            resumed=outcome == "resumes", failure=failure,
        )  # fmt: skip
    TABLE.notes.append(f"power loss: seed {SEED}, {recorded.num_operations} operations, {dict(found)}")
    failures = [failure for failure in TABLE.failures if "power loss" in failure]
    assert failures == []
    assert found["resumes"] > len(cases) // 2, "most states have a run to go on with"


def sampled(recorded: Recorded, count: int) -> list[tuple[int, str]]:
    luck = random.Random(SEED)
    return [(luck.randint(0, recorded.num_operations), POLICIES[n % len(POLICIES)]) for n in range(count)]


def test_a_few_states_after_a_power_loss_resume(recorded: Recorded, process: ChaosProcess) -> None:
    check_states(recorded, process, sampled(recorded, 24), really=12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampled_states_after_a_power_loss_resume(recorded: Recorded, process: ChaosProcess) -> None:
    check_states(recorded, process, sampled(recorded, 200), really=25)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not MINUTES, reason="every state of a run: by hand, with `make chaos`")
def test_every_moment_of_a_power_loss_resumes(recorded: Recorded, process: ChaosProcess) -> None:
    every = [(after, policy) for after in range(recorded.num_operations + 1) for policy in POLICIES + 4 * ("any",)]
    check_states(recorded, process, every, really=100)
