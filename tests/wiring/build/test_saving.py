"""`rl.save`: which rollouts of a training step reach the run folder, and with what in them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import RlConfig, SourceConfig, load_config
from headrace.config.schema import SaveConfig
from headrace.errors import ConfigError
from headrace.observe.rollouts.records import iter_lines
from headrace.observe.run_folder import RunFolder
from headrace.wiring.build.saving import make_record
from support import rollout_files

Saves = Callable[..., list[str] | None]


@pytest.fixture
def saved(tmp_path: Path) -> Saves:
    """Ids of the episodes that step `step` leaves behind; None: no file."""

    def run(step: int = 4, **save: object) -> list[str] | None:
        folder = RunFolder(path=tmp_path)
        tasks = SourceConfig(type="env", name="key_door")
        c = RlConfig(steps=9, tasks=tasks, credit="gigpo", save=SaveConfig(**save))  # type: ignore[arg-type]
        make_record(c, folder)(step - 1, rollout_files.groups(), rollout_files.credited())
        path = folder.step_rollouts(step)
        return [line.id for line in iter_lines(path)] if path.is_file() else None

    return run


def test_by_default_everything_is_saved_with_where_it_is_from(saved: Saves, tmp_path: Path) -> None:
    assert saved() == ["7/0", "7/1", "7/2", "8/0", "8/1", "8/2"]
    first = next(iter_lines(tmp_path / "rollouts" / "step_000004.jsonl"))
    assert (first.run, first.training_step, first.group_size, first.lean) == (tmp_path.name, 4, 3, False)
    assert first.credit is not None
    assert first.credit.method == "gigpo"


def test_failures_the_largest_advantages_and_every_nth(saved: Saves) -> None:
    assert saved(which="failures") == ["7/2", "8/0", "8/1", "8/2"]
    assert saved(which="top_advantage", top=1) == ["7/2"]
    assert saved(which="top_advantage", top=1, whole_groups=True) == ["7/0", "7/1", "7/2"]
    assert saved(every_episode=3) == ["7/0", "8/0", "8/2"]


def test_every_nth_step_and_the_first(saved: Saves) -> None:
    assert [step for step in range(1, 8) if saved(step, every=3) is not None] == [1, 3, 6]
    assert saved(2, every=0) is None


def test_a_function_of_the_user_chooses(saved: Saves, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def long(credited):\n    return len(credited.advantages) > 3\n")
    assert saved(which=f"{tmp_path / 'mine.py'}:long") == ["7/1"]
    (tmp_path / "none.py").write_text("def nothing(credited):\n    return False\n")
    assert saved(5, which=f"{tmp_path / 'none.py'}:nothing") is None, "a step without any has no file"
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.py"):
        saved(which="nowhere.py:long")


def test_a_lean_file_says_so_and_knows_the_size_of_its_groups(saved: Saves, tmp_path: Path) -> None:
    assert saved(which="failures", lean=True) == ["7/2", "8/0", "8/1", "8/2"]
    first = next(iter_lines(tmp_path / "rollouts" / "step_000004.jsonl"))
    assert first.lean
    assert first.group_size == 3, "of which one is saved"


def test_a_file_says_which_episodes_are_saved() -> None:
    config = load_config('[rl]\nsteps = 1\n[rl.tasks]\ntype = "env"\n[rl.save]\nwhich = "failures"', file="run.toml")
    assert config.rl is not None
    assert config.rl.save == SaveConfig(which="failures")
