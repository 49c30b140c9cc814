"""What the machines of test_executor_machine.py and the resumed runs of test_async_resume.py do not show of the state:
drops in a row are counted across a restart, and a checkpoint whose parts disagree is refused."""

import json
from typing import Any

import pytest

from headrace.errors import CheckpointError
from headrace.rollout.executor.ledger import Drop
from headrace.rollout.executor.state import ExecutorState
from headrace.types import Task
from support.rollout_groups import group


def new_state() -> ExecutorState:
    return ExecutorState(max_live=9, max_replayed=4, max_drops=3)


def saved(state: ExecutorState) -> dict[str, Any]:
    """All of it, as a checkpoint has it."""
    encoded: dict[str, Any] = json.loads(json.dumps({**state.snapshot()(), **state.stats_state()}))
    return encoded


def test_drops_in_a_row_are_counted_across_a_restart() -> None:
    """Three in a row are too many: one before the restart, two after it."""
    before, after = new_state(), new_state()
    before.start(Task(id="a"), version=1)
    assert before.give_up(0, Drop.FAILED, "no room") is None
    before.stop_running(0)
    after.load_state_dict(saved(before))
    for name in ("b", "c"):
        after.start(Task(id=name), version=1)
    assert after.give_up(1, Drop.FAILED, "no room") is None
    error = after.give_up(2, "filtered_length", "")
    assert str(error).startswith("3 groups in a row were of no use (failed 2 times, filtered_length 1 times)")


def test_a_state_whose_parts_disagree_is_refused() -> None:
    state = new_state()
    state.start(Task(id="a"), version=1)
    state.make_ready(group(0, versions=(1, 1), started_version=1))
    state.stop_running(0)
    new_state().load_state_dict(saved(state))
    with pytest.raises(CheckpointError, match=r"the ledger lists the ready groups \[0\] and other groups are stored"):
        new_state().load_state_dict({**saved(state), "ready": []})
