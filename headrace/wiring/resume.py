"""Decide how a run is resumed: which run, with which configuration, and from which checkpoint of each stage."""

import logging
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tomli_w

from headrace.config import Config, load_config, map_paths, named_paths, num_steps, to_mapping
from headrace.config.aliases import use_new_names
from headrace.errors import CheckpointError, ConfigError, RunFolderError
from headrace.observe.config_changes import ConfigChange
from headrace.observe.run_folder import RunFolder, find_latest, find_runs
from headrace.train.checkpoint import CheckpointStore, LoadedCheckpoint, checkpoint_name, has_checkpoints, newest_step
from headrace.wiring.changed_config import STAGES, StageSteps, find_changes, is_fixed, names_other_file, refusal
from headrace.wiring.input_files import PERMISSIONS, read_record

logger = logging.getLogger(__name__)


def run_to_resume(config: Config, run: Path | None, *, base: Path | None = None) -> Path:
    """Return the run folder that was named, else the newest of the configuration's name (see `find_latest`).

    A relative `run.folder` is looked up in the working directory, then in `base`, the folder of the TOML file.
    """
    if run is not None:
        return RunFolder.open(run).path
    name, root = config.run.name, Path(config.run.folder)
    for place in (root, *(() if base is None else (base / root,))):
        latest = find_latest(place, name)
        if latest is not None:
            newest = find_runs(place, name)[0]
            if newest != latest:
                logger.info("%s has neither a checkpoint nor a metric, so %s is resumed", newest.path, latest.path)
            return latest.path
    raise ConfigError(f"there is no run named '{name}' in {root}: start it without --resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheckpoint:
    """The checkpoints of a stage that is to run or go on."""

    name: str
    steps: int  # of the whole stage
    store: CheckpointStore
    newest: LoadedCheckpoint | None  # the newest sound one; None: the stage starts from the beginning

    @property
    def done(self) -> int:
        """Training steps behind the newest checkpoint."""
        return 0 if self.newest is None else self.newest.step

    @property
    def is_complete(self) -> bool:
        """Tell whether the newest checkpoint is that of the last step."""
        return self.newest is not None and self.newest.step >= self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Says where each stage goes on; None for a stage that is not in the file, or whose result is already used."""

    sft: StageCheckpoint | None
    distill: StageCheckpoint | None
    dpo: StageCheckpoint | None
    reward_model: StageCheckpoint | None
    rl: StageCheckpoint | None
    policy_result: Path | None  # what the last stage before [rl] that trains the policy left behind, if [rl] has begun
    reward_model_result: Path | None  # the same of [reward_model]

    def runs(self, stage: Literal["sft", "distill", "dpo", "reward_model", "rl"]) -> bool:
        """Tell whether a stage has steps left."""
        checkpoint: StageCheckpoint | None = getattr(self, stage)
        return checkpoint is not None and not checkpoint.is_complete

    def retire_refused(self) -> None:
        """Put the refused checkpoints of every stage out of the way, because the run has been saved without them."""
        for stage in self.stages:
            stage.store.retire_refused()

    @property
    def stages(self) -> tuple[StageCheckpoint, ...]:
        """The stages that are in the file and whose result is not yet used, in their order."""
        stages = (self.sft, self.distill, self.dpo, self.reward_model, self.rl)
        return tuple(stage for stage in stages if stage is not None)

    @property
    def is_finished(self) -> bool:
        """Tell whether no stage has steps left."""
        return all(stage.is_complete for stage in self.stages)

    @property
    def place(self) -> tuple[str, int]:
        """The stage that the run goes on with, or its last one, and the steps that it has done."""
        stage = next((stage for stage in self.stages if not stage.is_complete), self.stages[-1])
        return stage.name, stage.done

    def reads(self, key: str) -> bool:
        """Tell whether a stage with steps left reads what this key of the configuration names."""
        match key.partition(".")[0]:
            case "sft" | "distill" | "dpo" | "reward_model" | "rl" as stage:
                return self.runs(stage)
            case "eval":
                return any(not stage.is_complete for stage in self.stages if stage.name != "reward_model")
            case _:
                return not self.is_finished


def plan_resume(config: Config, folder: RunFolder, *, check_owner: Callable[[], None] = lambda: None) -> ResumePlan:
    """Decide where every stage goes on; in a new run folder, each starts from the beginning.

    `check_owner` raises if this process may not write the run folder any more.

    - A stage goes on from its newest sound checkpoint. If all of those it has were read and are damaged,
      CheckpointError is raised if nothing came before the stage; else it starts again from the end of the stage before
      it.
    - A checkpoint that the machine cannot read may be sound: StorageError is raised, and nothing has been changed.
    - Once [rl] has a checkpoint, the stages before it are neither run nor looked at: [rl] goes on with the very folders
      that it began with.
    """
    sft, distill, dpo, reward_model, rl = config.sft, config.distill, config.dpo, config.reward_model, config.rl
    trained = [(name, stage) for name, stage in (("sft", sft), ("distill", distill), ("dpo", dpo)) if stage is not None]
    follows = bool(trained)
    newest = partial(_newest, config, folder, check_owner)
    at_rl = None if rl is None else newest("rl", num_steps(rl), may_start_again=follows)
    begun = at_rl is not None and at_rl.newest is not None

    def result(name: str, steps: int) -> Path:
        return folder.checkpoints / name / checkpoint_name(steps)

    return ResumePlan(
        sft=None if sft is None or begun else newest("sft", num_steps(sft)),
        distill=None
        if distill is None or begun
        else newest("distill", num_steps(distill), may_start_again=sft is not None),
        dpo=None
        if dpo is None or begun
        else newest("dpo", num_steps(dpo), may_start_again=sft is not None or distill is not None),
        reward_model=None
        if reward_model is None or begun
        else newest("reward_model", num_steps(reward_model), may_start_again=follows),
        rl=at_rl,
        policy_result=result(trained[-1][0], num_steps(trained[-1][1])) if trained and begun else None,
        reward_model_result=result("reward_model", num_steps(reward_model))
        if reward_model is not None and begun
        else None,
    )


def _newest(
    config: Config,
    folder: RunFolder,
    check_owner: Callable[[], None],
    name: str,
    steps: int,
    *,
    may_start_again: bool = False,
) -> StageCheckpoint:
    checkpoints, keep = folder.checkpoints / name, config.checkpoint
    store = CheckpointStore(checkpoints, keep_last=keep.keep_last, keep_every=keep.keep_every, check_owner=check_owner)
    newest = None
    if has_checkpoints(checkpoints):
        try:
            newest = store.load_latest()
        except CheckpointError:  # all of them are damaged
            if not may_start_again:
                raise
            logger.warning("stage %s starts again from the end of the one before it", name)
        else:
            if config.model.service is None:  # else a save removes them, and their states at the service
                store.remove_unneeded()
    return StageCheckpoint(name=name, steps=steps, store=store, newest=newest)


def check_same_run(folder: RunFolder, config: Config, *, tell_moves: bool = False) -> list[ConfigChange]:
    """Return the keys that differ from the configuration with which the run went on last, if it can go on with them.

    Raises ConfigError that names every key that cannot change, with the reason. Places of files and runs do not count.
    Files whose digests the run recorded are compared by contents later; of others, the old place must be gone and the
    name the same.
    """
    before, _ = use_new_names(folder.read_config())
    if not isinstance(before.get("model"), dict):
        raise RunFolderError(f"{folder.config} is not whole: it has no table [model]; restore it")
    started = load_config(tomli_w.dumps(before), file=str(folder.config))  # keys since then: their defaults
    places = named_paths(config)
    moved = _moved(started, config, folder)
    if moved and tell_moves:
        logger.info("found at another place than when the run was started: %s", ", ".join(sorted(moved)))
    started = map_paths(started, lambda key, path: places[key] if key in moved else path)
    changes = find_changes(_as_toml(started), _as_toml(config))
    steps = StageSteps(
        done={name: done for name in STAGES if (done := newest_step(folder.checkpoints / name)) is not None}
    )
    refused = [(change, why) for change in changes if (why := refusal(change, steps)) is not None]
    if refused:
        lines = "\n".join(f"{change}: {why}" for change, why in refused)
        raise ConfigError(
            f"{folder.path} cannot go on with these changes of its configuration:\n{lines}\n"
            "write the old values, or start a new run without --resume (a checkpoint may be its model.path)"
        )
    return changes


def _moved(started: Config, config: Config, folder: RunFolder) -> set[str]:
    """Return the keys of paths that seem to name the same files at another place; contents are compared later."""
    old, new = named_paths(started), named_paths(config)
    record = read_record(folder)
    recorded = set() if record is None else set(record.keys)
    return {
        key
        for key, path in old.items()
        if path != new.get(key, path)
        and (
            (key in recorded and (is_fixed(key) or not names_other_file(path, new[key])))
            or key.startswith(PERMISSIONS)
            or (not os.path.exists(path) and Path(path).name == Path(new[key]).name)
        )
    }


def _as_toml(config: Config) -> dict[str, Any]:
    return tomllib.loads(tomli_w.dumps(to_mapping(config)))
