"""A memory cgroup limits what no count of processes shows, where this user may make one."""

import os
import sys

import pytest

from headrace.reward.sandbox.cgroup import PREFIX, MemoryCgroup, _parents
from headrace.reward.sandbox.limits import EVERY_LAYER, CallLimits, IsolationLayer, Outcome
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
from support.paths import TESTS
from support.sandbox_modes import a_row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are a Linux mechanism")
ATTACKS = TESTS / "support" / "sandbox_attacks.py"
LIMITS = CallLimits(memory_mb=256, wall_s=30.0)


@pytest.fixture
def cgroup() -> MemoryCgroup:
    made = MemoryCgroup.create("test", 64 << 20)
    if made is None:
        pytest.skip("this user may make no memory cgroup here")
    made.remove()
    return made


def left_behind() -> list[str]:
    return [str(left) for parent, _ in _parents() for left in parent.glob(f"{PREFIX}{os.getpid()}-*")]


def test_a_cgroup_is_removed_and_can_be_made_again(cgroup: MemoryCgroup) -> None:
    assert not cgroup.folder.exists()
    again = MemoryCgroup.create("test", 64 << 20)
    assert again is not None
    assert again.folder == cgroup.folder
    assert not again.has_killed()
    again.limit(128 << 20)
    again.limit(32 << 20)
    again.remove()
    assert not again.folder.exists()


@pytest.mark.parametrize("warm", [True, False], ids=["forked", "cold"])
async def test_memory_that_nobody_is_charged_for_ends_the_call(cgroup: MemoryCgroup, warm: bool) -> None:
    """Without seccomp, seven processes fill shared memory and give it back: 896 MB that /proc does not show."""
    settings = SandboxSettings(limits=LIMITS, layers=EVERY_LAYER - {IsolationLayer.SECCOMP}, workers=1, warm=warm)
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, settings)
    rows = [a_row(attack=name) for name in ("memory_given_back", "good")]
    bad, good = [await sandbox.call({"rows": [row]}) for row in rows]
    await sandbox.close()
    assert bad.outcome is Outcome.MEMORY, bad
    assert good.outcome is Outcome.RETURNED, good
    assert left_behind() == []


def test_what_killed_trainers_left_is_removed(cgroup: MemoryCgroup) -> None:
    gone = 2**22 + 1  # no process has such a number
    left = MemoryCgroup.create(f"{gone}-1-x", 64 << 20)
    assert left is not None
    made = MemoryCgroup.create("test", 64 << 20)
    assert made is not None
    made.remove()
    assert not left.folder.exists()
