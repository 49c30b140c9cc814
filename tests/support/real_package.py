"""Reward functions called in a process that has the real package they were written for, and through the stand-in."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.reward.sandbox.limits import Outcome
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
from support.paths import ROOT

Specs = Mapping[str, Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]

PACKAGE = """
import importlib.machinery
sys.path.insert(0, {folder!r})

class Sham:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__getattr__ = lambda wanted: type(wanted, (), {{}})

sys.meta_path.insert(0, Sham())
{first}
import {package}
assert {package}.__file__.startswith({folder!r})
from importlib.metadata import version
assert version({wheel!r}) == {version!r}, version({wheel!r})
"""
CALLS = """
from headrace.reward.user_function import load
rows, found = json.loads({rows!r}), {{}}
for name, spec in json.loads({specs!r}).items():
    function = load(spec)
    if function.signature.takes_group:
        found[name] = [function.call({{"rows": rows}})]
    else:
        found[name] = [function.call({{"rows": [row]}}) for row in rows]
print("RESULT", json.dumps(found))
"""


def through_the_package(
    package: str, version: str, folder: Path, specs: Specs, rows: Rows, absent: Sequence[str] = (), first: str = ""
) -> Mapping[str, Any]:
    """What every function gives with the package in `folder`; it is imported once, which takes seconds. Modules of
    `absent` are shams, which have every name and do nothing; the line `first` is run before all else."""
    wheel = package.replace("_", "-")
    there = {"folder": str(folder), "absent": list(absent), "first": first, "wheel": wheel, "version": version}
    return _called(PACKAGE.format(package=package, **there), specs, rows)


def through_the_stand_in(package: str, specs: Specs, rows: Rows) -> Mapping[str, Any]:
    """The same without the package, in a process of its own."""
    absent = f"import importlib.util\nassert importlib.util.find_spec({package!r}) is None\n"
    return _called(absent, specs, rows)


async def in_the_sandbox(spec: Mapping[str, Any], rows: Rows) -> list[Any]:
    """What one function gives where users' functions run, through the stand-in."""
    sandbox = Sandbox(dict(spec), SandboxSettings(workers=1))
    about = await sandbox.describe()
    calls = [list(rows)] if about["shape"] in ("batch", "rows") else [[row] for row in rows]
    answers = [await sandbox.call({"rows": call}) for call in calls]
    await sandbox.close()
    assert {answer.outcome for answer in answers} == {Outcome.RETURNED}, answers
    return [json.loads(answer.result) for answer in answers]


def _called(before: str, specs: Specs, rows: Rows) -> Mapping[str, Any]:
    start = 'import json, sys, warnings\nwarnings.simplefilter("ignore")\n'
    root = f"sys.path.insert(0, {str(ROOT)!r})\n"
    code = start + root + before + CALLS.format(specs=json.dumps(specs), rows=json.dumps(rows))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    assert line.startswith("RESULT "), line
    found: Mapping[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found
