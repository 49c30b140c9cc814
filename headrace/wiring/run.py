"""A run: a folder and a list of stages; the stages after [sft] start from the model folder that it left behind."""

import asyncio
import contextlib
import json
import logging
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from headrace.config import Config, to_mapping
from headrace.errors import CheckpointError, ConfigError, Interrupted, RunFolderError, boundary
from headrace.model.deterministic import make_deterministic
from headrace.model.load import choose_device
from headrace.model.quiet import no_progress_bars
from headrace.model.worker import leave_arithmetic_to_workers
from headrace.observe.report import write_report
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks import check_records
from headrace.train.checkpoint import CheckpointStore, Loaded, checkpoint_name, read_checkpoint
from headrace.wiring.ahead import look_ahead
from headrace.wiring.desk import Desk, Run
from headrace.wiring.metrics import Outlets
from headrace.wiring.models import starting_model
from headrace.wiring.process import log_to, stop_on_signals
from headrace.wiring.remote import check_service, starting_state
from headrace.wiring.rewards import close_terms
from headrace.wiring.sources import training_tasks
from headrace.wiring.stages import run_reward_model, run_rl, run_sft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run says: `text` for people, `figures` for programs."""

    folder: Path
    report: Path
    text: str
    figures: Mapping[str, Any]


def train(config: Config, *, config_text_path: Path, resume: Path | None) -> RunResult:
    """Run the stages of a configuration, from the beginning or from a run folder's newest checkpoints."""
    if config.model.service is not None:
        with no_progress_bars():
            check_service(config)
    else:
        device = choose_device(config.model.device)  # one that is not there is refused before there is a run
        if device == "cuda" and config.run.deterministic:
            make_deterministic()
    if resume is None:
        run = RunFolder.create(Path(config.run.folder), config.run.name, datetime.now(UTC))
        run.write_config(tomli_w.dumps(to_mapping(config)))
        run.write_environment()
    else:
        run = RunFolder.open(resume)
        _check_same_run(run, config)
    with log_to(run.log), no_progress_bars():
        logger.info("%s: run folder %s", config_text_path, run.path)
        try:
            return asyncio.run(_train(config, run))
        except Interrupted as exc:
            raise Interrupted(f"{exc}; go on with  headrace train {run.config} {run.path} --resume") from exc


async def _train(config: Config, folder: RunFolder) -> RunResult:
    look_ahead(config)  # what cannot work is found before anything is trained
    threads = leave_arithmetic_to_workers()
    start = starting_model(config, folder) if config.model.service is None else starting_state(config.model)
    run = Run(config, folder, asyncio.Event(), start, threads=threads, outlets=Outlets(config.metrics))
    with contextlib.closing(run.outlets), stop_on_signals(run.stop, deadline_s=config.checkpoint.deadline_s):
        rl_found = _Found.of(run, "rl", may_start_again=config.sft is not None) if config.rl is not None else None
        if config.sft is not None:
            if rl_found is not None and rl_found.newest is not None:  # what [sft] left behind has been used already
                run.model_path = str(run.folder.checkpoints / "sft" / checkpoint_name(config.sft.steps))
            else:
                left = await _stage(run, _Found.of(run, "sft"), config.sft.steps, run_sft)
                run.model_path = str(left.folder)
        if config.reward_model is not None:
            if rl_found is not None and rl_found.newest is not None:  # [rl] goes on with the very one it began with
                left = read_checkpoint(
                    run.folder.checkpoints / "reward_model" / checkpoint_name(config.reward_model.steps)
                )
            else:
                found = _Found.of(run, "reward_model", may_start_again=config.sft is not None)
                left = await _stage(run, found, config.reward_model.steps, run_reward_model)
            run.reward_model_path = str(left.folder)
            if left.score is not None:
                run.figures["accuracy_reward_model"] = left.score
        if config.rl is not None:
            assert rl_found is not None
            await _stage(run, rl_found, config.rl.steps, run_rl)
    summary = {key: value for key, value in run.figures.items() if isinstance(value, int | float)}
    report = write_report(folder.path, summary)
    lines = [f"{name} = {value:.4g}" for name, value in summary.items()]
    text = "\n".join([f"Run folder: {folder.path}", f"Report: {report}", *lines])
    return RunResult(folder=folder.path, report=report, text=text, figures=run.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A stage's checkpoints, and the newest sound one of them; None when there is none to go on from."""

    name: str
    store: CheckpointStore
    newest: Loaded | None

    @classmethod
    def of(cls, run: Run, name: str, *, may_start_again: bool = False) -> "_Found":
        """Raises CheckpointError when there are checkpoints and none is sound, unless the stage may start again."""
        folder, keep = run.folder.checkpoints / name, run.config.checkpoint
        store = CheckpointStore(folder, keep_last=keep.keep_last, keep_every=keep.keep_every)
        newest = None
        if folder.is_dir() and any(folder.glob("step_*")):
            try:
                newest = store.load_latest()
            except CheckpointError:
                if not may_start_again:
                    raise
                logger.warning("stage %s starts again from the end of the one before it", name)
        return cls(name=name, store=store, newest=newest)


async def _stage(run: Run, at: _Found, steps: int, body: Callable[[Run, Desk], Awaitable[None]]) -> Loaded:
    """Run one stage unless its last checkpoint is there already; returns that checkpoint."""
    found = at.newest
    if found is None or found.step < steps:
        desk = Desk(run, at.name, steps, at.store, found)
        try:
            if run.config.rl is not None and run.tasks is None:  # before anything is trained: none may be left
                run.tasks = training_tasks(run.config, run.config.rl, desk.renderer)
            desk.place.try_worst_case()
            await body(run, desk)
        finally:
            await desk.programs.close()
            await close_terms(desk.__dict__.get("terms", ()))
            desk.close()
        found = at.store.load_latest()
    else:
        check_records(run.folder.metrics, int(found.state["metrics_records"]))
        logger.info("stage %s is complete", at.name)
    run.metrics_records = int(found.state["metrics_records"])
    run.figures |= found.state["figures"]
    return found


def _check_same_run(run: RunFolder, config: Config) -> None:
    """A run goes on with the configuration it began with; anything else would not be a resume. Only a service may have
    another address than before."""
    with boundary(RunFolderError, f"{run.config} cannot be read"):
        before = tomllib.loads(run.config.read_text(encoding="utf-8"))
    before.pop("metrics", None)  # where numbers go is no part of what is trained
    now = {key: value for key, value in to_mapping(config).items() if key != "metrics"}
    differences = list(_differences(_without_address(before), _without_address(now)))
    if not differences:
        return
    more = f" (and {len(differences) - 1} more keys differ)" if len(differences) > 1 else ""
    raise ConfigError(
        f"{run.path} was started with {differences[0]}{more}: resume with the same file and overrides, "
        "or start a new run without --resume"
    )


def _without_address(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """As TOML tells it, with no more of the service than that there is one."""
    told = tomllib.loads(tomli_w.dumps(mapping))
    model = {key: value for key, value in told["model"].items() if key not in ("service", "service_key_env")}
    return {**told, "model": {**model, **({"service": "there is one"} if "service" in told["model"] else {})}}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """ "'rl.steps' = 4 and it is now 5" for every key that differs."""
    for key in (*before, *(key for key in now if key not in before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            shown = ["not set" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new)]
            yield f"'{prefix}{key}' = {shown[0]} and it is now {shown[1]}"
