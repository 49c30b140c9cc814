"""CONTRIBUTING.md is true: its changes apply to a copy of the repository, and the tests that it names pass there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TESTS = re.compile(r"^\.venv/bin/pytest ([^-\n]+?)(?: -k (?:\"([^\"]+)\"|(\S+)))?$", re.MULTILINE)
WORKED = TEXT.index("## Where a new thing goes")


def apply(kind: str, block: str, root: Path) -> None:
    """Write a new file (python), or replace lines that must occur once (diff). The first line names the file."""
    title, _, body = block.partition("\n")
    file = root / title.removeprefix("# ")
    if kind == "python":
        assert not file.exists(), file
        file.write_text(body, encoding="utf-8")
        return
    lines = body.splitlines(keepends=True)
    assert {line[0] for line in lines} <= {" ", "+", "-"}
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    if lines[0][0] == "-" and not before.startswith("\n"):  # the end of a longer line may be enough
        before, after = before.rstrip("\n"), after.rstrip("\n")
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file} has {text.count(before)} times:\n{before}"
    file.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with every change of the document."""
    root = tmp_path_factory.mktemp("contributed")
    for folder in ("headrace", "tests", "docs", "examples"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for kind, block in BLOCKS:
        if kind in ("python", "diff"):
            apply(kind, block, root)
    return root


@pytest.mark.slow
def test_the_tests_that_the_document_names_pass_after_its_changes(changed: Path) -> None:
    commands = TESTS.findall(TEXT[WORKED:])
    assert len(commands) == TEXT[WORKED:].count("```sh")
    files = dict.fromkeys(file for files, _, _ in commands for file in files.split())
    words = [word for _, quoted, single in commands for word in (quoted or single).split(" or ")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", *files, "-k", " or ".join(words)],
        cwd=changed,
        env={**os.environ, "PYTHONPATH": str(changed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for part in (*files, *words):
        assert any(part in line for line in passed), f"nothing ran for {part}"


def test_the_changes_of_the_document_apply_and_are_formatted_and_linted(changed: Path) -> None:
    files = [block.partition("\n")[0].removeprefix("# ") for kind, block in BLOCKS if kind == "python"]
    files += {
        block.partition("\n")[0].removeprefix("# ") for kind, block in BLOCKS if kind == "diff" and ".py\n" in block
    }
    for arguments in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", *files],
            cwd=changed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_suites_are_those_of_ci() -> None:
    suites = re.findall(r"^suite (\S+) \S+ (required|optional)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| ([\w-]+) \|.*\| (required|if there is time) \|$", TEXT, re.MULTILINE)
    assert [(name, need == "required") for name, need in suites] == [(name, need == "required") for name, need in rows]


def test_the_commands_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", TEXT))
    assert {"install", "test", "check", "docs"} <= targets
    assert not [target for target in targets if f"\n{target}:" not in makefile]
