"""A power loss at any moment of a run: the newest checkpoint that was reported is there, and the run goes on from it.

The file operations of one run are recorded; states that a power loss may leave are made from them under the model of
`support/power_loss.py`, and opened as a resume opens them.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from support.chaos_power import Recorded, check_state, lay_out, record_run, resume_really
from support.chaos_process import MINUTES, SEED, ChaosPool
from support.chaos_table import TABLE, Table
from support.chaos_train import SETUPS, LostError
from support.faulty_disk import Kind, library
from support.power_loss import POLICIES, History

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler for tests/support/faulty_disk.c")


@pytest.fixture(scope="module")
def recorded(pool: ChaosPool, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    with pool.borrow() as process:
        return record_run(process, tmp_path_factory.mktemp("power"), SETUPS["sft, rl"])


def check_states(
    recorded: Recorded, pool: ChaosPool, cases: list[tuple[int, str]], table: Table, *, really: int
) -> None:
    """Check every state; every `really`-th is also resumed to the end."""
    found: Counter[str] = Counter()
    for number, (after, policy) in enumerate(cases):
        seed, failure, outcome = f"{SEED} {after} {policy} {number}", None, ""
        lay_out(recorded, after, policy, random.Random(seed))
        try:
            outcome = check_state(recorded, after)
            found[outcome] += 1
            if number % really == really - 1 and outcome != "refused":
                lay_out(recorded, after, policy, random.Random(seed))
                with pool.borrow() as process:
                    resume_really(recorded, process)
                found["resumed to the end"] += 1
        except LostError as exc:
            failure = f"after operation {after} of {recorded.num_operations}, case {number}: {exc}"
        table.add(
            "sft, rl", f"power loss, {policy}", struck=True, refused=outcome == "refused",
            resumed=outcome == "resumes", failure=failure,
        )  # fmt: skip
    table.notes.append(f"power loss: seed {SEED}, {recorded.num_operations} operations, {dict(found)}")
    assert [failure for failure in table.failures if "power loss" in failure] == []
    assert found["resumes"] > len(cases) // 2, "most states have a run to go on with"


def sampled(recorded: Recorded, count: int) -> list[tuple[int, str]]:
    luck = random.Random(SEED)
    return [(luck.randint(0, recorded.num_operations), POLICIES[n % len(POLICIES)]) for n in range(count)]


def test_a_few_states_after_a_power_loss_resume(recorded: Recorded, pool: ChaosPool) -> None:
    check_states(recorded, pool, sampled(recorded, 24), Table(), really=12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampled_states_after_a_power_loss_resume(recorded: Recorded, pool: ChaosPool) -> None:
    check_states(recorded, pool, sampled(recorded, 200), TABLE, really=25)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not MINUTES, reason="every state of a run: by hand, with `make chaos`")
def test_every_moment_of_a_power_loss_resumes(recorded: Recorded, pool: ChaosPool) -> None:
    every = [(after, policy) for after in range(recorded.num_operations + 1) for policy in POLICIES + 4 * ("any",)]
    check_states(recorded, pool, every, TABLE, really=100)


def test_a_checkpoint_in_a_folder_that_was_never_flushed_is_noticed(recorded: Recorded) -> None:
    """The check can fail: without the flush of `runs/` a power loss takes the whole run with it."""
    history, runs = recorded.history, str(recorded.work / "runs")
    (inode, *_) = {operation.inode for operation in history.operations if operation.path == runs and operation.inode}
    careless = [each for each in history.operations if not (each.kind == Kind.FSYNC and each.inode == inode)]
    broken = replace(recorded, history=History(recorded.work, recorded.work.parent / "before", careless))
    lay_out(broken, len(careless), "all lost", random.Random(0))
    with pytest.raises(LostError, match="no run is found"):
        check_state(broken, len(careless))
