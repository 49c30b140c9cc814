"""A run on its way through its stages, and the desk: what every stage works with."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.config import Config, Rl
from headrace.config.tree import Metrics
from headrace.loops.evaluate import Evaluation
from headrace.loops.evaluate import evaluate as evaluate_tasks
from headrace.loops.keeper import Keeper
from headrace.loops.update import Updater
from headrace.observe.gpu import MeasuredSink, gpu_values
from headrace.observe.progress import Progress
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks import JsonlSink, TeeSink, TensorBoardSink, tensorboard_installed
from headrace.observe.trajectories import save_trajectories
from headrace.protocols import MetricSink, Sampler, TrainBackend
from headrace.reward.terms import GroupTerm, Term
from headrace.rollout.publisher import Publisher
from headrace.train.checkpoint import CheckpointStore, Loaded, read_checkpoint
from headrace.types import Task, metric_values
from headrace.wiring.here import Here
from headrace.wiring.metrics import Outlets, told_by
from headrace.wiring.models import whole
from headrace.wiring.objective import make_adam
from headrace.wiring.play import play_held_out
from headrace.wiring.programs import Programs
from headrace.wiring.remote import AtService
from headrace.wiring.rewards import make_terms
from headrace.wiring.sources import tasks_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """A run on its way through its stages."""

    config: Config
    folder: RunFolder
    stop: asyncio.Event
    model_path: str
    reward_model_path: str | None = None
    metrics_records: int = 0  # records of metrics.jsonl that belong to finished stages
    figures: dict[str, Any] = field(default_factory=dict)
    tasks: tuple[Task, ...] | None = None  # of [rl], made by the first stage that runs
    threads: int | None = None  # of arithmetic, for the workers; None: as many as torch has
    outlets: Outlets = field(default_factory=lambda: Outlets(Metrics()))  # of metrics, besides the run folder

    def after_sft(self) -> str:
        """What the stages after [sft] start from, checked: a resume may come long after it was written."""
        if self.config.sft is None:
            return whole(self.model_path)
        return str(read_checkpoint(Path(self.model_path)).folder)


class Desk:
    """What every stage works with: the model, here or at a service, the sinks, and where it left off."""

    def __init__(self, run: Run, name: str, steps: int, store: CheckpointStore, found: Loaded | None) -> None:
        config = run.config
        self.run, self.name, self.steps, self.store, self.found = run, name, steps, store, found
        self.start = 0 if found is None else found.step
        self.place = self._place()
        stage = {"sft": config.sft, "reward_model": config.reward_model, "rl": config.rl}[name]
        assert stage is not None
        self.backend: TrainBackend = self.place.backend
        self.renderer = self.place.renderer
        self.programs = Programs(self.renderer)
        self.updater = Updater(
            backend=self.backend,
            adam=make_adam(
                stage.optimizer, steps, reversible=isinstance(stage, Rl) and stage.kl_action == "scale_back"
            ),
            max_skips=stage.optimizer.max_skips,
            skips_in_a_row=0 if found is None else int(found.state["skips_in_a_row"]),
        )
        self.figures: dict[str, Any] = dict(run.figures if found is None else found.state["figures"])
        self.jsonl = JsonlSink(run.folder.metrics, stage=name)
        self.jsonl.truncate_after(run.metrics_records if found is None else int(found.state["metrics_records"]))
        sinks: list[MetricSink] = [self.jsonl]
        if config.run.tensorboard and tensorboard_installed() and "tensorboard" not in config.metrics.sinks:
            sinks.append(TensorBoardSink(run.folder.tensorboard, stage=name, purge_step=self.start + 1))
        sinks += run.outlets.sinks(told_by(config, run.folder.path, stage=name, start=self.start))
        sinks.append(Progress(name, steps, start=self.start))  # last: a failure above must not leave a bar behind
        self.sink = MeasuredSink(TeeSink(*sinks), gpu_values)

    @property
    def sampler(self) -> Sampler:
        return self.place.sampler

    @property
    def here(self) -> Here:
        assert isinstance(self.place, Here), "a run at a service has asked for a model of its own"
        return self.place

    @cached_property
    def terms(self) -> list[Term | GroupTerm]:
        """What judges episodes, in training and evaluation."""
        return make_terms(self.run.config, self.run.reward_model_path)

    @cached_property
    def publisher(self) -> Publisher:
        return Publisher([self.sampler])

    def _place(self) -> Here | AtService:
        state = None if self.found is None else self.found.folder
        if self.run.config.model.service is not None:
            return AtService(self.run.config, start=self.run.model_path, state=state)
        return Here(self.run.config, self.name, base=self._base(), state=state, threads=self.run.threads)

    def _base(self) -> str:
        """The folder whose weights are loaded first. Only adapters need those that the stage started from."""
        if self.found is None:
            return whole(self.run.model_path)
        if self.run.config.model.lora is None:
            return str(self.found.folder)
        return whole(self.run.model_path) if self.name == "sft" else self.run.after_sft()

    def keeper(
        self, parts: Callable[[], Mapping[str, Any]], beside: Mapping[str, TrainBackend] | None = None
    ) -> Keeper:
        """`parts` is the stage's own state: data cursor, executor. `beside`: backends besides the policy's."""

        def snapshot() -> dict[str, Any]:
            self.jsonl.sync()
            return {
                "stage": self.name,
                "metrics_records": self.jsonl.records,
                "skips_in_a_row": self.updater.skips_in_a_row,
                "figures": dict(self.figures),
                **parts(),
            }

        every = self.run.config.checkpoint.every
        return Keeper(
            self.place.kept_in(self.store, self.run.folder.checkpoints / self.name),
            self.backend,
            snapshot,
            every=every,
            total=self.steps,
            done=self.start,
            stop=self.run.stop,
            beside=beside or {},
        )

    def evaluator(self) -> Callable[[int], Awaitable[Evaluation]] | None:
        """Plays the held-out tasks, logs and saves them; None when the file names none."""
        config = self.run.config
        if config.eval.source is None:
            return None
        if not self.terms:
            logger.info("stage %s is not evaluated: nothing but the reward model could judge it", self.name)
            return None
        tasks = tasks_of(config.eval.source)[: config.eval.tasks]
        play = play_held_out(config, self.sampler, self.renderer, self.terms, self.programs)

        async def run_evaluation(step: int) -> Evaluation:
            began_s = time.perf_counter()
            out = await evaluate_tasks(tasks, play)
            values = metric_values(out.metrics)
            self.sink.log(step, values | {"time/eval_s": time.perf_counter() - began_s})
            label = "base" if step == 0 else self.name
            episodes = [scored for group in out.groups for scored in group.episodes]
            save_trajectories(self.run.folder.eval_rollouts(label), episodes, lean=True)
            judged = "success" if "eval/pass@1" in out.metrics else "reward"  # not every reward says what success is
            self.figures[f"{judged}_{label}"] = out.score
            self.figures[f"malformed_{label}"] = values["eval/invalid_actions"]
            return out

        return run_evaluation

    def close(self) -> None:
        self.sink.close()
        self.place.close()
