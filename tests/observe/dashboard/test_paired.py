"""Held-out tasks of several runs on the page: the figures of `headrace compare`, read anew when a file has changed."""

import json
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from headrace.observe.comparison.comparison_tables import paired_rows
from headrace.observe.dashboard import paired
from headrace.observe.dashboard.paired import HeldOutTests, no_answer
from headrace.observe.run_folder import RunFolder
from headrace.reward.builtin.final_answer import final_answer
from headrace.wiring.commands.experiments.compare_runs import compare_runs

Sums = Callable[..., Path]
FIRST, SECOND = "first_2026-03-01T12-00-00Z", "second_2026-03-02T12-00-00Z"


def line(task: int, sample: int, *, right: bool) -> dict[str, Any]:
    """A held-out episode; its answer is right or wrong."""
    reward = float(right)
    return {
        "schema_version": 2,
        "training_step": 5,
        "id": f"{task}/{sample}",
        "group_id": task,
        "group_size": 2,
        "task": {"id": f"sum/{task}", "messages": [{"role": "user", "content": "?"}], "data": {"answer": "22"}},
        "seed": sample,
        "temperature": 1.0,
        "truncated": False,
        "success": right,
        "reward": {"total": reward, "parts": {"math": reward}},
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "#### 22" if right else "1"}],
        "steps": [],
    }


def evaluate(run: Path, solved: int, tasks: int = 12) -> None:
    """Write an evaluation of two samples a task, of which the first `solved` tasks are right."""
    lines = [line(task, sample, right=task < solved) for task in range(tasks) for sample in range(2)]
    (run / "rollouts" / "eval_rl.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_the_page_has_the_figures_of_the_command(
    sums: Sums, dashboard: Callable[..., AbstractContextManager[str]]
) -> None:
    runs = [sums(FIRST), sums(SECOND)]
    evaluate(runs[0], 3)
    evaluate(runs[1], 10)
    expected = compare_runs(runs)
    tests = HeldOutTests(final_answer)
    answer = tests.compare([(run.name, RunFolder(path=run)) for run in runs])
    assert answer["paired"] == paired_rows(expected)
    # 7 of 12 tasks differ, all for the better: +58.3 points, and 2 / 2^7 = 0.016 by the permutation test
    (row,) = [row for row in answer["paired"] if row[1] == "pass@1"]
    assert row[0] == SECOND
    assert row[2] == "+58.3 points"
    assert row[4:] == ("0.016", "7 / 0 / 5")
    assert [each["name"] for each in answer["scores"]][:2] == ["pass@1", "pass@2"]
    assert "maj@2" in {each["name"] for each in answer["scores"]}
    with dashboard() as url:
        query = urlencode([("run", FIRST), ("run", SECOND)])
        with urllib.request.urlopen(f"{url}/api/compare?{query}", timeout=30) as got:
            held_out = json.loads(got.read())["held_out"]
    assert [tuple(each) for each in held_out["paired"]] == [row for row in answer["paired"] if row[1] != "maj@2"]


def test_an_answer_is_kept_until_a_file_changes(sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [sums(FIRST), sums(SECOND)]
    tests, folders = HeldOutTests(no_answer), [(run.name, RunFolder(path=run)) for run in runs]
    assert tests.compare(folders)["notes"] == [f"{FIRST}, {SECOND} have no held-out evaluation yet."]
    evaluate(runs[0], 3)
    evaluate(runs[1], 3)
    first = tests.compare(folders)
    assert first["paired"][0][5] == "0 / 0 / 12"
    assert tests.compare(folders) is first
    evaluate(runs[1], 12, tasks=13)
    assert tests.compare(folders)["paired"][0][5] == "9 / 0 / 3"
    monkeypatch.setattr(paired, "MOST_BYTES", 100)
    evaluate(runs[1], 4)
    assert "headrace compare RUN RUN" in tests.compare(folders)["notes"][0]
