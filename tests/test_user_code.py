"""Functions by name, from files and modules, and one sentence for each way it can go wrong."""

import math
import pickle
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.user_code import find_function, import_file, load_function

FILE = """
from __future__ import annotations
from dataclasses import dataclass
from math import sqrt

CALLS = []
limit = 3

@dataclass
class Settings:
    size: int = 4

def add(a, b=1):
    CALLS.append(a)
    return a + b

def calls():
    return len(CALLS)

def _hidden():
    return 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_a_function_from_a_file_or_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("mine.py:add", base=folder)(2, b=3) == 5
    assert load_function(f"{folder / 'mine.py'}:Settings")().size == 4
    monkeypatch.chdir(folder)
    assert load_function("mine.py:add", base=None)(2) == 3
    assert load_function("math:sqrt", base=None) is math.sqrt


def test_functions_of_one_file_share_its_globals_and_pickle(folder: Path) -> None:
    add, calls = load_function("mine.py:add", base=folder), load_function("mine.py:calls", base=folder)
    before = calls()
    pickle.loads(pickle.dumps(add))(1)
    assert calls() == before + 1


def test_a_changed_file_is_read_again(folder: Path) -> None:
    assert load_function("mine.py:add", base=folder)(1) == 2
    (folder / "mine.py").write_text("def add(a):\n    return -a\n")
    assert load_function("mine.py:add", base=folder)(1) == -1


def test_a_file_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import os\nREADY = os.environ['NEEDED']\ndef ready():\n    return READY\n")
    with pytest.raises(KeyError):
        import_file(tmp_path / "needy.py")
    monkeypatch.setenv("NEEDED", "now")
    assert find_function(import_file(tmp_path / "needy.py"), "ready", spec="needy.py:ready")() == "now"


def test_each_mistake_has_its_sentence(folder: Path) -> None:
    (folder / "broken.py").write_text("import no_such_package\n")
    (folder / "empty.py").write_text("x = 1\n")
    cases = {
        "add": 'write "file.py:function"',
        "mine.py:": 'write "file.py:function"',
        "absent.py:add": "there is no file .*absent.py",
        "mine.py:sub": "there is no function sub; mine.py has Settings, add, calls$",
        "mine.py:limit": "limit is not a function; mine.py has",
        "empty.py:f": "empty.py has no functions",
        "broken.py:f": "broken.py cannot be imported: ModuleNotFoundError: .*no_such_package",
        "no.such.module:f": "module no.such.module cannot be imported",
        "math:nothing": "there is no function nothing; math has acos, ",
    }
    for spec, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_function(spec, base=folder)
