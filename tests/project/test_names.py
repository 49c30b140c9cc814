"""Names lead to one place: classes, modules, the maps of packages, and docstrings that say what a thing does."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "headrace"
MOST_FILES = 15  # in one folder: more cannot be read as a list
HEADLESS = {"What", "Of", "How", "Whether", "Where"}
PACKAGES = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_module_is_not_named_like_one_of_a_package_that_it_is_in() -> None:
    files = [file.relative_to(ROOT) for file in PACKAGE.rglob("*.py") if file.stem != "__init__"]
    stems = {(file.parent, file.stem) for file in files}
    same = [file for file in files for parent in file.parent.parents if (parent, file.stem) in stems]
    assert same == []


def test_every_folder_of_modules_is_a_package() -> None:
    assert {file.parent for file in PACKAGE.rglob("*.py")} == set(PACKAGES)


def test_a_package_has_few_enough_files_to_be_read_as_a_list() -> None:
    counts = Counter(file.parent.relative_to(ROOT) for file in PACKAGE.rglob("*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES + 1} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_docstring_of_a_package_names_every_module_of_it(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    stems = sorted(file.stem for file in package.glob("*.py") if file.stem != "__init__")
    assert [stem for stem in stems if not re.search(rf"(?<![\w.]){stem}(\.py)?(?!\w)", text)] == []


def test_a_docstring_begins_with_what_a_thing_does() -> None:
    headless = []
    for file, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0] in HEADLESS:
                headless.append(f"{file}:{getattr(node, 'lineno', 1)}")
    assert headless == []
