"""docs/objectives.md names every objective there is, and none that is not."""

import re
from typing import Any

import pytest
import torch

from headrace.algo.advantages import METHODS, credit, own_method
from headrace.algo.loss_signature import loss_inputs, unit_of
from headrace.algo.loss_weights import WEIGHTINGS
from headrace.algo.losses import LOSSES
from headrace.algo.staleness import LiveCounts
from headrace.rollout.executor.admission import ask_limit
from support.paths import DOCS
from support.rollout_groups import group

TEXT = (DOCS / "objectives.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """First-column names of the table under a heading, with their whole row."""
    section = TEXT.split(f"\n## {heading}")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")][1:]
    return {name: line for line in table for name in re.findall(r"`([\w]+)`", line.split("|")[1])}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Credit", {**METHODS, **dict.fromkeys(("token_gae", "turn_gae"))}),
        ("Weightings", WEIGHTINGS),
        ("Losses", LOSSES),
    ],
    ids=lambda v: str(v)[:9],
)
def test_one_row_for_each(heading: str, names: dict[str, object]) -> None:
    assert sorted(rows(heading)) == sorted(names)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_row_states_unit_and_inputs(name: str) -> None:
    cells = rows("Losses")[name].split("|")[1:-1]
    inputs = loss_inputs(LOSSES[name])
    assert cells[-3].strip() == unit_of(LOSSES[name]).value
    if not cells[2].strip().startswith("same"):
        documented = set(re.findall(r"`([a-z0-9_]+)`", cells[2]))
        assert set(inputs.required) - {"weights"} <= documented
        assert documented <= {*inputs.required, *inputs.optional}


def test_the_example_of_a_loss_runs() -> None:
    code = TEXT.split("```python\n")[1].split("```")[0]
    scope: dict[str, object] = {}
    exec(code, scope)
    fn = scope["my_loss"]
    assert loss_inputs(fn).required == ("advantages", "weights")  # type: ignore[arg-type]
    out = fn(torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([0.5]), scale=3.0)  # type: ignore[operator]
    assert out.loss.item() == 3.0


def test_the_examples_of_credit_methods_run() -> None:
    code = TEXT.split("## A credit method of your own")[1].split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code, scope)
    groups = (group(0, rewards=(0.0, 1.0)), group(1, rewards=(2.0, 1.75)))
    best = credit(groups, method=own_method(scope["best_of_group"], "doc"), params={"margin": 0.5})
    assert [episode.advantages for episode in best.episodes] == [(-1.0,), (1.0,), (1.0,), (1.0,)]
    last = credit(groups, method=own_method(scope["last_step"], "doc"))
    assert [episode.advantages for episode in last.episodes] == [(0.0,), (1.0,), (2.0,), (1.75,)]


def test_the_example_of_a_limit_runs() -> None:
    text = (DOCS / "async.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(text.split("## Limits of your own")[1].split("```python\n")[1].split("```")[0], scope)
    few, many = (ask_limit(scope["free_disk"], LiveCounts(running=n)) for n in (1, 4))
    assert few - many == 3
