"""Decide how a run is resumed: which run, with which configuration, and from which checkpoint of each stage."""

import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tomli_w

from headrace.config import Config, load_config, map_paths, named_paths, to_mapping
from headrace.config.aliases import use_new_names
from headrace.errors import CheckpointError, ConfigError, RunFolderError
from headrace.observe.run_folder import RunFolder, find_latest, find_runs
from headrace.train.checkpoint import CheckpointStore, LoadedCheckpoint, checkpoint_name, has_checkpoints
from headrace.wiring.input_files import PERMISSIONS, read_record

logger = logging.getLogger(__name__)
NOT_TRAINED = ("folder", "stall_warn_s", "stall_end_s")  # keys of [run] that do not change what is trained


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
    at_rl = None if rl is None else newest("rl", rl.steps, may_start_again=follows)
    begun = at_rl is not None and at_rl.newest is not None

    def result(name: str, steps: int) -> Path:
        return folder.checkpoints / name / checkpoint_name(steps)

    return ResumePlan(
        sft=None if sft is None or begun else newest("sft", sft.steps),
        distill=None if distill is None or begun else newest("distill", distill.steps, may_start_again=sft is not None),
        dpo=None
        if dpo is None or begun
        else newest("dpo", dpo.steps, may_start_again=sft is not None or distill is not None),
        reward_model=None
        if reward_model is None or begun
        else newest("reward_model", reward_model.steps, may_start_again=follows),
        rl=at_rl,
        policy_result=result(trained[-1][0], trained[-1][1].steps) if trained and begun else None,
        reward_model_result=result("reward_model", reward_model.steps) if reward_model is not None and begun else None,
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


def check_same_run(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError unless the run was started with this configuration: anything else would not be a resume.

    Only [metrics], [cluster], the address of a service and the places of files and runs may differ. Files whose digests
    the run recorded are compared by contents later; of others, the old place must be gone and the name the same.
    """
    before, _ = use_new_names(folder.read_config())
    if not isinstance(before.get("model"), dict):
        raise RunFolderError(f"{folder.config} is not whole: it has no table [model]; restore it")
    before = to_mapping(load_config(tomli_w.dumps(before), file=str(folder.config)))  # keys since then: their defaults
    before = _at_new_places(before, config, folder)
    differences = list(_differences(_what_is_trained(before), _what_is_trained(to_mapping(config))))
    if not differences:
        return
    more = f" (and {len(differences) - 1} more keys differ)" if len(differences) > 1 else ""
    raise ConfigError(
        f"{folder.path} was started with {differences[0]}{more}: resume with the same file and overrides, "
        "or start a new run without --resume"
    )


def _at_new_places(before: dict[str, Any], config: Config, folder: RunFolder) -> dict[str, Any]:
    """Return the configuration that a run was started with, with the paths under which its files are found now."""
    started = load_config(tomli_w.dumps(before), file=str(folder.config))
    old, new = named_paths(started), named_paths(config)
    record = read_record(folder)
    recorded = set() if record is None else set(record.keys)
    moved = {
        key
        for key, path in old.items()
        if path != new.get(key, path)
        and (
            key in recorded
            or key.startswith(PERMISSIONS)
            or (not os.path.exists(path) and Path(path).name == Path(new[key]).name)
        )
    }
    if not moved:
        return before
    logger.info("found at another place than when the run was started: %s", ", ".join(sorted(moved)))
    places = to_mapping(map_paths(started, lambda key, path: new[key] if key in moved else path))
    return {table: places.get(table, value) for table, value in before.items()}


def _what_is_trained(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as TOML has it, without the places of numbers and runs and the address of a service."""
    tables = tomllib.loads(tomli_w.dumps(mapping))
    for table in ("metrics", "cluster"):
        tables.pop(table, None)
    run = {key: value for key, value in tables.get("run", {}).items() if key not in NOT_TRAINED}
    model = {key: value for key, value in tables["model"].items() if key not in ("service", "service_key_env")}
    service = {"service": "there is one"} if "service" in tables["model"] else {}
    return {**tables, "run": run, "model": {**model, **service}}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield "'rl.steps' = 4 and it is now 5" for every key that differs."""
    for key in (*before, *(key for key in now if key not in before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            values = ["not set" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new)]
            yield f"'{prefix}{key}' = {values[0]} and it is now {values[1]}"
