"""Which episodes become rows for [sft]: successes, those of enough reward, the best of each task."""

import json
from pathlib import Path

import pytest

from headrace.data.demonstrations import EpisodeSelection, write_demonstrations
from headrace.errors import DataError
from headrace.types import Group, Task
from support.rollout_groups import scored


def played(name: str, *results: tuple[float, bool | None]) -> Group:
    task = Task(id=name)
    episodes = [scored(task, reward, success=success, id=str(i)) for i, (reward, success) in enumerate(results)]
    return Group(id=0, task=task, episodes=tuple(episodes), failed=(), started_version=0)


GROUPS = [
    played("a", (0.2, False), (0.9, True), (0.7, True)),
    played("b", (0.6, False), (0.1, False)),
    played("c", (0.5, True), (0.5, True)),
]


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        (EpisodeSelection(), ["a#1", "a#2", "c#0", "c#1"]),
        (EpisodeSelection(min_reward=0.6), ["a#1", "a#2", "b#0"]),
        (EpisodeSelection(best_only=True), ["a#1", "c#0"]),
        (EpisodeSelection(best_only=True, min_reward=0.6), ["a#1", "b#0"]),
        (EpisodeSelection(best_only=True, failures=True), ["a#1", "b#0", "c#0"]),
        (EpisodeSelection(failures=True), ["a#0", "a#1", "a#2", "b#0", "b#1", "c#0", "c#1"]),
    ],
)
def test_the_selected_episodes_are_written(selection: EpisodeSelection, rows: list[str], tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    assert write_demonstrations(path, GROUPS, {}, selection=selection) == len(rows)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == rows


def test_a_reward_that_nobody_has_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none has a reward of 2; lower --min-reward"):
        write_demonstrations(tmp_path / "x", GROUPS, {}, selection=EpisodeSelection(min_reward=2.0))
