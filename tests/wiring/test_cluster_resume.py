"""A run may go on with other workers than it began with, and a run folder from before [cluster] opens."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import tomli_w

from headrace.config import Config, load_config, to_mapping
from headrace.observe.run_folder import RunFolder
from headrace.wiring.resume import check_same_run

RL = """
[model]
path = "tiny"
[rl]
steps = 1
tasks = { type = "env", name = "key_door", size = 4 }
"""


def config(*overrides: str) -> Config:
    return load_config(RL, overrides=list(overrides), file="run.toml")


def begun_with(tmp_path: Path, tables: dict[str, object]) -> RunFolder:
    folder = RunFolder.create(tmp_path, "t", datetime(2026, 1, 1, tzinfo=UTC))
    folder.write_config(tomli_w.dumps(tables))
    return folder


def test_workers_may_differ_from_those_at_the_start(tmp_path: Path) -> None:
    folder = begun_with(tmp_path, to_mapping(config("cluster.address=local", "cluster.rollout_workers=4")))
    assert {change.key for change in check_same_run(folder, config())} == {"cluster.address", "cluster.rollout_workers"}
    check_same_run(folder, config("cluster.address=auto"))


def test_a_folder_from_before_the_table_opens_and_other_differences_are_told(tmp_path: Path) -> None:
    tables = to_mapping(config())
    tables.pop("cluster", None)
    folder = begun_with(tmp_path, tables)
    check_same_run(folder, config("cluster.address=local"))
    other = config()
    assert other.rl is not None
    [change] = check_same_run(folder, replace(other, rl=replace(other.rl, steps=2)))
    assert str(change) == "rl.steps: 1 -> 2"
