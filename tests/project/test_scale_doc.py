"""Every file in docs/scale.md is one that the check of configurations accepts."""

import re
import sys
from pathlib import Path

import pytest

from headrace.config import check, load_config
from support.paths import ROOT

PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
FILES = [block for block in BLOCKS if "[rl]" in block]  # the others are single tables


def test_there_is_a_file_for_each_size() -> None:
    assert len(FILES) >= 4
    for size in ("**A laptop.**", "**One GPU.**", "**Eight GPUs of one machine.**", "**A cluster.**"):
        assert size in PAGE


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_read(block: str) -> None:
    load_config(block, file="docs/scale.md")


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_accepted_with_paths_of_this_machine(tmp_path: Path, file: str) -> None:
    overrides = []
    if 'path = "models/' in file:
        overrides += ["model.path=tiny", "model.tiny.context=16384"]
    if "[engine.launch]" in file:
        overrides += [f"engine.launch.python={sys.executable}"]
    check(load_config(file, file="docs/scale.md", overrides=overrides), file="docs/scale.md", base=tmp_path)


def test_the_files_differ_in_where_they_compute_alone() -> None:
    tables = [set(re.findall(r"^\[([a-z_]+)", file, re.M)) for file in FILES]
    assert set.union(*tables) == {"run", "model", "engine", "cluster", "sft", "rl"}
    tasks = {line for file in FILES for line in file.splitlines() if line.startswith(("tasks =", "rewards ="))}
    assert len(tasks) == 2  # the same in all of them
