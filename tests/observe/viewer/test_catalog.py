"""Which file, which step, which episodes; and that a large file is not held in memory."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from headrace.errors import ConfigError, RunFolderError
from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.viewer.catalog import choose, find_file, method_text, read_catalog, read_episodes
from support import rollout_files


def test_a_folder_means_its_latest_training_step(tmp_path: Path) -> None:
    rollouts = tmp_path / "run" / "rollouts"
    for number in (2, 10, 9):
        rollout_files.save(rollouts / f"step_{number:06d}.jsonl")
    rollout_files.save(rollouts / "recredited_step_000010.jsonl")
    latest = rollouts / "step_000010.jsonl"
    assert find_file(tmp_path / "run") == find_file(rollouts) == find_file(latest) == latest
    assert find_file(rollouts, step=9) == rollouts / "step_000009.jsonl"
    with pytest.raises(ConfigError, match="no rollouts of training step 3; there are 2, 9, 10"):
        find_file(rollouts, step=3)
    with pytest.raises(ConfigError, match="there is no file or folder"):
        find_file(tmp_path / "nowhere")


def test_without_training_steps_the_last_evaluation_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rollout files"):
        find_file(tmp_path)
    for age, label in enumerate(("rl", "base")):
        rollout_files.save(tmp_path / f"eval_{label}.jsonl")
        os.utime(tmp_path / f"eval_{label}.jsonl", (1000 - age, 1000 - age))
    assert find_file(tmp_path).name == "eval_rl.jsonl"


def test_a_catalog_has_a_few_numbers_of_every_episode(tmp_path: Path) -> None:
    catalog = read_catalog(rollout_files.save(tmp_path / "a.jsonl"))
    assert catalog.groups == ("7", "8")
    assert (catalog.run, catalog.training_step, method_text(catalog.method)) == (
        "walk",
        4,
        "gigpo (gamma 0.5, norm none)",
    )
    first, *_, lost = catalog.summaries
    assert (first.id, first.total, first.num_steps, first.num_sampled, first.success) == ("7/0", 1.0, 3, 6, True)
    # R = 1, 1, 0: A_E = 1/3. S {1/4, 1/8, 1/4, 0, 0}: mean 1/8; A {1/2, 1/2, 0}: mean 1/3; B {1, 1}
    assert first.episode_advantage == pytest.approx(1 / 3)
    assert first.advantages == pytest.approx((1 / 3, 1 / 3 + 1 / 6))
    assert first.num_compared == 3
    assert (lost.id, lost.failed, lost.group) == ("8/2", "the world ended", "8")


def test_a_file_of_several_steps_shows_the_latest_and_names_the_others(tmp_path: Path) -> None:
    parts = [rollout_files.save(tmp_path / f"{k}.jsonl", training_step=k).read_text() for k in (3, 12, 5)]
    mixed = tmp_path / "all.jsonl"
    mixed.write_text("".join(parts))
    catalog = read_catalog(mixed)
    assert (catalog.training_step, catalog.other_steps, len(catalog.summaries)) == (12, (3, 5), 6)
    earlier = read_catalog(mixed, step=3)
    assert earlier.training_step == 3
    (chosen,) = read_episodes(mixed, [earlier.summaries[1].place])
    assert (chosen.training_step, chosen.id) == (3, "7/1")
    with pytest.raises(ConfigError, match="no episodes of training step 4; it has those of 3, 5, 12"):
        read_catalog(mixed, step=4)


def test_episodes_are_chosen_by_task_and_id(tmp_path: Path) -> None:
    catalog = read_catalog(rollout_files.save(tmp_path / "a.jsonl"))
    assert [summary.id for summary in choose(catalog, task="corr")] == ["7/0", "7/1", "7/2"]
    assert [summary.id for summary in choose(catalog, episode="7/1")] == ["7/1"]
    with pytest.raises(ConfigError, match=r"several tasks of .* begin with '': corridor, still"):
        choose(catalog, task="")
    with pytest.raises(ConfigError, match=r"there is no episode '7/9' in .*; did you mean 7/"):
        choose(catalog, episode="7/9")
    with pytest.raises(ConfigError, match=r"episode '1/0' in .*; there are 7/0, .* --step N looks into another"):
        choose(catalog, episode="1/0")
    with pytest.raises(ConfigError, match=r"there is no task 'attic' in .*; there are corridor, still"):
        choose(catalog, task="attic")


def test_episodes_that_were_never_credited_are_held_together_by_their_ids(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.jsonl", rollout_files.uncredited())
    catalog = read_catalog(tmp_path / "a.jsonl")
    assert catalog.groups == ("7", "8")
    assert method_text(catalog.method) == "not credited"
    assert {summary.advantages for summary in catalog.summaries} == {None}


def test_an_empty_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="holds no episodes"):
        read_catalog(tmp_path / "a.jsonl")


def test_a_large_file_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    small = rollout_files.save(tmp_path / "small.jsonl").read_text().splitlines()[0]
    line = json.loads(small)
    line["messages"] = [{"role": "user", "content": "x" * 200_000}]
    text = json.dumps(line) + "\n"
    large = tmp_path / "large.jsonl"
    with large.open("w") as file:
        for _ in range(60):
            file.write(text)
    assert large.stat().st_size > 12_000_000
    tracemalloc.start()
    catalog = read_catalog(large)
    (last,) = read_episodes(large, [59], tokens=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(catalog.summaries) == 60
    assert last.id == "7/0"
    assert peak < 4_000_000
