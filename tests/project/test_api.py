"""`import headrace`: its names exist, cost nothing until they are used, and are those of docs/api.md."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term, as_term, exact_match
from support.paths import ROOT


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", headrace.__all__)
def test_a_public_name_is_the_one_of_its_module(name: str) -> None:
    value = getattr(headrace, name)
    assert value is getattr(importlib.import_module(headrace._MODULES[name]), name)
    assert value.__module__ == headrace._MODULES[name], "a name is exported from where it is defined"
    assert inspect.getdoc(value)


def test_the_three_lists_of_names_agree() -> None:
    assert sorted(headrace._MODULES) == headrace.__all__
    assert set(headrace.__all__) <= set(dir(headrace))
    [block] = [node for node in ast.parse(inspect.getsource(headrace)).body if isinstance(node, ast.If)][:1]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == headrace._MODULES


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headrace' has no attribute 'load_modle'"):
        headrace.load_modle  # noqa: B018


def test_importing_headrace_imports_nothing_but_the_standard_library() -> None:
    """So that it stays below 0.1 s: torch, transformers and numpy take seconds."""
    code = (
        "import sys; before = set(sys.modules); import headrace; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "headrace" in imported
    assert imported - {"headrace"} <= sys.stdlib_module_names


def test_the_document_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == generator().render(), "run `make docs`"


@pytest.mark.parametrize("module", ["headrace", *sorted(set(headrace._MODULES.values())), "headrace.reward.terms"])
def test_examples_in_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_rewards_are_functions_names_or_terms() -> None:
    def mine(episode: object) -> float:
        return 1.0

    assert as_term(mine) == Term(name="mine", fn=mine)
    assert as_term("exact_match") == Term(name="exact_match", fn=exact_match)
    assert as_term(term := Term(name="half", fn=mine, weight=0.5)) is term
    assert as_term(f"{ROOT}/examples/my_reward.py:short").name == "short"
    with pytest.raises(ConfigError, match="unknown reward 'exact_mach': did you mean 'exact_match'"):
        InProcessRewardRunner(["exact_mach"])
