"""Run the stages of a configuration in a run folder; each starts from the model that the ones before it left behind."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from headrace.config import Config, to_mapping
from headrace.errors import ConfigError, HeadraceError, Interrupted
from headrace.model.compute_thread import limit_torch_threads
from headrace.model.cuda.determinism import make_deterministic
from headrace.model.device import choose_device
from headrace.model.load import no_progress_bars
from headrace.model.tokenizer import TokenizerOnly
from headrace.observe.buffer.commits import restore_commits
from headrace.observe.report.run_report import write_report
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import check_records
from headrace.storage.folder_lock import FolderLock, hold_folder
from headrace.storage.hub import HubCommit
from headrace.train.checkpoint import LoadedCheckpoint, read_checkpoint
from headrace.watchdog import Watchdog
from headrace.wiring.build.models import load_tokens, starting_model
from headrace.wiring.build.sinks import MetricOutputs
from headrace.wiring.hub_commits import fetch_models, hub_commits, pin
from headrace.wiring.input_files import read_record, record_inputs
from headrace.wiring.preflight import check_resumed_files, preflight
from headrace.wiring.resume import ResumePlan, StageCheckpoint, check_same_run, plan_resume
from headrace.wiring.runtime.ranks import find_place, open_ranks
from headrace.wiring.runtime.service import check_service, starting_state
from headrace.wiring.signals import log_to, stop_on_signals
from headrace.wiring.stage_context import RunContext, RunState, StageContext, open_stage
from headrace.wiring.stages import run_distill, run_dpo, run_reward_model, run_rl, run_sft

logger = logging.getLogger(__name__)
LOCK_WAIT, DEFAULT_LOCK_WAIT_S = "HEADRACE_LOCK_WAIT_S", "120"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of a finished run."""

    folder: Path
    report: Path
    text: str  # for people
    figures: Mapping[str, Any]  # for programs


def train(
    config: Config, *, config_text_path: Path, resume: Path | None, accept_changed_files: bool = False
) -> RunResult:
    """Run the stages of a configuration, from the beginning or from a run folder's newest checkpoints.

    A new run that fails before its first stage leaves no run folder. A resumed one goes on with data and code that have
    changed only if `accept_changed_files` says so.
    """
    served_tokens, wait_s = None, lock_wait_s()
    if config.model.service is not None:
        with no_progress_bars():
            served_tokens = check_service(config)
    elif choose_device(config.model.device) == "cuda" and config.run.deterministic:  # refuses one that is not there
        make_deterministic()
    if config.cluster.ranks > 1:
        find_place(config)  # refuses what cannot work
    record = None if resume is None else read_record(RunFolder.open(resume))
    commits = hub_commits(config, {} if record is None else record.hub)
    config = pin(config, commits)
    fetch_models(config, commits)
    with contextlib.ExitStack() as on_failure:
        if resume is None:
            folder = RunFolder.create(Path(config.run.folder), config.run.name, datetime.now(UTC))
            on_failure.push(partial(_remove_failed_start, folder.path))
        else:
            folder = RunFolder.open(resume)
            folder.check_access()
            check_same_run(folder, config)
        start = _Start(
            resumes=resume is not None,
            accept_changed_files=accept_changed_files,
            keep_folder=on_failure.pop_all,
            hub=commits,
        )
        with hold_folder(folder.path, wait_s=wait_s) as lock, log_to(folder.log), no_progress_bars():
            if resume is None:
                folder.write_config(tomli_w.dumps(to_mapping(config)))
                folder.write_environment()
            logger.info("%s: run folder %s", config_text_path, folder.path)
            try:
                return asyncio.run(_train(config, folder, lock, served_tokens, start))
            except Interrupted as exc:
                raise Interrupted(f"{exc}; {go_on(folder)}") from exc


def _remove_failed_start(folder: Path, error: type[BaseException] | None, *details: object) -> None:
    """Remove the folder of a run that could not start; after a bug of ours it stays, with its log."""
    if error is not None and issubclass(error, HeadraceError | KeyboardInterrupt):
        shutil.rmtree(folder, ignore_errors=True)


def go_on(folder: RunFolder) -> str:
    """Return the words that say how to resume a run."""
    return f"go on with  headrace train {folder.config} {folder.path} --resume"


def lock_wait_s() -> float:
    """Return for how long a resume waits for another process in the run folder: HEADRACE_LOCK_WAIT_S, or 120 s."""
    text = os.environ.get(LOCK_WAIT, "")
    try:
        wait_s = float(text or DEFAULT_LOCK_WAIT_S)
    except ValueError:
        wait_s = math.nan
    if not (math.isfinite(wait_s) and wait_s >= 0):
        raise ConfigError(
            f"{LOCK_WAIT} = {text!r} is no time: give the seconds that a resume waits for another process"
        )
    return wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Says how a run starts."""

    resumes: bool
    accept_changed_files: bool
    keep_folder: Callable[[], object]  # called when the stages begin: from then on a failure leaves the run folder
    hub: Mapping[str, HubCommit]  # the commits of what the run reads from the Hugging Face hub, by key


async def _train(
    config: Config, folder: RunFolder, lock: FolderLock, served_tokens: TokenizerOnly | None, start: _Start
) -> RunResult:
    """Load everything, run the stages, write the report. `served_tokens`: of a model at a service."""
    if served_tokens is not None:
        model, tokens = starting_state(config.model), served_tokens
    else:
        model = starting_model(config, folder)
        tokens = load_tokens(config.model, model)
    threads = limit_torch_threads()
    stop = asyncio.Event()
    with (
        contextlib.closing(MetricOutputs(config.metrics)) as outputs,
        stop_on_signals(stop, deadline_s=config.checkpoint.deadline_s),
        Watchdog(
            tell_s=config.run.stall_warn_s,
            end_s=config.run.stall_end_s,
            go_on=f"; {go_on(folder)}",
            ends=False,  # a start may take long, and a resume would take as long again
            stacks=folder.log,
        ) as watchdog,
    ):
        plan = plan_resume(config, folder, check_owner=lock.check)
        if start.resumes:
            check_resumed_files(config, folder, plan, accept_changes=start.accept_changed_files)
        else:
            record_inputs(config, folder, start.hub)
        inputs = preflight(config, plan, tokens)
        with open_ranks(config, threads=threads) as ranks:
            run = RunContext(
                config=config,
                folder=folder,
                inputs=inputs,
                metric_outputs=outputs,
                plan=plan,
                check_owner=lock.check,
                stop=stop,
                threads=threads,
                ranks=ranks,
                hub=start.hub,
            )
            start.keep_folder()
            watchdog.begin_ending()
            figures = await _run_stages(run, plan, model)
    summary = {key: value for key, value in figures.items() if isinstance(value, int | float)}
    lock.check()
    report = write_report(folder.path, summary)
    lines = [f"{name} = {value:.4g}" for name, value in summary.items()]
    if start.resumes and plan.is_finished:
        lines.insert(0, "This run was finished already, so nothing was trained: start a new one without --resume.")
    text = "\n".join([f"Run folder: {folder.path}", f"Report: {report}", *lines])
    return RunResult(folder=folder.path, report=report, text=text, figures=figures)


async def _run_stages(run: RunContext, plan: ResumePlan, start: str) -> Mapping[str, Any]:
    """Run the stages that are not complete, each on what the ones before it left; return the figures of the run."""
    state = RunState(model_path=start, reward_model_path=None, metrics_records=0, figures={})
    for stage, body in ((plan.sft, run_sft), (plan.distill, run_distill), (plan.dpo, run_dpo)):
        if stage is not None:
            state, last = await _run_stage(run, state, stage, body)
            state = replace(state, model_path=str(last.folder), follows=True)
    if plan.policy_result is not None:
        state = replace(state, model_path=str(plan.policy_result), follows=True)
    if plan.reward_model is not None:
        state, last = await _run_stage(run, state, plan.reward_model, run_reward_model)
        state = _with_reward_model(state, last)
    elif plan.reward_model_result is not None:
        state = _with_reward_model(state, read_checkpoint(plan.reward_model_result))
    if plan.rl is not None:
        state, _ = await _run_stage(run, state, plan.rl, run_rl)
    return state.figures


def _with_reward_model(state: RunState, last: LoadedCheckpoint) -> RunState:
    accuracy = {} if last.score is None else {"accuracy_reward_model": last.score}
    return replace(state, reward_model_path=str(last.folder), figures={**state.figures, **accuracy})


async def _run_stage(
    run: RunContext, state: RunState, checkpoint: StageCheckpoint, body: Callable[[StageContext], Awaitable[None]]
) -> tuple[RunState, LoadedCheckpoint]:
    """Run one stage unless its last checkpoint is there already; return the new state and that checkpoint."""
    last = checkpoint.newest
    if last is None or not checkpoint.is_complete:
        async with open_stage(run, state, checkpoint) as context:
            context.runtime.check_memory()
            await body(context)
        last = checkpoint.store.load_latest()
    else:
        restore_commits(run.folder.commits, int(last.state["metrics_records"]))
        check_records(run.folder.metrics, int(last.state["metrics_records"]))
        logger.info("stage %s is complete", checkpoint.name)
    figures = {**state.figures, **last.state["figures"]}
    return replace(state, metrics_records=int(last.state["metrics_records"]), figures=figures), last
