"""Examples in docstrings of `headrace.algo` run."""

import doctest
import importlib
import pkgutil

import pytest

import headrace.algo

MODULES = [module.name for module in pkgutil.walk_packages(headrace.algo.__path__, "headrace.algo.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) >= 5
