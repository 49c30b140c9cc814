"""The context of a stage: its run, runtime, rewards, optimiser and sinks, opened and closed as one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cluster.connection import Places, open_places
from headrace.cluster.runtime import Cluster, open_workers
from headrace.config import Config, RlConfig
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.evaluate import EvalResult
from headrace.loops.evaluate import evaluate as evaluate_tasks
from headrace.loops.update import Updater
from headrace.metrics import metric_values
from headrace.model.device import choose_device
from headrace.observe.activity import ActivityRecorder, ActivitySink
from headrace.observe.buffer.commits import CommitLog
from headrace.observe.buffer.data_buffer import DataBuffer
from headrace.observe.report.report_sink import ReportSink
from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.run_folder import SERVER_LOGS, RunFolder
from headrace.observe.run_warnings import RunWarnings
from headrace.observe.sinks.gpu import GpuMetricsSink, gpu_values
from headrace.observe.sinks.jsonl import JsonlSink, restore_cut
from headrace.observe.sinks.progress import Progress
from headrace.observe.sinks.tee import EverySink, TeeSink
from headrace.observe.sinks.tensorboard import TensorBoardSink, tensorboard_installed
from headrace.observe.sinks.training_health import TrainingHealth
from headrace.process.watchdog import watching_thread
from headrace.protocols import MetricSink, Sampler, TrainBackend
from headrace.render import Renderer
from headrace.reward.terms import GroupTerm, Term
from headrace.storage.adapter_files import BESIDE
from headrace.storage.hub import HubCommit
from headrace.train.checkpoint import LoadedCheckpoint, read_checkpoint
from headrace.train.fsdp.ranks import Ranks
from headrace.wiring.build.agent_endpoint import AgentEndpoint
from headrace.wiring.build.cluster_roles import make_roles, places_engines, role_places
from headrace.wiring.build.episodes import eval_player
from headrace.wiring.build.loss import make_adam
from headrace.wiring.build.models import whole
from headrace.wiring.build.rewards import close_terms, has_terms, make_terms
from headrace.wiring.build.servers import mismatch_alarm
from headrace.wiring.build.sinks import MetricOutputs, stage_source
from headrace.wiring.inputs import RunInputs
from headrace.wiring.resume import ResumePlan, StageCheckpoint
from headrace.wiring.runtime.local import LocalRuntime
from headrace.wiring.runtime.protocol import Runtime
from headrace.wiring.runtime.ranks import RanksRuntime
from headrace.wiring.runtime.service import ServiceRuntime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Holds what all stages of a run share."""

    config: Config
    folder: RunFolder
    inputs: RunInputs
    metric_outputs: MetricOutputs  # besides the run folder
    plan: ResumePlan
    check_owner: Callable[[], None]  # raises if another process has taken the run folder over
    stop: asyncio.Event  # set when the run is to end after a checkpoint
    threads: int | None  # of arithmetic, for the compute thread; None: as many as torch has
    warnings: RunWarnings
    activity: ActivityRecorder
    ranks: Ranks | None = None  # that train together, if there are several
    hub: Mapping[str, HubCommit] = field(default_factory=dict)  # commits of what was read from the hub, by key
    is_changed: bool = False  # goes on with another configuration: steps that are played again are not the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Holds what the finished stages have left behind."""

    model_path: str  # the model that the next stage starts from
    reward_model_path: str | None
    follows: bool = False  # whether `model_path` is the checkpoint of an earlier stage
    metrics_records: int  # records of metrics.jsonl that belong to finished stages
    figures: Mapping[str, Any]  # the results that the run reports


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Holds the parts that a stage is built from; `open_stage` opens and closes them."""

    run: RunContext
    state: RunState
    checkpoint: StageCheckpoint
    runtime: Runtime
    terms: Sequence[Term | GroupTerm]  # judge episodes; none in a stage that plays none
    programs: AgentEndpoint
    cluster: Cluster | None  # workers of [rl]; None: this process does all
    updater: Updater
    jsonl: JsonlSink
    buffer: DataBuffer
    sink: MetricSink
    figures: dict[str, Any]  # grows with every evaluation, and is saved in checkpoints
    opened: AsyncExitStack  # closes what the stage opens

    @property
    def resumed(self) -> LoadedCheckpoint | None:
        """The checkpoint that the stage goes on from."""
        return self.checkpoint.newest

    @property
    def start(self) -> int:
        """Training steps that are done already."""
        return self.checkpoint.done

    @property
    def backend(self) -> TrainBackend:
        return self.runtime.backend

    @property
    def renderer(self) -> Renderer:
        return self.runtime.renderer

    @property
    def sampler(self) -> Sampler:
        assert self.runtime.sampler is not None, "a stage that plays no episodes has asked for a sampler"
        return self.runtime.sampler

    def checkpointer(
        self, parts: Callable[[], Mapping[str, Any]], beside: Mapping[str, TrainBackend] | None = None
    ) -> Checkpointer:
        """Build the checkpointer. `parts` is the stage's own state, `beside` names backends besides the policy's."""

        def snapshot() -> dict[str, Any]:
            return {
                "stage": self.checkpoint.name,
                "metrics_records": self.jsonl.records,
                "skips_in_a_row": self.updater.skips_in_a_row,
                "figures": dict(self.figures),
                **({"hub": {key: commit.pinned for key, commit in self.run.hub.items()}} if self.run.hub else {}),
                **parts(),
            }

        def flush() -> None:
            self.jsonl.sync()
            self.buffer.sync()

        def settle() -> None:
            """Put away what only a checkpoint older than the one just saved could need."""
            self.run.plan.retire_refused()
            self.jsonl.forget_cut()
            self.buffer.forget_cut()

        folder = self.run.folder.checkpoints / self.checkpoint.name
        checkpointer = Checkpointer(
            self.runtime.checkpoint_store(self.checkpoint.store, folder),
            self.backend,
            snapshot,
            every=self.run.config.checkpoint.every,
            total=self.checkpoint.steps,
            done=self.start,
            stop=self.run.stop,
            beside=beside or {},
            before_save=flush,
            after_save=settle,
        )
        self.opened.push_async_exit(checkpointer.close)
        return checkpointer

    def evaluator(self) -> Callable[[int], Awaitable[EvalResult]] | None:
        """Build what plays, logs and saves the held-out tasks; None when there are none, or nothing can judge them."""
        config, name = self.run.config, self.checkpoint.name
        if config.eval.source is None:
            return None
        if not self.terms:
            logger.info("stage %s is not evaluated: nothing but the reward model could judge it", name)
            return None
        tasks = self.run.inputs.held_out_tasks
        play = eval_player(config, self.sampler, self.renderer, self.terms, self.programs)

        async def run_evaluation(step: int) -> EvalResult:
            began_s = time.perf_counter()
            out = await evaluate_tasks(tasks, play)
            values = metric_values(out.metrics)
            self.sink.log(step, values | {"time/eval_s": time.perf_counter() - began_s})
            label = "base" if step == 0 else name
            episodes = [scored for group in out.groups for scored in group.episodes]
            self.run.check_owner()
            save_trajectories(self.run.folder.eval_rollouts(label), episodes, lean=True)
            judged = "success" if "eval/pass@1" in out.metrics else "reward"  # not every reward says what success is
            self.figures[f"{judged}_{label}"] = out.score
            self.figures[f"malformed_{label}"] = values["eval/invalid_actions"]
            return out

        return run_evaluation


@asynccontextmanager
async def open_stage(run: RunContext, state: RunState, checkpoint: StageCheckpoint) -> AsyncIterator[StageContext]:
    """Build the context of a stage that starts, or goes on from `checkpoint`, and close what was opened for it."""
    config, name, resumed = run.config, checkpoint.name, checkpoint.newest
    stage = getattr(config, name)
    assert stage is not None
    async with AsyncExitStack() as opened:
        plays = name == "rl" or (name in ("sft", "distill", "dpo") and config.eval.source is not None)
        judged = plays and has_terms(config, state.reward_model_path)
        samples = name in ("rl", "distill") or judged
        places = await opened.enter_async_context(_open_places(config, stage=name, samples=samples))
        with watching_thread(f"loading the models of stage {name}", loads=True):
            runtime = _open_runtime(run, state, checkpoint, samples=samples, places=places)
        opened.callback(runtime.close)
        if isinstance(runtime, LocalRuntime):
            opened.push_async_callback(runtime.turns.finish)
            await runtime.start()
        with watching_thread(f"loading the rewards of stage {name}", loads=True):
            terms = make_terms(config, state.reward_model_path) if judged else []
        opened.push_async_callback(close_terms, terms)
        programs = AgentEndpoint(runtime.renderer)
        opened.push_async_callback(programs.close)
        cluster = None
        if places is not None and name == "rl":
            vocabulary = runtime.lm.vocabulary if isinstance(runtime, LocalRuntime) else None
            roles = make_roles(config, runtime.renderer, state.reward_model_path, vocabulary)
            cluster = await opened.enter_async_context(open_workers(places, roles))
        reversible = isinstance(stage, RlConfig) and stage.kl_action == "scale_back"
        updater = Updater(
            backend=runtime.backend,
            adam=make_adam(stage.optimizer, checkpoint.steps, reversible=reversible),
            max_skips=stage.optimizer.max_skips,
            skips_in_a_row=0 if resumed is None else int(resumed.state["skips_in_a_row"]),
        )
        records = state.metrics_records if resumed is None else int(resumed.state["metrics_records"])
        restore_cut(run.folder.metrics, records)
        jsonl = JsonlSink(run.folder.metrics, stage=name, check_owner=run.check_owner)
        jsonl.truncate_after(records)
        buffer = _open_buffer(run, checkpoint, jsonl)
        sink = _open_sink(run, checkpoint, jsonl, buffer)
        opened.callback(sink.close)
        yield StageContext(
            run=run,
            state=state,
            checkpoint=checkpoint,
            runtime=runtime,
            terms=terms,
            programs=programs,
            cluster=cluster,
            updater=updater,
            jsonl=jsonl,
            buffer=buffer,
            sink=sink,
            figures=dict(state.figures if resumed is None else resumed.state["figures"]),
            opened=opened,
        )


def stage_start(state: RunState) -> str:
    """Verify and return the folder that a stage starts from: a resume may come long after it was written."""
    return str(read_checkpoint(Path(state.model_path)).folder) if state.follows else whole(state.model_path)


def _open_places(config: Config, *, stage: str, samples: bool) -> AbstractAsyncContextManager[Places | None]:
    """Reserve the places of the processes besides this one, for as long as the stage lasts."""
    c = config.cluster
    on_gpu = bool(c.address) and config.model.service is None and choose_device(config.model.device) == "cuda"
    wanted = role_places(config, stage=stage, samples=samples, on_gpu=on_gpu)
    return open_places(c.address, wanted, deadline_s=c.deadline_s)


def _open_runtime(
    run: RunContext, state: RunState, checkpoint: StageCheckpoint, *, samples: bool, places: Places | None
) -> Runtime:
    config, resumed = run.config, checkpoint.newest
    folder = None if resumed is None else resumed.folder
    if config.model.service is not None:
        return ServiceRuntime(config, start=state.model_path, state=folder, samples=samples)
    if folder is not None and config.model.lora is None:
        base = str(folder)
    elif folder is None:
        base = whole(state.model_path)
    else:  # adapters need the weights that the stage started from
        base = stage_start(state)
    if state.follows and resumed is None and config.model.lora is not None and (Path(base) / BESIDE).is_dir():
        logger.info("stage %s trains a new adapter on the merged weights of %s", checkpoint.name, base)
    make = LocalRuntime if run.ranks is None else partial(RanksRuntime, run.ranks)
    return make(
        config,
        checkpoint.name,
        base=base,
        start=lambda: stage_start(state),
        state=folder,
        threads=run.threads,
        samples=samples,
        logs=run.folder.path / SERVER_LOGS,
        places=places if places_engines(config) else None,
        continues_adapter=not state.follows,
    )


def _open_buffer(run: RunContext, checkpoint: StageCheckpoint, jsonl: JsonlSink) -> DataBuffer:
    """Open the store of the stage's steps, without the commits that are newer than its checkpoint."""
    return DataBuffer(
        CommitLog(run.folder.commits, records=jsonl.records, check_owner=run.check_owner),
        stage=checkpoint.name,
        records=lambda: jsonl.records,
        spill_to=run.folder.buffer,
        repeatable=not run.is_changed and is_repeatable(run.config, checkpoint.name),
    )


def is_repeatable(config: Config, stage: str) -> bool:
    """Tell whether a stage that is played again must give the same bits: on a CPU, and if it plays, in an order that
    does not depend on the clock."""
    if config.model.service is not None or choose_device(config.model.device) != "cpu":
        return False
    plays = stage in ("rl", "distill") or config.eval.source is not None
    if plays and config.engine.is_served:  # an inference server does not promise the same bits twice
        return False
    if stage != "rl" or config.rl is None:
        return True
    c = config.rl.asynchronous
    return c.oversampling == 1.0 and (c.max_staleness == 0 or c.lockstep_tokens > 0)


def _open_sink(run: RunContext, checkpoint: StageCheckpoint, jsonl: JsonlSink, buffer: DataBuffer) -> MetricSink:
    """Open what a stage logs to: metrics.jsonl and the buffer, which commits what is in it, TensorBoard, the sinks of
    [metrics], the report, and the line of progress."""
    config, name, start = run.config, checkpoint.name, checkpoint.done
    every = config.run.log_every

    def thin_out(sink: MetricSink) -> MetricSink:
        return sink if every == 1 else EverySink(sink, every=every, last=checkpoint.steps)

    sinks: list[MetricSink] = [jsonl, buffer]  # every step, whatever is shown: a resume goes by them
    if config.run.tensorboard and tensorboard_installed() and "tensorboard" not in config.metrics.sinks:
        sinks.append(thin_out(TensorBoardSink(run.folder.tensorboard, stage=name, purge_step=start + 1)))
    source = stage_source(config, run.folder.path, stage=name, start=start)
    sinks += run.metric_outputs.sinks(replace(source, thin_out=thin_out))
    if (alarm := mismatch_alarm(config, stage=name, run=run.folder.path.name)) is not None:
        sinks.append(alarm)
    sinks.append(TrainingHealth(name))
    sinks.append(ReportSink(run.folder.path, check_owner=run.check_owner))
    progress = Progress(name, checkpoint.steps, start=start, warnings=lambda: run.warnings.count, every=every)
    sinks.append(progress)  # last: a failure above must not leave a bar behind
    measured = GpuMetricsSink(TeeSink(*sinks), gpu_values)
    return ActivitySink(measured, run.activity, stage=name, step=start)
