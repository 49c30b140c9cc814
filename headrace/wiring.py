"""Configuration to objects: the only module that names implementations. Tier 2 of the package, so copy what you need.

A run is a folder and a list of stages; each stage starts from the model folder that the one before it left behind.
"""

import asyncio
import contextlib
import copy
import json
import logging
import os
import signal
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from headrace.algo.advantages.credit import credit
from headrace.algo.correction import Behaviour, Bound, Level
from headrace.algo.datum import to_data
from headrace.algo.loss import loss_inputs
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.losses.compose import added
from headrace.algo.scalar_data import scored_datum
from headrace.config import Config, Model, Optimizer, RewardTerm, Rl, Sampling, Source, Tiny, load_config, to_mapping
from headrace.config import Critic as CriticConfig
from headrace.config.paths import split_sum
from headrace.errors import CheckpointError, ConfigError, DataError, Interrupted, ModelError, RunFolderError, boundary
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.generate import GenerateSampler
from headrace.loops.arrays import (
    Correction,
    Score,
    available_arrays,
    check_objective,
    scored_by_backend,
    scored_on_thread,
    wanted_arrays,
)
from headrace.loops.critic import Critic, CriticSettings
from headrace.loops.evaluate import Evaluation
from headrace.loops.evaluate import evaluate as evaluate_tasks
from headrace.loops.keeper import Keeper
from headrace.loops.reward_model import RewardModelSettings, train_reward_model
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.loops.trust import COEF, TrustRegion
from headrace.loops.update import Updater
from headrace.loops.verify import verify as prove
from headrace.loops.verify.parts import WORLD as VERIFY_WORLD
from headrace.loops.verify.parts import Parts
from headrace.loops.verify.proof import Proof
from headrace.model.load import (
    LanguageModel,
    choose_device,
    choose_dtype,
    load_model,
    prepare,
    recompute_layers,
)
from headrace.model.lora import add_lora
from headrace.model.quiet import no_progress_bars
from headrace.model.scalar import is_scalar_folder, load_scalar_model
from headrace.model.tiny import make_model, make_tokenizer, save_tiny
from headrace.observe.progress import Progress
from headrace.observe.report import write_report
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks import JsonlSink, TeeSink, TensorBoardSink, tensorboard_installed
from headrace.observe.toml import to_toml
from headrace.observe.trajectories import save_trajectories
from headrace.protocols import Env, MetricSink, TrainBackend
from headrace.render import Renderer
from headrace.reward.by_model import NAME as REWARD_MODEL
from headrace.reward.by_model import reward_by_model
from headrace.reward.runner import InProcessRewardRunner
from headrace.reward.terms import BUILTIN, RewardFn, Term
from headrace.rollout.conversations import Mixture, load_conversations
from headrace.rollout.executor import AsyncSettings, RolloutExecutor
from headrace.rollout.filters import FILTERS, Filter, named_filter
from headrace.rollout.group import play_group
from headrace.rollout.load_function import load_function
from headrace.rollout.preferences import Pair, load_pairs
from headrace.rollout.publish import Publisher
from headrace.rollout.sources import load_tasks
from headrace.rollout.tasks import TaskSource, filter_prompts, overlap
from headrace.rollout.worlds import WORLDS, world_demonstrations, world_pairs, world_tasks
from headrace.rollout.worlds.single_turn import SingleTurnEnv
from headrace.train.checkpoint import CheckpointStore, Loaded, checkpoint_name, read_checkpoint
from headrace.train.schedule import make_schedule
from headrace.train.scorer import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    CreditedEpisode,
    Group,
    IntArray,
    LossSpec,
    Message,
    SamplingParams,
    Task,
    metric_values,
)

logger = logging.getLogger(__name__)

Play = Callable[[Task, int], Awaitable[Group]]
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the run again


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run says: `text` for people, `figures` for programs."""

    folder: Path
    report: Path
    text: str
    figures: Mapping[str, Any]


# --- commands --------------------------------------------------------------------------------------------------------


def train(config: Config, *, config_text_path: Path, resume: Path | None) -> RunResult:
    """Run the stages of a configuration, from the beginning or from a run folder's newest checkpoints."""
    if resume is None:
        run = RunFolder.create(Path(config.run.folder), config.run.name, datetime.now(UTC))
        run.write_config(to_toml(to_mapping(config)))
        run.write_environment()
    else:
        run = RunFolder.open(resume)
        _check_same_run(run, config)
    with _log_to(run.log), no_progress_bars():
        logger.info("%s: run folder %s", config_text_path, run.path)
        try:
            return asyncio.run(_train(config, run))
        except Interrupted as exc:
            raise Interrupted(f"{exc}; go on with  headrace train {run.config} {run.path} --resume") from exc


def evaluate(config: Config) -> dict[str, float]:
    """Held-out metrics of the configured model."""
    with no_progress_bars():
        return asyncio.run(_evaluate(config))


def demo(*, seed: int, folder: Path) -> RunResult:
    """SFT on imperfect demonstrations of a text world, then RL; no download. `figures` is the line for programs."""
    began_s = time.monotonic()
    config = demo_config(seed=seed, folder=folder)
    result = train(config, config_text_path=Path("demo.toml"), resume=None)
    seconds = time.monotonic() - began_s
    before, after = result.figures["success_sft"], result.figures["success_rl"]
    assert config.rl is not None
    figures = {
        "success_sft": before,
        "success_rl": after,
        "malformed_sft": result.figures["malformed_sft"],
        "seconds": round(seconds, 1),
        "report": str(result.report),
    }
    write_report(result.folder, {"success_sft": before, "success_rl": after, "seconds": seconds})
    text = f"""
A small model learned to find a key, unlock a door and reach a goal, in a text world made on the spot.
Held-out rooms it has never seen, {config.eval.tasks} of them:

    after SFT on imperfect demonstrations   {before:6.1%} solved
    after RL on success alone               {after:6.1%} solved      ({seconds:.0f} s in all)

Look at it:      {result.report}
Every episode:   {result.folder / "rollouts"}
The checkpoint:  {result.folder / "checkpoints" / "rl"} (load it with transformers' from_pretrained)
Try next:        headrace explain {result.folder / "config.toml"}
                 headrace train {result.folder / "config.toml"} --set rl.credit=dr_grpo --set run.name=dr_grpo
                 docs/tour.md follows one prompt through the whole code
"""
    return replace(result, text=text, figures=figures)


def demo_config(*, seed: int, folder: Path) -> Config:
    text = resources.files("headrace").joinpath("demo.toml").read_text(encoding="utf-8")
    overrides = [f"run.seed={seed}", f"run.folder={json.dumps(str(folder))}"]
    return load_config(text, file="demo.toml", overrides=overrides)


def verify(*, model: str | None, device: str) -> Iterator[Proof]:
    """The proofs of `loops.verify`, one by one, on a model folder; None: a small model made on the spot."""
    with no_progress_bars():
        place = choose_device(device)
        dtype = choose_dtype("auto", place)
        lm = _small_model(place, dtype) if model is None else load_model(model, device=place, dtype=dtype)
        yield from prove(verify_parts(lm))


def verify_parts(lm: LanguageModel) -> Parts:
    """What runs are made of, for `loops.verify` to look at."""
    return Parts(
        lm=lm,
        renderer=Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens),
        make_trainer=TorchBackend,
        make_engine=partial(EmbeddedEngine, max_rows=16),
        cross_entropy=CROSS_ENTROPY,
        ppo=LossSpec(fn="ppo"),
        credit=partial(credit, method="dr_grpo"),
        to_data=to_data,
    )


def _small_model(device: str, dtype: torch.dtype) -> LanguageModel:
    """The demo's, untrained."""
    tiny = Tiny()
    tokenizer = make_tokenizer(WORLDS[VERIFY_WORLD].vocabulary())
    made = make_model(
        vocab_size=len(tokenizer),
        width=tiny.width,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        context=tiny.context,
        seed=0,
    )
    return prepare(made.to(device, dtype), tokenizer, source="made on the spot")


# --- a run -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """A run on its way through its stages."""

    config: Config
    folder: RunFolder
    stop: asyncio.Event
    model_path: str
    reward_model_path: str | None = None
    metrics_records: int = 0  # records of metrics.jsonl that belong to finished stages
    figures: dict[str, Any] = field(default_factory=dict)

    def after_sft(self) -> str:
        """What the stages after [sft] start from, checked: a resume may come long after it was written."""
        if self.config.sft is not None:
            read_checkpoint(Path(self.model_path))
        return self.model_path


async def _train(config: Config, folder: RunFolder) -> RunResult:
    if config.rl is not None:
        make_loss(config.rl)  # a loss that cannot be computed is found before anything is trained
    run = _Run(config, folder, asyncio.Event(), _starting_model(config, folder))
    with _stop_on_signals(run.stop, deadline_s=config.checkpoint.deadline_s):
        rl_found = _Found.of(run, "rl", may_start_again=config.sft is not None) if config.rl is not None else None
        if config.sft is not None:
            if rl_found is not None and rl_found.newest is not None:  # what [sft] left behind has been used already
                run.model_path = str(run.folder.checkpoints / "sft" / checkpoint_name(config.sft.steps))
            else:
                left = await _stage(run, _Found.of(run, "sft"), config.sft.steps, _run_sft)
                run.model_path = str(left.folder)
        if config.reward_model is not None:
            if rl_found is not None and rl_found.newest is not None:  # [rl] goes on with the very one it began with
                left = read_checkpoint(
                    run.folder.checkpoints / "reward_model" / checkpoint_name(config.reward_model.steps)
                )
            else:
                found = _Found.of(run, "reward_model", may_start_again=config.sft is not None)
                left = await _stage(run, found, config.reward_model.steps, _run_reward_model)
            run.reward_model_path = str(left.folder)
            if left.score is not None:
                run.figures["accuracy_reward_model"] = left.score
        if config.rl is not None:
            assert rl_found is not None
            await _stage(run, rl_found, config.rl.steps, _run_rl)
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
    def of(cls, run: _Run, name: str, *, may_start_again: bool = False) -> "_Found":
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


async def _stage(run: _Run, at: _Found, steps: int, body: "Callable[[_Run, _Desk], Awaitable[None]]") -> Loaded:
    """Run one stage unless its last checkpoint is there already; returns that checkpoint."""
    found = at.newest
    if found is None or found.step < steps:
        desk = _Desk(run, at.name, steps, at.store, found)
        try:
            await body(run, desk)
        finally:
            desk.close()
        found = at.store.load_latest()
    else:
        logger.info("stage %s is complete", at.name)
    run.metrics_records = int(found.state["metrics_records"])
    run.figures |= found.state["figures"]
    return found


class _Desk:
    """What every stage works with: the model, the backend, the sampler, the sinks, and where it left off."""

    def __init__(self, run: _Run, name: str, steps: int, store: CheckpointStore, found: Loaded | None) -> None:
        config = run.config
        self.run, self.name, self.steps, self.store, self.found = run, name, steps, store, found
        self.start = 0 if found is None else found.step
        load = _load_scalar if name == "reward_model" else _load
        self.lm = load(config.model, self._base(), seed=config.run.seed)
        stage = {"sft": config.sft, "reward_model": config.reward_model, "rl": config.rl}[name]
        assert stage is not None
        self.backend = TorchBackend(self.lm, micro_batch_tokens=stage.micro_batch_tokens)
        self.others: list[TorchBackend] = []  # to close besides
        if found is not None:
            self.backend.load_state(found.folder).result()
        self.renderer = Renderer(self.lm.tokenizer, eos_tokens=self.lm.eos_tokens)
        self.updater = Updater(
            backend=self.backend,
            adam=_adam(stage.optimizer, steps),
            max_skips=stage.optimizer.max_skips,
            skips_in_a_row=0 if found is None else int(found.state["skips_in_a_row"]),
        )
        self.figures: dict[str, Any] = dict(run.figures if found is None else found.state["figures"])
        self.jsonl = JsonlSink(run.folder.metrics, stage=name)
        self.jsonl.truncate_after(run.metrics_records if found is None else int(found.state["metrics_records"]))
        sinks: list[MetricSink] = [self.jsonl]
        if config.run.tensorboard and tensorboard_installed():
            sinks.append(TensorBoardSink(run.folder.tensorboard, stage=name, purge_step=self.start + 1))
        sinks.append(Progress(name, steps, start=self.start))  # last: a failure above must not leave a bar behind
        self.sink = TeeSink(*sinks)

    @cached_property
    def sampler(self) -> EmbeddedEngine | GenerateSampler:
        """Made when something is sampled for the first time: a reward model never is."""
        return make_sampler(self.run.config, self.lm)

    @cached_property
    def terms(self) -> list[Term]:
        """What judges episodes, in training and evaluation."""
        return _terms(self.run.config, self.run.reward_model_path)

    @cached_property
    def publisher(self) -> Publisher:
        return Publisher([self.sampler])

    def _base(self) -> str:
        """The folder whose weights are loaded first. Only adapters need those that the stage started from."""
        if self.found is None:
            return self.run.model_path
        if self.run.config.model.lora is None:
            return str(self.found.folder)
        return self.run.model_path if self.name == "sft" else self.run.after_sft()

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
            self.store,
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
        tasks = _tasks(config.eval.source)[: config.eval.tasks]
        play = _play_eval(config, self.sampler, self.renderer, self.terms)

        async def run_evaluation(step: int) -> Evaluation:
            began_s = time.perf_counter()
            out = await evaluate_tasks(tasks, play)
            values = metric_values(out.metrics)
            self.sink.log(step, values | {"time/eval_s": time.perf_counter() - began_s})
            label = "base" if step == 0 else self.name
            episodes = [scored for group in out.groups for scored in group.episodes]
            save_trajectories(self.run.folder.eval_rollouts(label), episodes, lean=True)
            self.figures[f"success_{label}"] = out.score
            self.figures[f"malformed_{label}"] = values["eval/invalid_actions"]
            return out

        return run_evaluation

    def close(self) -> None:
        self.sink.close()
        if "sampler" in self.__dict__:
            self.sampler.close()
        for backend in (self.backend, *self.others):
            backend.close()


async def _run_sft(run: _Run, desk: _Desk) -> None:
    c = run.config.sft
    assert c is not None
    mixture = Mixture([(_conversations(source), source.weight) for source in c.sources], run.config.run.seed)
    if desk.found is not None:
        mixture.load_state_dict(desk.found.state["cursor"])
    evaluate_now = desk.evaluator()

    async def evaluate_after_sync(step: int) -> Evaluation:
        assert evaluate_now is not None
        handle = await asyncio.wrap_future(desk.backend.export_weights())
        async with desk.publisher.publish(handle):
            pass
        return await evaluate_now(step)

    await train_sft(
        SftSettings(steps=c.steps, batch_size=c.batch_size, max_tokens=c.max_tokens, eval_every=run.config.eval.every),
        next_batch=mixture.next_batch,
        renderer=desk.renderer,
        backend=desk.backend,
        updater=desk.updater,
        sink=desk.sink,
        keeper=desk.keeper(lambda: {"cursor": mixture.state_dict()}),
        held_out=_conversations(c.held_out) if c.held_out else (),
        evaluate=None if evaluate_now is None else evaluate_after_sync,
        start=desk.start,
    )


async def _run_reward_model(run: _Run, desk: _Desk) -> None:
    c = run.config.reward_model
    assert c is not None
    mixture = Mixture([(_pairs(source), source.weight) for source in c.sources], run.config.run.seed)
    if desk.found is not None:
        mixture.load_state_dict(desk.found.state["cursor"])
    await train_reward_model(
        RewardModelSettings(
            steps=c.steps,
            batch_size=c.batch_size,
            max_tokens=c.max_tokens,
            center_coef=c.center_coef,
            eval_every=run.config.eval.every,
        ),
        next_batch=mixture.next_batch,
        renderer=desk.renderer,
        backend=desk.backend,
        updater=desk.updater,
        sink=desk.sink,
        keeper=desk.keeper(lambda: {"cursor": mixture.state_dict()}),
        held_out=_pairs(c.held_out) if c.held_out else (),
        start=desk.start,
    )


async def _run_rl(run: _Run, desk: _Desk) -> None:
    config, c = run.config, run.config.rl
    assert c is not None
    source = TaskSource(_training_tasks(config, c, desk.renderer), config.run.seed)
    executor = make_executor(c, config.run.seed, desk, source)
    if desk.found is not None:
        source.load_state_dict(desk.found.state["cursor"])
        executor.load_state_dict(desk.found.state["executor"])
        await executor.catch_up(await asyncio.wrap_future(desk.backend.export_weights()))
    evaluate_now = desk.evaluator()
    if evaluate_now is not None and config.sft is None and desk.start == 0:
        await evaluate_now(0)

    loss = make_loss(c)
    critic = None if c.critic is None else _critic(c, c.critic, desk)

    trust = None if c.kl_limit is None else _trust(c.kl_limit, desk, loss)

    def parts() -> dict[str, Any]:
        state: dict[str, Any] = {"cursor": source.state_dict(), "executor": executor.state_dict()}
        if critic is not None:
            state["critic_skips_in_a_row"] = critic.updater.skips_in_a_row
        if trust is not None:
            state["kl_coef_doublings"] = trust.doublings
        return state

    def record(step: int, episodes: Sequence[CreditedEpisode]) -> None:
        save_trajectories(run.folder.step_rollouts(step + 1), episodes)

    await train_rl(
        RlSettings(
            steps=c.steps,
            minibatches=c.minibatches,
            loss=loss,
            credit=c.credit,
            credit_params=c.credit_params,
            weighting=c.weighting,
            weighting_constant=c.weighting_constant or float(c.max_episode_tokens),
            correction=_correction(c),
            sync_every=c.sync_every,
            eval_every=config.eval.every,
        ),
        executor=executor,
        backend=desk.backend,
        updater=desk.updater,
        sink=desk.sink,
        keeper=desk.keeper(parts, beside={} if critic is None else {"critic": critic.backend}),
        record=record,
        critic=critic,
        trust=trust,
        scorers=_scorers(c, desk, loss),
        evaluate=evaluate_now,
        start=desk.start,
    )


async def _evaluate(config: Config) -> dict[str, float]:
    if config.eval.source is None:
        raise ConfigError("there is nothing to evaluate on: add [eval.source] to the file")
    lm = _load(config.model, config.model.path, seed=config.run.seed)
    sampler = make_sampler(config, lm)
    try:
        renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens)
        tasks = _tasks(config.eval.source)[: config.eval.tasks]
        terms = _terms(config, None)
        if not terms:
            raise ConfigError("nothing but the reward model could judge: give its folder as 'path' in 'rl.rewards'")
        out = await evaluate_tasks(tasks, _play_eval(config, sampler, renderer, terms))
    finally:
        sampler.close()
    return metric_values(out.metrics)


# --- pieces ----------------------------------------------------------------------------------------------------------


def make_sampler(config: Config, lm: LanguageModel) -> EmbeddedEngine | GenerateSampler:
    """The embedded engine on the trainer's own weights; on a copy when sampling may see other weights than training."""
    rl, engine = config.rl, config.engine
    if engine.type == "generate":
        plain = copy.deepcopy(lm.model)
        plain.config._attn_implementation = "sdpa"
        return GenerateSampler(plain, lm.tokenizer, eos_tokens=lm.eos_tokens, source=lm.model)
    separate = rl is not None and (rl.sync_every > 1 or rl.asynchronous.max_staleness > 0)
    own = prepare(copy.deepcopy(lm.model), lm.tokenizer, source=lm.source) if separate else lm
    longest = rl.max_episode_tokens if rl is not None else lm.context
    return EmbeddedEngine(
        own,
        max_rows=engine.max_rows,
        kv_tokens=engine.kv_tokens or engine.max_rows * 2 * min(longest, lm.context),
        piece_tokens=engine.piece_tokens,
        source=lm if separate else None,
    )


def make_executor(c: Rl, seed: int, desk: _Desk, source: TaskSource) -> RolloutExecutor:
    play = partial(
        play_group,
        group_size=c.group_size,
        make_env=_make_env(c.tasks),
        sampler=desk.sampler,
        renderer=desk.renderer,
        reward_runner=_reward_runner(desk.terms, c),
        sampling=_sampling(c.sampling, c.sampling.temperature),
        max_turns=c.max_turns,
        max_episode_tokens=c.max_episode_tokens,
        timeout_s=c.asynchronous.task_timeout_s,
        run_seed=seed,
        generate_fn=load_function(c.generate_fn) if c.generate_fn else None,
    )
    return RolloutExecutor(
        play=play,
        next_task=source.next,
        batch_groups=c.groups,
        settings=AsyncSettings(
            max_staleness=c.asynchronous.max_staleness,
            max_running=c.asynchronous.max_running,
            task_timeout_s=c.asynchronous.task_timeout_s,
            max_consecutive_drops=c.asynchronous.max_consecutive_drops,
        ),
        publisher=desk.publisher,
        filters=[_filter(filter.fn, filter.options) for filter in c.filters],
    )


def make_loss(c: Rl) -> LossSpec:
    """The loss of [rl], its own functions loaded. Raises ConfigError when it needs what cannot be provided."""
    terms = split_sum(c.loss)
    known = all(term in LOSSES for term in terms)
    fn = added([LOSSES[term] if term in LOSSES else load_function(term) for term in terms])
    check_objective(fn, c.loss_params, available=available_arrays(fn, teacher=c.teacher is not None))
    return LossSpec(fn=c.loss if known else fn, params=c.loss_params)


def _correction(c: Rl) -> Correction | None:
    if c.correction is None:
        return None
    return Correction(
        behaviour=Behaviour(c.correction.behaviour),
        bound=Bound(c.correction.bound),
        level=Level(c.correction.level),
        floor=c.correction.floor,
        cap=c.correction.cap,
        normalise=c.correction.normalise,
        m2_threshold=c.correction.m2_threshold,
    )


def _critic(c: Rl, own: CriticConfig, desk: _Desk) -> Critic:
    """The value model with its own trunk, optimiser and worker; it goes on from where the checkpoint left it."""
    config, found = desk.run.config, desk.found
    begin = (desk.run.reward_model_path if own.path == REWARD_MODEL else own.path) or desk.run.model_path
    resumed = found is not None and config.model.lora is None
    path = str(found.folder / "critic") if found is not None and resumed else begin
    backend = TorchBackend(
        _load_scalar(config.model, path, seed=config.run.seed), micro_batch_tokens=c.micro_batch_tokens
    )
    desk.others.append(backend)
    if found is not None:
        backend.load_state(found.folder / "critic").result()
    return Critic(
        settings=CriticSettings(
            credit=c.credit,
            gamma=own.gamma,
            lam=own.lam,
            value_clip=own.value_clip,
            whiten=own.whiten,
            kl_coef=own.kl_coef,
            bootstrap=own.bootstrap,
            minibatches=c.minibatches,
        ),
        backend=backend,
        updater=Updater(
            backend=backend,
            adam=_adam(own.optimizer, c.steps),
            max_skips=own.optimizer.max_skips,
            skips_in_a_row=0 if found is None else int(found.state["critic_skips_in_a_row"]),
        ),
        reference=scored_on_thread(_frozen(c, desk, c.reference).score) if own.kl_coef else None,
    )


def _trust(limit: float, desk: _Desk, loss: LossSpec) -> TrustRegion:
    numbers = {**loss_inputs(find_loss(loss.fn)).params, **loss.params}
    return TrustRegion(
        limit=limit,
        policy=scored_by_backend(desk.backend),
        coef=numbers.get(COEF),
        doublings=0.0 if desk.found is None else float(desk.found.state["kl_coef_doublings"]),
    )


def _scorers(c: Rl, desk: _Desk, loss: LossSpec) -> dict[str, Score]:
    """Who computes the log-probs that the loss asks for beyond the sampler's."""
    wanted = wanted_arrays(find_loss(loss.fn), correction=_correction(c))
    scorers: dict[str, Score] = {}
    if "proximal_logprobs" in wanted or c.kl_limit is not None:
        scorers["proximal_logprobs"] = scored_by_backend(desk.backend)
    for name, path in (("reference_logprobs", c.reference), ("teacher_logprobs", c.teacher)):
        if name in wanted:
            scorers[name] = scored_on_thread(_frozen(c, desk, path).score)
    return scorers


def _frozen(c: Rl, desk: _Desk, path: str | None) -> FrozenScorer:
    """A model that is not trained; None: the one the stage started from, which under adapters is the base itself."""
    model = desk.run.config.model
    if path is None and model.lora is not None:
        return FrozenScorer(desk.lm, micro_batch_tokens=c.micro_batch_tokens, base_only=True)
    lm = _load(replace(model, lora=None, recompute=False), path or desk.run.after_sft(), seed=0)
    lm.model.requires_grad_(False)
    if lm.vocabulary != desk.lm.vocabulary:
        raise ModelError(
            f"{path} has a vocabulary of {lm.vocabulary} tokens and the trained model one of {desk.lm.vocabulary}: "
            "their log-probs cannot be compared"
        )
    return FrozenScorer(lm, micro_batch_tokens=c.micro_batch_tokens)


def _play_eval(
    config: Config, sampler: EmbeddedEngine | GenerateSampler, renderer: Renderer, terms: Sequence[Term]
) -> Play:
    """Held-out tasks are played by the rules of [rl] (its defaults when there is none), at [eval]'s temperature."""
    source = config.eval.source
    assert source is not None
    rl = config.rl or Rl(steps=1, tasks=source)
    return partial(
        play_group,
        group_size=config.eval.samples,
        make_env=_make_env(source),
        sampler=sampler,
        renderer=renderer,
        reward_runner=_reward_runner(terms, rl),
        sampling=_sampling(rl.sampling, config.eval.temperature),
        max_turns=rl.max_turns,
        max_episode_tokens=rl.max_episode_tokens,
        timeout_s=rl.asynchronous.task_timeout_s,
        run_seed=config.eval.seed,
        generate_fn=load_function(rl.generate_fn) if rl.generate_fn else None,
    )


def _load(c: Model, path: str, *, seed: int) -> LanguageModel:
    device = choose_device(c.device)
    lm = load_model(path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.alpha, targets=c.lora.targets, seed=seed)
    if c.recompute:
        recompute_layers(lm.model)
    return lm


def _load_scalar(c: Model, path: str, *, seed: int) -> LanguageModel:
    """The same under a scalar head, which is trained beside adapters too."""
    device = choose_device(c.device)
    lm = load_scalar_model(
        path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code
    )
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.alpha, targets=c.lora.targets, seed=seed)
        lm.model.score.requires_grad_(True)
    if c.recompute:
        recompute_layers(lm.model)
    return lm


def _starting_model(config: Config, folder: RunFolder) -> str:
    """Where the first stage starts; "tiny" is written into the run folder first."""
    if config.model.path != "tiny":
        return config.model.path
    target = folder.path / "start"
    if not (target / "config.json").is_file():
        tiny = config.model.tiny
        save_tiny(
            target,
            words=_tiny_words(config),
            width=tiny.width,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            context=tiny.context,
            seed=config.run.seed,
        )
    return str(target)


def _tiny_words(config: Config) -> tuple[str, ...]:
    staged = [stage for stage in (config.sft, config.reward_model) if stage is not None]
    sources = [*(source for stage in staged for source in stage.sources), *([config.rl.tasks] if config.rl else [])]
    names = [source.name for source in sources if source.type == "world" and source.name]
    if not names:
        raise ConfigError('model.path = "tiny" knows only the words of a built-in world: use a source of type "world"')
    words: list[str] = []
    for name in dict.fromkeys(names):
        words += [word for word in WORLDS[name].vocabulary() if word not in words]
    return tuple(words)


def _tasks(source: Source) -> list[Task]:
    if source.type == "world":
        assert source.name is not None
        return world_tasks(source.name, source.size, source.seed, source.options)
    return load_tasks(source)


def _conversations(source: Source) -> list[tuple[Message, ...]]:
    if source.type == "world":
        assert source.name is not None
        return world_demonstrations(source.name, source.size, source.seed, source.options)
    return load_conversations(source)


def _pairs(source: Source) -> list[Pair]:
    if source.type == "world":
        assert source.name is not None
        made = world_pairs(source.name, source.size, source.seed, source.options)
        return [Pair(chosen=chosen, rejected=rejected) for chosen, rejected in made]
    return load_pairs(source)


def _training_tasks(config: Config, c: Rl, renderer: Renderer) -> tuple[Task, ...]:
    """The tasks that fit, with what was left out and what is also held out said aloud."""
    filtered = filter_prompts(_tasks(c.tasks), renderer, c.max_prompt_tokens)
    if filtered.dropped_count:
        logger.warning(
            "%d tasks have prompts of more than %d tokens (the longest has %d) and are left out",
            filtered.dropped_count,
            c.max_prompt_tokens,
            filtered.longest,
        )
    if not filtered.kept:
        raise DataError(f"no task is left: raise rl.max_prompt_tokens above {filtered.longest}")
    if config.eval.source is not None:
        shared = overlap(filtered.kept, _tasks(config.eval.source)[: config.eval.tasks])
        if shared:
            logger.warning("%d held-out tasks are also trained on: their score says little", shared)
    return filtered.kept


def _make_env(source: Source) -> Callable[[], Env]:
    if source.type == "world":
        assert source.name is not None
        return WORLDS[source.name].make_env
    return SingleTurnEnv


def _terms(config: Config, reward_model_path: str | None) -> list[Term]:
    """The terms that can judge now: those of [rl] (what the world gives, if there is none), without a reward model
    that is not there yet."""
    rewards = (RewardTerm(fn="env"),) if config.rl is None else config.rl.rewards
    tokens = 8192 if config.rl is None else config.rl.micro_batch_tokens
    there = [term for term in rewards if term.fn != REWARD_MODEL or (term.path or reward_model_path) is not None]
    return [_term(term, config.model, reward_model_path, tokens) for term in there]


def _reward_runner(terms: Sequence[Term], rl: Rl) -> InProcessRewardRunner:
    """A reward model judges one episode after another: those that wait for it have as long as an episode has."""
    if any(term.fn == REWARD_MODEL for term in rl.rewards):
        return InProcessRewardRunner(terms, timeout_s=rl.asynchronous.task_timeout_s)
    return InProcessRewardRunner(terms)


def _term(term: RewardTerm, model: Model, reward_model_path: str | None, micro_batch_tokens: int) -> Term:
    name = term.name or term.fn.rpartition(":")[2]
    if term.fn == REWARD_MODEL:
        path = term.path or reward_model_path
        assert path is not None
        return Term(name=name, fn=_model_reward(path, model, micro_batch_tokens), weight=term.weight)
    fn = BUILTIN[term.fn] if term.fn in BUILTIN else load_function(term.fn)
    return Term(name=name, fn=fn, weight=term.weight)


def _model_reward(path: str, model: Model, micro_batch_tokens: int) -> RewardFn:
    """A saved reward model as a reward function. One episode at a time, so a reward depends on nothing beside it."""
    if not is_scalar_folder(Path(path)):
        raise ModelError(f"{path} is not a reward model: give the folder of a sequence classifier with one label")
    lm = _load_scalar(replace(model, lora=None, recompute=False), path, seed=0)
    lm.model.requires_grad_(False)
    scorer = FrozenScorer(lm, micro_batch_tokens=micro_batch_tokens)
    alone = asyncio.Lock()

    async def score(tokens: IntArray) -> float:
        async with alone:
            (scores,) = await asyncio.to_thread(scorer.score, [scored_datum(tokens)])
        return float(scores[-1])

    return reward_by_model(score, max_tokens=lm.context)


def _filter(name: str, options: Mapping[str, Any]) -> Filter:
    if name in FILTERS:
        return named_filter(name, options)
    fn = load_function(name)
    return partial(fn, **options) if options else fn


def _sampling(c: Sampling, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=c.max_tokens,
        temperature=temperature,
        top_p=c.top_p,
        top_k=c.top_k,
        min_p=c.min_p,
        stop_strings=c.stop_strings,
    )


def _adam(c: Optimizer, steps: int) -> Callable[[int], Adam]:
    schedule = make_schedule(
        steps,
        peak=c.learning_rate,
        type=c.schedule.type,
        warmup_steps=c.schedule.warmup_steps,
        final=c.schedule.final,
    )

    def adam(step: int) -> Adam:
        return Adam(
            learning_rate=schedule(step),
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            weight_decay=c.weight_decay,
            clip_norm=c.clip_norm,
            max_norm=c.max_norm,
        )

    return adam


# --- the process -----------------------------------------------------------------------------------------------------


def _check_same_run(run: RunFolder, config: Config) -> None:
    """A run goes on with the configuration it began with; anything else would not be a resume."""
    with boundary(RunFolderError, f"{run.config} cannot be read"):
        before = tomllib.loads(run.config.read_text(encoding="utf-8"))
    differences = list(_differences(before, tomllib.loads(to_toml(to_mapping(config)))))
    if not differences:
        return
    more = f" (and {len(differences) - 1} more keys differ)" if len(differences) > 1 else ""
    raise ConfigError(
        f"{run.path} was started with {differences[0]}{more}: resume with the same file and overrides, "
        "or start a new run without --resume"
    )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """ "'rl.steps' = 4 and it is now 5" for every key that differs."""
    for key in (*before, *(key for key in now if key not in before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            shown = ["not set" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new)]
            yield f"'{prefix}{key}' = {shown[0]} and it is now {shown[1]}"


@contextlib.contextmanager
def _stop_on_signals(stop: asyncio.Event, *, deadline_s: float) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C asks for a checkpoint and a clean end; the second one ends at once.

    A run that has not ended `deadline_s` after the first is ended where it is, as by a kill: the checkpoint before
    counts. Outside of the main thread signals are the caller's business.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    timer = threading.Timer(deadline_s, _end_at_once, [deadline_s])  # a thread: the event loop may get busy
    timer.daemon = True

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask() -> None:
        timer.start()
        stop.set()
        logger.warning("asked to stop: saving a checkpoint (ask again to end at once)")

    def on_signal(number: int, frame: object) -> None:  # it may have interrupted anything, so it takes no lock
        restore()
        loop.call_soon_threadsafe(ask)

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        timer.cancel()
        restore()


def _end_at_once(deadline_s: float) -> None:
    logger.error("no checkpoint within %g s (checkpoint.deadline_s): the run ends without it", deadline_s)
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("headrace")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
