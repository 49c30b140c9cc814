"""Run the stages: [sft], [distill], [dpo], [reward_model], [rl], each from its section of the file to its loop."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.algo.datum import SequenceUnit
from headrace.data.conversations import ConversationMixture
from headrace.data.task_source import TaskSource
from headrace.loops.distill import DistillSettings, TaughtTask, train_distillation
from headrace.loops.evaluate import EvalResult
from headrace.loops.preference.examples import PreferenceExample, Scores
from headrace.loops.preference.reference_scores import score_once
from headrace.loops.preference.train import PreferenceSettings, ScoredExample, train_on_preferences
from headrace.loops.reward_model import RewardModelSettings, train_reward_model
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.reward.reward_runner import PartNames
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.publisher import Publisher
from headrace.types import Episode, FailedEpisode, WeightsHandle
from headrace.watchdog import watching_thread
from headrace.wiring.build.episodes import distill_player
from headrace.wiring.build.extra_models import make_critic, make_kl_limit, make_scorers, open_frozen
from headrace.wiring.build.loss import make_preference_loss
from headrace.wiring.build.rollout_executor import make_executor
from headrace.wiring.build.saving import make_record
from headrace.wiring.stage_context import StageContext

REFERENCE_SCORES = "dpo_reference.safetensors"  # in the run folder
FROZEN_BY_PYTHON = 10_000  # Python 3.12 starts with some hundred frozen objects


async def run_sft(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.sft
    c = config.sft
    assert c is not None
    assert inputs is not None
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    if context.resumed is not None:
        mixture.load_state_dict(context.resumed.state["cursor"])
    await train_sft(
        SftSettings(steps=c.steps, batch_size=c.batch_size, max_tokens=c.max_tokens, eval_every=config.eval.every),
        next_batch=mixture.next_batch,
        renderer=context.renderer,
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=context.checkpointer(lambda: {"cursor": mixture.state_dict()}),
        held_out=inputs.held_out,
        evaluate=_evaluator_after_sync(context),
        start=context.start,
    )


def _evaluator_after_sync(context: StageContext) -> Callable[[int], Awaitable[EvalResult]] | None:
    """Return what plays the held-out tasks with the weights of now; None if there are none."""
    evaluate_now = context.evaluator()
    if evaluate_now is None:
        return None
    publisher = Publisher([context.sampler])

    async def evaluate_after_sync(step: int) -> EvalResult:
        handle = await asyncio.wrap_future(context.backend.export_weights())
        async with publisher.publish(handle):
            pass
        return await evaluate_now(step)

    return evaluate_after_sync


async def run_distill(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.distill
    c = config.distill
    assert c is not None
    assert inputs is not None
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    if context.resumed is not None:
        mixture.load_state_dict(context.resumed.state["cursor"])
    players = [
        distill_player(c, teacher, config.run.seed, context.sampler, context.renderer, context.programs)
        for teacher in c.teachers
    ]
    with watching_thread("loading the teachers", has_deadline=True):
        teachers = [
            context.runtime.open_teacher(teacher.path, micro_batch_tokens=c.micro_batch_tokens)
            for teacher in c.teachers
        ]
    publisher = Publisher([context.sampler])

    async def play(taught: TaughtTask, number: int) -> Episode | FailedEpisode:
        [ended] = await players[taught.teacher].play_episodes(taught.task, number)
        return ended

    async def publish(handle: WeightsHandle) -> None:
        async with publisher.publish(handle):
            pass

    evaluate_now = context.evaluator()
    if evaluate_now is not None and config.sft is None and context.start == 0:
        await evaluate_now(0)
    await train_distillation(
        DistillSettings(steps=c.steps, batch_size=c.batch_size, kl=c.kl, top_k=c.top_k, eval_every=config.eval.every),
        next_tasks=mixture.next_batch,
        play=play,
        teachers=teachers,
        publish=publish,
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=context.checkpointer(lambda: {"cursor": mixture.state_dict()}),
        evaluate=evaluate_now,
        start=context.start,
    )


async def run_dpo(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.dpo
    c = config.dpo
    assert c is not None
    assert inputs is not None
    resumed = None if context.resumed is None else context.resumed.state
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    beginning = mixture.state_dict()
    drawn = {id(example): example for example in (*inputs.held_out, *mixture.next_batch(c.steps * c.batch_size))}
    mixture.load_state_dict(beginning if resumed is None else resumed["cursor"])
    reference: dict[str, Any] = {}  # the record of its log-probs

    checkpointer = context.checkpointer(lambda: {"cursor": mixture.state_dict(), **reference})
    scores: dict[int, Scores] = {}
    if c.has_reference:
        sequences = [part for example in drawn.values() for part in example.scored]
        scored = await checkpointer.run_or_stop(
            score_once(
                context.run.folder.path / REFERENCE_SCORES,
                sequences,
                lambda: open_frozen(context, c.reference, micro_batch_tokens=c.micro_batch_tokens),
                saved=None if resumed is None else resumed["reference"],
                check_owner=context.run.check_owner,
            )
        )
        reference["reference"] = scored.record()
        logprobs = iter(scored.logprobs)
        scores = {number: [next(logprobs) for _ in example.scored] for number, example in drawn.items()}

    def with_scores(examples: Iterable[PreferenceExample]) -> list[ScoredExample]:
        return [ScoredExample(example=example, scores=scores.get(id(example), ())) for example in examples]

    def report(values: Mapping[str, float]) -> None:
        context.figures.update(accuracy_dpo=values["eval/accuracy"], margin_dpo=values["eval/margin"])

    await train_on_preferences(
        PreferenceSettings(
            steps=c.steps, batch_size=c.batch_size, loss=make_preference_loss(c), eval_every=config.eval.every
        ),
        next_batch=lambda count: with_scores(mixture.next_batch(count)),
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=checkpointer,
        held_out=with_scores(inputs.held_out),
        evaluate=_evaluator_after_sync(context),
        report=report,
        start=context.start,
    )


async def run_reward_model(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.reward_model
    c = config.reward_model
    assert c is not None
    assert inputs is not None
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    if context.resumed is not None:
        mixture.load_state_dict(context.resumed.state["cursor"])
    await train_reward_model(
        RewardModelSettings(
            steps=c.steps,
            batch_size=c.batch_size,
            max_tokens=c.max_tokens,
            center_coef=c.center_coef,
            eval_every=config.eval.every,
        ),
        next_batch=mixture.next_batch,
        renderer=context.renderer,
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=context.checkpointer(lambda: {"cursor": mixture.state_dict()}),
        held_out=inputs.held_out,
        start=context.start,
    )


async def run_rl(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.rl
    c = config.rl
    assert c is not None
    assert inputs is not None
    functions = inputs.functions
    source = TaskSource(inputs.tasks, config.run.seed)
    utilization = SamplerUtilization()
    context.buffer.cursor = source.state_dict
    part_names = PartNames({} if context.resumed is None else context.resumed.state.get("part_names"))
    executor = make_executor(c, config.run.seed, context, source, utilization, part_names)
    if context.resumed is not None:
        source.load_state_dict(context.resumed.state["executor"]["cursor"])
        executor.load_state_dict(context.resumed.state["executor"])
        await executor.load_current(await asyncio.wrap_future(context.backend.export_weights()))
    evaluate_now = context.evaluator()
    if evaluate_now is not None and not any((config.sft, config.distill, config.dpo)) and context.start == 0:
        await evaluate_now(0)

    critic = None if c.critic is None else make_critic(c, c.critic, context)
    kl_limit = None if c.kl_limit is None else make_kl_limit(c, c.kl_limit, context, functions.loss)

    def parts() -> dict[str, Any]:
        state: dict[str, Any] = {"executor": executor.snapshot()}
        if names := part_names.state_dict():
            state["part_names"] = names
        if critic is not None and critic.updater is not None:
            state["critic_skips_in_a_row"] = critic.updater.skips_in_a_row
        if kl_limit is not None:
            state["kl_coef_doublings"] = kl_limit.doublings
        return state

    with _gc_frozen():
        await train_rl(
            RlSettings(
                steps=c.steps,
                minibatches=c.minibatches,
                loss=functions.loss,
                credit=c.credit,
                credit_params=c.credit_params,
                keys=functions.keys,
                rows=SequenceUnit(c.sequence_unit),
                mixed_versions=c.asynchronous.max_staleness > 0,
                weighting=c.weighting,
                weighting_constant=c.weighting_constant or float(c.max_episode_tokens),
                correction=functions.correction,
                sync_every=c.sync_every,
                eval_every=config.eval.every,
            ),
            executor=executor,
            backend=context.backend,
            updater=context.updater,
            sink=context.sink,
            checkpointer=context.checkpointer(
                parts, beside={} if critic is None or critic.updater is None else {"critic": critic.backend}
            ),
            record=context.buffer.recorder(make_record(c, context.run.folder, check_owner=context.run.check_owner)),
            critic=critic,
            kl_limit=kl_limit,
            utilization=utilization,
            scorers=make_scorers(c, context, functions),
            evaluate=evaluate_now,
            start=context.start,
        )


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Keep models and libraries out of garbage collections, each of which would stall rollouts for a fifth of a second.

    A program that has frozen objects of its own is left alone: unfreezing ours would unfreeze them too.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
