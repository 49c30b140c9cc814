import doctest
import math
import tomllib
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.observe import toml
from headrace.observe.toml import to_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_any_tree_survives_the_way_through_toml(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_values_come_before_sub_tables_and_arrays_of_tables_keep_their_own_tables() -> None:
    tree = {"rl": {"tasks": {"type": "world"}, "steps": 60, "rewards": [{"fn": "env", "o": {"k": 1}}, {"fn": "b"}]}}
    assert to_toml(tree) == (
        '[rl]\nsteps = 60\n\n[rl.tasks]\ntype = "world"\n\n'
        '[[rl.rewards]]\nfn = "env"\n\n[rl.rewards.o]\nk = 1\n\n[[rl.rewards]]\nfn = "b"\n'
    )


def test_none_is_left_out_because_toml_has_no_null() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None}, "d": [{"e": None}]})) == {"b": {}, "d": [{}]}


def test_odd_scalars() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    back = tomllib.loads(to_toml({"lr": 1e-05, "nan": math.nan, "inf": -math.inf, "when": when, "t": (1, 2)}))
    assert math.isnan(back.pop("nan"))
    assert back == {"lr": 1e-05, "inf": -math.inf, "when": when, "t": [1, 2]}


@pytest.mark.parametrize("tree", [{"a": object()}, {"a": [1, None]}, {"a": {1: 2}}])
def test_what_toml_cannot_hold_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        to_toml(tree)


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(toml).failed == 0
