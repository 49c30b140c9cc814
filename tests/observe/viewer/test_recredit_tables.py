"""Before and after: what changed in a group, by hand."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headrace.observe.rollouts.records import CreditRecord, EpisodeRecord, read_lines
from headrace.observe.viewer.recredit_tables import compare_credit, health, tables
from support import rollout_files


def with_credit(line: EpisodeRecord, total: float, *advantages: float) -> EpisodeRecord:
    steps = (replace(step, credit=CreditRecord(A=a)) for step, a in zip(line.steps, advantages, strict=True))
    return replace(line, steps=tuple(steps), reward=replace(line.reward, total=total))


def test_what_changed_in_a_group_by_hand(tmp_path: Path) -> None:
    first, second, third = rollout_files.lines(tmp_path / "a.jsonl")
    old = [
        with_credit(first, 1.0, 0.5, -0.5, 0.0),
        with_credit(second, 1.0, 1.0, 1.0, 1.0, 1.0),
        with_credit(third, 0.0, -1.0, -1.0, -1.0),
    ]
    new = [
        with_credit(first, 0.2, -0.5, -0.7, 0.1),  # turned, changed, woken
        with_credit(second, 0.4, 1.0, 0.0, 1.0 + 1e-15, -2.0),  # same, silenced, same, turned
        replace(third, failed="no idea", steps=tuple(replace(step, credit=None) for step in third.steps)),
    ]
    (change,) = compare_credit(old, new).groups
    assert (change.group, change.task, change.episodes, change.failed) == ("7", "corridor", 3, 1)
    assert change.rewards == ((0.0, 1.0), (0.2, 0.4))
    assert change.advantages == ((-1.0, 1.0), (-2.0, 1.0 + 1e-15))
    assert (change.steps, change.changed, change.turned, change.silenced, change.woken) == (7, 5, 2, 1, 1)


def test_figures_of_a_file_by_hand(tmp_path: Path) -> None:
    lines = read_lines(rollout_files.save(tmp_path / "a.jsonl"))
    figures = dict(health(lines))
    assert figures["mean reward"] == pytest.approx(2 / 5)
    assert figures["groups whose rewards are all equal"] == 0.5
    assert figures["steps with A = 0"] == pytest.approx(3 / 13)  # those of the group that never moves
    assert figures["steps compared with another in their state"] == 1.0
    # A_E = 1/3, 1/3, -2/3; G - mean: 7/0: 1/8 1/6 0; 7/1: 0 1/8 1/6 0; 7/2: -1/8 -1/3 -1/8: none disagrees
    assert figures["steps on which A_E and A_S disagree"] == 0.0
    assert figures["mean |A_E|"] == pytest.approx((7 / 3 + 3 * 2 / 3) / 13)
    assert figures["mean |A_S|"] == pytest.approx((2 / 8 + 2 / 6 + 2 / 8 + 1 / 3) / 13)


def test_the_tables_show_both_sides(tmp_path: Path) -> None:
    lines = read_lines(rollout_files.save(tmp_path / "a.jsonl"))
    console = Console(width=150, file=io.StringIO(), record=True)
    for table in tables(compare_credit(lines, lines)):
        console.print(table)
    text = [line.split() for line in console.export_text().splitlines()]
    row = "7 corridor 3 0 … 1 0 … 1 -1 … +0.5 -1 … +0.5 0/10 0 0 0"
    assert row.split() in text
    assert ["mean", "reward", "0.4", "0.4"] in text
