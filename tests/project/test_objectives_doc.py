"""docs/objectives.md names every objective there is, and none that is not."""

import re

import pytest
import torch

from headrace.algo.advantages import METHODS
from headrace.algo.loss_signature import loss_inputs, unit_of
from headrace.algo.loss_weights import WEIGHTINGS
from headrace.algo.losses import LOSSES
from support.paths import DOCS

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
