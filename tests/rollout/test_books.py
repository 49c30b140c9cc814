"""What an executor knows of its groups goes through a checkpoint whole: counts in a row, tasks to be tried, figures."""

import json
from typing import Any

import pytest
from rollout_groups import group

from headrace.errors import CheckpointError
from headrace.rollout.books import Books
from headrace.rollout.journal import Journals
from headrace.rollout.ledger import Drop
from headrace.types import Task


def books_of(*, max_drops: int = 3) -> Books:
    return Books(max_live=9, max_replayed=4, max_drops=max_drops)


def kept(books: Books) -> dict[str, Any]:
    """All of it, as a checkpoint has it."""
    state: dict[str, Any] = json.loads(json.dumps({**books.snapshot()(), **books.figures()}))
    return state


def busy() -> Books:
    """One group of every kind: consumed and replayed, in training, ready and urgent, running, given up, stale."""
    books = books_of()
    for name in ("trained", "training", "urgent", "running", "bad", "late", "late"):
        books.start(Task(id=name), version=1)
    for id in (0, 1, 2):
        books.keep(group(id, versions=(1, 1), started_version=1))
        books.tasks.pop(id)
    books.replay.add(books.take([0]))
    books.ledger.consume([0])
    books.replay.draw(1)
    books.take([1])
    books.urgent.add(2)
    assert books.give_up(4, Drop.FAILED, "no room") is None
    for id in (5, 6):
        books.drop_stale(Task(id="late"), id, 100.0)
    for id in (4, 5, 6):
        books.tasks.pop(id)
    books.metrics(version=1)  # what has been reported until here
    books.window.failed_episodes = 3
    books.window.end(70.0, stale=False)
    return books


def test_everything_comes_back() -> None:
    state = kept(busy())
    restored = books_of()
    restored.load_state_dict(state)
    assert kept(restored) == state
    assert [task.id for task in restored.again] == ["late", "late"]
    assert "late" in restored.slow
    assert restored.urgent == {2}
    assert {id: task.id for id, task in restored.tasks.items()} == {3: "running"}
    assert [one.id for one in restored.replay] == [0]
    values = restored.metrics(version=1)
    assert values["rollout/started"] == values["rollout/dropped_stale"] == 0.0, (
        "what was reported is not reported again"
    )
    assert values["rollout/failed_episodes"] == 3.0
    assert values["rollout/stale_share_to_256_tokens"] == 0.0


def test_the_count_of_groups_in_a_row_goes_on_after_a_restart() -> None:
    """Three in a row are too many: one before the restart, two after it."""
    restored = books_of()
    restored.load_state_dict(kept(busy()))
    for _ in range(2):
        restored.start(Task(id="x"), version=1)
    assert restored.give_up(7, Drop.FAILED, "no room") is None
    error = restored.give_up(8, "filtered_length", "")
    assert str(error).startswith("3 groups in a row were of no use (failed 2 times, filtered_length 1 times)")


def test_what_trained_and_what_cannot_be_taken_up_is_dropped() -> None:
    restored = books_of()
    restored.load_state_dict(kept(busy()))
    restored.forget_unresumable(None)
    assert not restored.tasks
    counts = restored.ledger.counts
    assert (counts.running, counts.ready, counts.training) == (0, 1, 0)
    assert restored.metrics(version=1)["rollout/dropped_resume"] == 2.0


def test_what_trained_is_dropped_although_what_ran_goes_on() -> None:
    restored = books_of()
    restored.load_state_dict(kept(busy()))
    restored.forget_unresumable(Journals())  # of the group that ran nothing was sampled
    counts = restored.ledger.counts
    assert (counts.running, counts.ready, counts.training) == (1, 1, 0)


def test_a_state_whose_parts_disagree_is_refused() -> None:
    state = kept(busy())
    with pytest.raises(CheckpointError, match=r"the ledger lists the ready groups \[2\] and other groups are stored"):
        books_of().load_state_dict({**state, "ready": []})
