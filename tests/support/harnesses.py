"""Find the harnesses that `make test-harnesses` installs, and what the tests tell them to do."""

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from headrace.types import Message, Task
from headrace.user_code import load_module
from support.paths import EXAMPLES, ROOT

FOLDER = Path(os.environ.get("HEADRACE_HARNESSES", ROOT / ".venv-harnesses"))
BINARIES = {"mini": FOLDER / "bin", "claude": FOLDER / "node" / "node_modules" / ".bin"}


def put_in_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a harness first in PATH; skip the test if it is not installed."""
    if not (BINARIES[name] / name).exists():
        pytest.skip(f"{name} is not installed in {FOLDER}: run  make test-harnesses")
    monkeypatch.setenv("PATH", f"{BINARIES[name]}{os.pathsep}{os.environ['PATH']}")


def programs() -> ModuleType:
    """Import examples/harnesses.py."""
    return load_module(str(EXAMPLES / "harnesses.py"))


def repair_task() -> Task:
    row = json.loads((EXAMPLES / "data" / "repairs.jsonl").read_text().splitlines()[0])
    return Task(id="0", messages=(Message(role="user", content=row.pop("prompt")),), data=row)


def call_text(name: str, **arguments: object) -> str:
    """A call as the tests' chat template has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
