"""What is imported when headrace is imported is what it asks pip for, and nothing that happens to come along."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

from support.paths import ROOT

NAMES = {"google": "protobuf"}  # imported by another name than installed by
WITH_TORCH = {"triton"}  # torch for CUDA brings it along, and only modules for CUDA import it
VLLM_PLUGIN = ROOT / "headrace" / "infer" / "servers" / "vllm_plugin"  # imported by vLLM, in its own environment


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Packages that a module imports as it is imported itself."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]
        for part in ("body", "orelse", "finalbody"):
            yield from imported(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from imported(handler.body)


def test_every_package_that_is_imported_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in project["dependencies"]}
    needed: dict[str, list[str]] = {}
    for file in (ROOT / "headrace").rglob("*.py"):
        if file.is_relative_to(VLLM_PLUGIN):
            continue
        for name in imported(ast.parse(file.read_text()).body):
            if name not in sys.stdlib_module_names and name != "headrace" and name not in WITH_TORCH:
                needed.setdefault(NAMES.get(name, name).lower().replace("_", "-"), []).append(
                    str(file.relative_to(ROOT))
                )
    assert {"torch", "httpx", "typer"} <= needed.keys()
    missing = {name: files for name, files in needed.items() if name not in asked}
    assert not missing
