"""Run the stages of a configuration in a run folder; each starts from the model that the ones before it left behind."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tomli_w

from headrace.config import Config, num_steps, stages_of, to_mapping
from headrace.errors import (
    ConfigError,
    FolderLockedError,
    Interrupted,
    NoSignalError,
    RunFolderError,
    boundary,
)
from headrace.model.compute_thread import limit_torch_threads
from headrace.model.cuda.determinism import make_deterministic
from headrace.model.device import choose_device
from headrace.model.load import no_progress_bars
from headrace.model.tokenizer import TokenizerOnly
from headrace.observe.activity import ActivityRecorder
from headrace.observe.buffer.commits import CommitLog, restore_commits
from headrace.observe.config_changes import ConfigChange, add_changes
from headrace.observe.outcome import seconds_before, write_outcome
from headrace.observe.report.run_report import write_report
from headrace.observe.run_folder import RunFolder, is_bare
from headrace.observe.run_warnings import RunWarnings, keeping_warnings
from headrace.observe.sinks.jsonl import JsonlSink, check_records
from headrace.process.thread_pool import start_pool
from headrace.process.watchdog import Watchdog, watching_start, watching_thread
from headrace.storage.folder_lock import FolderLock, hold_folder
from headrace.storage.hub import HubCommit
from headrace.train.checkpoint import LoadedCheckpoint, checkpoint_name, read_checkpoint
from headrace.wiring.build.models import load_tokens, starting_model
from headrace.wiring.build.sinks import MetricOutputs
from headrace.wiring.epochs import describe_epochs, has_epochs, loaded_rows, with_any_steps, with_steps
from headrace.wiring.hub_commits import fetch_models, hub_commits, pin
from headrace.wiring.input_files import read_record, record_inputs, record_rows
from headrace.wiring.inputs import RunInputs
from headrace.wiring.picture_reader import picture_conversation, reader_of, with_vision
from headrace.wiring.preflight import check_resumed_files, preflight
from headrace.wiring.resume import ResumePlan, StageCheckpoint, check_same_run, plan_resume
from headrace.wiring.runtime.ranks import find_place, open_ranks
from headrace.wiring.runtime.service import check_service, starting_state
from headrace.wiring.signals import StopRequest, log_to, stop_on_signals
from headrace.wiring.stage_context import RunContext, RunState, StageContext, open_stage
from headrace.wiring.stages import REFERENCE_SCORES, run_distill, run_dpo, run_reward_model, run_rl, run_sft

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

    A new run that fails before anything was trained or measured leaves no run folder, and neither does one that Ctrl-C
    ends there (KeyboardInterrupt). A resumed one goes on with data and code that have changed only if
    `accept_changed_files` says so.
    """
    served_tokens, wait_s = None, lock_wait_s()
    if config.model.service is not None:
        run = config.run
        starting = watching_start("checking the service", tell_s=run.stall_warn_s, load_end_s=run.load_end_s)
        with no_progress_bars(), starting:
            served_tokens = check_service(config)
    elif choose_device(config.model.device) == "cuda" and config.run.deterministic:  # refuses one that is not there
        make_deterministic()
    if config.cluster.ranks > 1:
        find_place(config)  # refuses what cannot work
    record = None if resume is None else read_record(RunFolder.open(resume))
    commits = hub_commits(config, {} if record is None else record.hub)
    config = pin(config, commits)
    if resume is not None:  # an answer at once, before models are fetched
        if has_epochs(config):
            config = with_steps(config, {} if record is None else record.rows)
        RunFolder.open(resume).check_access()
        check_same_run(RunFolder.open(resume), config)
    fetch_models(config, commits)
    with contextlib.ExitStack() as on_failure:
        if resume is None:
            root = Path(config.run.folder)
            on_failure.push(partial(_remove_empty, root, existed=root.exists()))
            folder = RunFolder.create(root, config.run.name, datetime.now(UTC))
            on_failure.push(partial(_remove_failed_start, folder))
        else:
            folder = RunFolder.open(resume)
        asked = StopRequest()
        start = _Start(
            resumes=resume is not None,
            accept_changed_files=accept_changed_files,
            hub=commits,
        )
        with (
            hold_folder(folder.path, wait_s=wait_s) as lock,
            log_to(folder.log),
            keeping_warnings(folder.warnings) as warnings,
            no_progress_bars(),
        ):
            if resume is None:
                folder.write_config(tomli_w.dumps(to_mapping(config)))
                folder.write_environment()
            logger.info("%s: run folder %s", config_text_path, folder.path)
            if resume is not None:  # again: another process may have worked in the folder until now
                start = replace(start, changes=tuple(check_same_run(folder, config, tell_moves=True)))
            try:
                return asyncio.run(_train(config, folder, lock, served_tokens, start, warnings, asked))
            except Interrupted as exc:
                if resume is None and asked.by_ctrl_c and is_bare(folder):
                    raise KeyboardInterrupt from exc
                raise Interrupted(f"{exc}; {go_on(folder)}") from exc
            except NoSignalError as exc:
                assert config.rl is not None
                ended = (folder.checkpoints / "rl" / checkpoint_name(num_steps(config.rl))).exists()
                hint = "" if ended else f"; when it is mended, {go_on(folder)}"
                raise NoSignalError(f"{exc}; the report is {folder.report}{hint}") from exc


def _remove_failed_start(folder: RunFolder, error: type[BaseException] | None, *details: object) -> None:
    """Remove the folder of a new run that failed, or was ended by Ctrl-C, before its first step.

    It stays if there is something to look at (`is_bare`), and after exit code 75, which says that a resume goes on.
    """
    if error is None or issubclass(error, Interrupted | FolderLockedError):
        return
    with contextlib.suppress(OSError):
        if is_bare(folder):
            shutil.rmtree(folder.path, ignore_errors=True)
            logger.info("%s is removed: nothing was trained", folder.path)


def _remove_empty(root: Path, error: type[BaseException] | None, *details: object, existed: bool) -> None:
    """Remove the folder of runs after a failure, if it was made for the run that failed."""
    if error is not None and not existed:
        with contextlib.suppress(OSError):  # another run is in it
            root.rmdir()


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
    hub: Mapping[str, HubCommit]  # the commits of what the run reads from the Hugging Face hub, by key
    changes: tuple[ConfigChange, ...] = ()  # of the configuration, since the run was started or resumed last


async def _train(
    config: Config,
    folder: RunFolder,
    lock: FolderLock,
    served_tokens: TokenizerOnly | None,
    start: _Start,
    warnings: RunWarnings,
    asked: StopRequest,
) -> RunResult:
    """Start the run and run its stages, watched for stalls."""
    run = config.run
    with (
        Watchdog(
            tell_s=run.stall_warn_s,
            end_s=run.stall_end_s,
            load_end_s=run.load_end_s,
            go_on=f"; {go_on(folder)}",
            stacks=folder.log,
        ),
        contextlib.ExitStack() as starting,
    ):
        starting.enter_context(watching_thread("the start of the run", loads=True))
        return await _start_and_run(config, folder, lock, served_tokens, start, warnings, asked, starting)


async def _start_and_run(
    config: Config,
    folder: RunFolder,
    lock: FolderLock,
    served_tokens: TokenizerOnly | None,
    start: _Start,
    warnings: RunWarnings,
    asked: StopRequest,
    starting: contextlib.ExitStack,
) -> RunResult:
    """Load everything, close `starting`, run the stages, write the report. `served_tokens`: of a model at a service."""
    await start_pool()
    if served_tokens is not None:
        model, tokens = starting_state(config.model), served_tokens
    else:
        model = starting_model(config, folder)
        tokens = load_tokens(config.model, model)
    threads = limit_torch_threads()
    with (
        contextlib.closing(MetricOutputs(config.metrics)) as outputs,
        stop_on_signals(asked, deadline_s=config.checkpoint.deadline_s),
        ActivityRecorder(folder.activity, check_owner=lock.check) as activity,
    ):
        plan = plan_resume(with_any_steps(config), folder, check_owner=lock.check)
        if start.resumes:
            check_resumed_files(
                config,
                folder,
                plan,
                accept_changes=start.accept_changed_files,
                changes=start.changes,
                hub=start.hub,
            )
        else:
            record_inputs(config, folder, start.hub)
        pictures = None if served_tokens is not None else reader_of(config.model, model)
        inputs = preflight(config, plan, tokens, pictures)
        if has_epochs(config):  # of a new run: a resumed one has recorded its rows
            config = _with_loaded_rows(config, inputs, folder)
            plan = plan_resume(config, folder, check_owner=lock.check)
        config = with_vision(config, has_pictures=picture_conversation(inputs) is not None)
        async with open_ranks(config, threads=threads) as ranks:
            run = RunContext(
                config=config,
                folder=folder,
                inputs=inputs,
                metric_outputs=outputs,
                plan=plan,
                check_owner=lock.check,
                stop=asked.event,
                threads=threads,
                warnings=warnings,
                activity=activity,
                ranks=ranks,
                hub=start.hub,
                is_changed=bool(start.changes),
            )
            if start.changes:
                _go_on_changed(config, folder, plan, start.changes)
            starting.close()
            with contextlib.nullcontext() if plan.is_finished else _recorded_outcome(folder):
                figures = await _run_stages(run, plan, model)
    summary = {key: value for key, value in figures.items() if isinstance(value, int | float)}
    lock.check()
    report = write_report(folder.path, summary)
    lines = [f"{name} = {value:.4g}" for name, value in summary.items()]
    if start.resumes and plan.is_finished:
        more = "give a stage more steps, or start a new run without --resume"
        lines.insert(0, f"This run was finished already, so nothing was trained: {more}.")
    text = "\n".join([f"Run folder: {folder.path}", f"Report: {report}", *lines])
    return RunResult(folder=folder.path, report=report, text=text, figures=figures)


def _with_loaded_rows(config: Config, inputs: RunInputs, folder: RunFolder) -> Config:
    """Turn epochs into steps by what was loaded; log that, and record both in the run folder."""
    rows = loaded_rows(inputs)
    resolved = with_steps(config, rows)
    for line in describe_epochs(config, resolved, rows):
        logger.info("%s", line)
    folder.write_config(tomli_w.dumps(to_mapping(resolved)))
    record_rows(folder, {name: rows[name] for name, stage in stages_of(config).items() if stage.steps is None})
    return resolved


@contextlib.contextmanager
def _recorded_outcome(folder: RunFolder) -> Iterator[None]:
    """Write into the run folder that training has begun, and how it ends."""
    began_s, before_s = time.monotonic(), seconds_before(folder.outcome)
    write_outcome(folder.outcome, "started", seconds=before_s)

    def ended(state: Literal["finished", "stopped", "failed"], reason: str = "") -> None:
        write_outcome(folder.outcome, state, seconds=before_s + time.monotonic() - began_s, reason=reason)

    try:
        yield
    except FolderLockedError:
        raise  # the folder is another's now
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError) as exc:
        ended("stopped", str(exc))
        _report_so_far(folder)
        raise
    except BaseException as exc:
        ended("failed", str(exc) or type(exc).__name__)
        _report_so_far(folder)
        raise
    ended("finished")


def _report_so_far(folder: RunFolder) -> None:
    """Write the report of a run that did not finish, if it has measured anything."""
    if not folder.metrics.exists() or not folder.metrics.stat().st_size:
        return
    try:
        with boundary(RunFolderError, f"the report of {folder.path} cannot be written"):
            logger.info("the report so far is %s", write_report(folder.path))
    except RunFolderError as exc:  # what ended the run is what its user must hear
        logger.warning("%s", exc)


def _go_on_changed(config: Config, folder: RunFolder, plan: ResumePlan, changes: Sequence[ConfigChange]) -> None:
    """Say and record the keys with which the run goes on, and make them its configuration."""
    stage, step = plan.place
    for change in changes:
        logger.warning("changed from step %d of stage %s on: %s", step, stage, change)
    add_changes(folder.config_changes, changes, stage=stage, step=step, now=datetime.now(UTC))
    if plan.dpo is not None and plan.dpo.newest is None:  # it may start from another model now
        with boundary(RunFolderError, f"{folder.path / REFERENCE_SCORES} cannot be removed"):
            (folder.path / REFERENCE_SCORES).unlink(missing_ok=True)
    folder.write_config(tomli_w.dumps(to_mapping(config)))


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
    if run.is_changed and plan.is_finished:
        _end_here(run, state.metrics_records)
    return state.figures


def _end_here(run: RunContext, records: int) -> None:
    """Cut what was logged behind the last checkpoint off a run that was planned to be longer."""
    with contextlib.closing(JsonlSink(run.folder.metrics, stage="", check_owner=run.check_owner)) as jsonl:
        jsonl.truncate_after(records)
        jsonl.forget_cut()
    with contextlib.closing(CommitLog(run.folder.commits, records=records, check_owner=run.check_owner)) as commits:
        commits.forget_cut()


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
