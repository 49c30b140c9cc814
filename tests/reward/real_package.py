"""Reward functions called in a process that has the real package they were written for, in a folder of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.reward.sandbox.limits import Outcome
from headrace.reward.sandbox.pool import Sandbox, Settings

CODE = """
import importlib.machinery, json, sys, types, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{root!r}, {folder!r}]

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
from headrace.reward.calling import load
rows, found = json.loads({rows!r}), {{}}
for name, spec in json.loads({specs!r}).items():
    function = load(spec)
    if function.shape.takes_group:
        found[name] = [function.call({{"rows": rows}})]
    else:
        found[name] = [function.call({{"rows": [row]}}) for row in rows]
print("RESULT", json.dumps(found))
"""


def through_the_package(
    package: str,
    version: str,
    folder: Path,
    specs: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    absent: Sequence[str] = (),
    first: str = "",
) -> Mapping[str, Any]:
    """What every function gives; the package is imported once, which takes seconds. Modules of `absent`
    are shams, which have every name and do nothing; the line `first` is run before all else."""
    code = CODE.format(
        package=package,
        wheel=package.replace("_", "-"),
        version=version,
        folder=str(folder),
        root=str(Path(__file__).parents[2]),
        absent=list(absent),
        first=first,
        specs=json.dumps(specs),
        rows=json.dumps(rows),
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    found: Mapping[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


async def through_the_stand_in(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The same in the sandbox, where the package is not."""
    sandbox = Sandbox(dict(spec), Settings(workers=1))
    about = await sandbox.describe()
    calls = [list(rows)] if about["shape"] in ("batch", "rows") else [[row] for row in rows]
    answers = [await sandbox.call({"rows": call}) for call in calls]
    await sandbox.close()
    assert {answer.outcome for answer in answers} == {Outcome.RETURNED}, answers
    return [json.loads(answer.result) for answer in answers]
