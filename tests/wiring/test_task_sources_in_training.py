"""Runs on several sources of tasks, with a curriculum, and with epochs in place of steps, and their resume."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headrace import wiring
from headrace.errors import ConfigError
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.sinks.jsonl import read_metrics, reproducible_bytes
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.explain import explain_config

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "model"
[engine]
max_num_seqs = 8
[rl]
steps = 4
groups = 4
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
rewards = [{ fn = "mine.py:score" }]
reward_runner = { type = "inprocess" }
sampling = { max_tokens = 4 }
optimizer = { learning_rate = 1e-2 }
[checkpoint]
every = 2
keep_last = 10
"""
TWO = """
[[rl.tasks]]
type = "jsonl"
path = "few.jsonl"
[[rl.tasks]]
type = "env"
name = "add"
size = 6
weight = 3.0
options = { max_number = 9 }
"""
ONE = '[rl.tasks]\ntype = "jsonl"\npath = "few.jsonl"\n'
MINE = """
def score(episode):
    found = sum(int(token) for token in episode.steps[0].completion.tokens)
    return {"score": found % 7 / 7, "success": found % 3 == 0}
"""
FEW = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(6)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "mine.py").write_text(MINE)
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FEW))
    save_tiny(folder / "model", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    return folder


def train(files: Path, text: str, *overrides: str, resume: Path | None = None) -> Path:
    file = files / "run.toml"
    file.write_text(CONFIG + text)
    config = load_checked(file, [f'run.folder="{files / "runs"}"', *overrides], command="train")
    return wiring.train(config, config_text_path=file, resume=resume).folder


def cut_back(run: Path, *, step: int, last: int) -> Path:
    """Copy a run as it would be if it had been killed after its checkpoint of `step`."""
    cut = run.with_name(f"{run.name}_cut")
    shutil.copytree(run, cut)
    shutil.rmtree(cut / "checkpoints" / "rl" / f"step_{last:06d}")
    (cut / "checkpoints" / "rl" / "latest").write_text(f"step_{step:06d}\n")
    return cut


def weights(run: Path, step: int = 4) -> bytes:
    return (run / "checkpoints" / "rl" / f"step_{step:06d}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("curriculum", ["", 'curriculum = "success_rate"\n'])
def test_a_mixture_trains_by_weight_and_resumes_byte_for_byte(files: Path, curriculum: str) -> None:
    run = train(files, TWO + curriculum)
    played = Counter[str]()
    for step in range(1, 5):
        episodes = load_trajectories(run / "rollouts" / f"step_{step:06d}.jsonl")
        tasks = {credited.scored.episode.task.id for credited in episodes}  # type: ignore[union-attr]
        played.update(id.partition(":")[0] for id in tasks)
    assert played == {"few": 4, "add": 12}
    records = [record.values for record in read_metrics(run / "metrics.jsonl")]
    for values in records:
        share = 0.25 * values["source/few/reward"] + 0.75 * values["source/add/reward"]
        assert share == pytest.approx(values["reward/mean"])
        assert "source/add/success" in values
    assert [("curriculum/tried" in values) for values in records] == [bool(curriculum)] * 4
    resumed = cut_back(run, step=2, last=4)
    train(files, TWO + curriculum, resume=resumed)
    assert reproducible_bytes(resumed / "metrics.jsonl") == reproducible_bytes(run / "metrics.jsonl")
    assert weights(resumed) == weights(run)


def test_a_curriculum_learns_from_groups_that_filters_reject(files: Path) -> None:
    reject = 'rl.filters=[{fn="reward_spread"}]'
    run = train(files, ONE + 'curriculum = "success_rate"\n', reject, "rl.async.max_consecutive_drops=64")
    values = [record.values for record in read_metrics(run / "metrics.jsonl")][-1]
    assert values["curriculum/tried"] == 1.0
    again = train(files, ONE + 'curriculum = "success_rate"\n', reject, "rl.async.max_consecutive_drops=64")
    assert reproducible_bytes(again / "metrics.jsonl") == reproducible_bytes(run / "metrics.jsonl")


def test_epochs_are_resolved_recorded_and_resumed(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    epochs = ("rl.epochs=1.5", "checkpoint.every=1")
    (files / "run.toml").write_text(CONFIG.replace("steps = 4\n", "") + ONE)
    config = load_checked(files / "run.toml", [*epochs], command="train")
    said = "'rl.epochs' = 1.5 of 6 tasks, 4 tasks a step: 3 steps"
    assert said in explain_config(config, file="run.toml")

    def run_it(*overrides: str, resume: Path | None = None) -> Path:
        config = load_checked(files / "run.toml", [f'run.folder="{files / "runs"}"', *overrides], command="train")
        return wiring.train(config, config_text_path=files / "run.toml", resume=resume).folder

    with caplog.at_level(logging.INFO):
        run = run_it(*epochs)
    assert said in caplog.text
    assert [record.step for record in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    plain = run_it("rl.steps=3", "checkpoint.every=1")
    assert weights(run, 3) == weights(plain, 3)
    resumed = cut_back(run, step=2, last=3)
    run_it(*epochs, resume=resumed)
    assert weights(resumed, 3) == weights(run, 3)
    again = cut_back(plain, step=2, last=3)
    with pytest.raises(ConfigError, match=r"the run was started without 'rl.epochs': write 'rl.steps'"):
        run_it(*epochs, resume=again)
    with pytest.raises(ConfigError, match="so the warm-up fills all 3 steps"):
        run_it(*epochs, "rl.optimizer.schedule.warmup_steps=3")
