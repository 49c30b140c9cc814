"""Where the stages of a run go on: the rules of resuming, on folders of checkpoints."""

import errno
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headrace.config import Config, load_config
from headrace.envs import ENVIRONMENTS
from headrace.errors import CheckpointError, DataError, StorageError
from headrace.model.tiny import make_tokenizer
from headrace.model.tokenizer import TokenizerOnly
from headrace.observe.run_folder import RunFolder
from headrace.train.checkpoint import CheckpointStore
from headrace.wiring.preflight import preflight
from headrace.wiring.resume import plan_resume

SOURCE = '{ type = "env", name = "key_door" }'
SFT = f"[sft]\nsteps = 2\nsources = [{SOURCE}]\n"
REWARD_MODEL = f"[reward_model]\nsteps = 3\nsources = [{SOURCE}]\n"
RL = f"[rl]\nsteps = 4\ntasks = {SOURCE}\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", datetime(2026, 1, 1, tzinfo=UTC))


def config_of(text: str) -> Config:
    return load_config(text, file="run.toml")


def save(folder: RunFolder, stage: str, step: int) -> Path:
    def write(path: Path) -> None:
        (path / "weights").write_bytes(b"1234")

    return CheckpointStore(folder.checkpoints / stage, keep_last=9, keep_every=0).save(step, write, {"stage": stage})


def test_in_a_new_folder_every_stage_starts_from_the_beginning(folder: RunFolder) -> None:
    plan = plan_resume(config_of(SFT + REWARD_MODEL + RL), folder)
    stages = (plan.sft, plan.reward_model, plan.rl)
    assert [(stage.name, stage.steps, stage.done) for stage in stages if stage] == [
        ("sft", 2, 0),
        ("reward_model", 3, 0),
        ("rl", 4, 0),
    ]
    assert (plan.policy_result, plan.reward_model_result) == (None, None)


def test_a_stage_goes_on_from_its_newest_checkpoint(folder: RunFolder) -> None:
    save(folder, "sft", 1)
    newest = save(folder, "sft", 2)
    plan = plan_resume(config_of(SFT + RL), folder)
    assert plan.sft is not None
    assert plan.sft.newest is not None
    assert (plan.sft.done, plan.sft.newest.folder) == (2, newest)
    assert plan.rl is not None
    assert plan.rl.newest is None


def test_once_rl_has_begun_earlier_stages_are_not_looked_at(folder: RunFolder) -> None:
    sft = save(folder, "sft", 2)
    (sft / "weights").write_bytes(b"other")  # the stage that uses it will say so
    save(folder, "rl", 1)
    plan = plan_resume(config_of(SFT + REWARD_MODEL + RL), folder)
    assert (plan.sft, plan.reward_model) == (None, None)
    assert plan.policy_result == sft
    assert plan.reward_model_result == folder.checkpoints / "reward_model" / "step_000003"
    assert plan.rl is not None
    assert plan.rl.done == 1


def test_a_stage_without_a_sound_checkpoint_starts_again_only_after_another_stage(folder: RunFolder) -> None:
    (save(folder, "rl", 1) / "weights").write_bytes(b"other")
    with pytest.raises(CheckpointError):
        plan_resume(config_of(RL), folder)
    plan = plan_resume(config_of(SFT + RL), folder)
    assert plan.rl is not None
    assert plan.rl.newest is None
    assert plan.sft is not None, "its end is where [rl] starts"


@pytest.mark.parametrize("call", ["open", "read_text"])
def test_a_stage_whose_checkpoint_the_machine_cannot_read_does_not_start_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(folder, "sft", 2)
    save(folder, "rl", 1)
    (save(folder, "rl", 2) / "weights").write_bytes(b"other")
    real = getattr(Path, call)

    def fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        if "step_000001" in str(self):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *args, **kwargs)

    before = sorted(str(path) for path in folder.path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        with pytest.raises(StorageError, match=r"step_000001/.* cannot be read \(Input/output error\)"):
            plan_resume(config_of(SFT + RL), folder)
    assert sorted(str(path) for path in folder.path.rglob("*")) == before
    plan = plan_resume(config_of(SFT + RL), folder)
    assert plan.rl is not None
    assert plan.rl.done == 1


def test_a_pointer_that_cannot_be_written_starts_no_stage_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "sft", 2)
    save(folder, "rl", 1)
    (folder.checkpoints / "rl" / "latest").unlink()

    def full_disk(*args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    plan = plan_resume(config_of(SFT + RL), folder)
    assert plan.rl is not None
    assert plan.rl.done == 1


def test_a_start_removes_the_checkpoints_that_a_kill_left_too_many(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        save(folder, "rl", step)
    plan_resume(config_of(RL + "[checkpoint]\nkeep_last = 1\n"), folder)
    assert [path.name for path in sorted((folder.checkpoints / "rl").glob("step_*"))] == ["step_000003"]


def test_data_of_stages_without_steps_left_are_not_read_again(folder: RunFolder, tmp_path: Path) -> None:
    config = config_of(f'[sft]\nsteps = 2\nsources = [{{ type = "jsonl", path = "{tmp_path}/gone.jsonl" }}]\n' + RL)
    tokenizer = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
    tokens = TokenizerOnly(tokenizer=tokenizer, eos_tokens=(tokenizer.eos_token_id,))
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        preflight(config, plan_resume(config, folder), tokens)
    save(folder, "sft", 2)
    inputs = preflight(config, plan_resume(config, folder), tokens)
    assert inputs.sft is None
    assert inputs.rl is not None
    save(folder, "rl", 4)
    inputs = preflight(config, plan_resume(config, folder), tokens)
    assert (inputs.sft, inputs.rl) == (None, None)
