"""Run the stages: [sft], [distill], [dpo], [reward_model], [rl], each from its section of the file to its loop."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.algo.datum import SequenceUnit
from headrace.cluster.reference_worker import ClusterScorer
from headrace.config import num_steps
from headrace.data.conversations import ConversationMixture
from headrace.data.task_mixture import source_name
from headrace.loops.credit_health import SignalWatch
from headrace.loops.distill import DistillSettings, TaughtTask, train_distillation
from headrace.loops.evaluate import EvalResult
from headrace.loops.preference.examples import PreferenceExample, Scores
from headrace.loops.preference.reference_scores import score_once
from headrace.loops.preference.train import PreferenceSettings, ScoredExample, train_on_preferences
from headrace.loops.reward_model import RewardModelSettings, train_reward_model
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.observe.machine import FROZEN_BY_PYTHON
from headrace.process.watchdog import watching_thread
from headrace.reward.reward_runner import PartNames
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.publisher import Publisher
from headrace.types import Episode, FailedEpisode, WeightsHandle
from headrace.wiring.build.episodes import distill_player
from headrace.wiring.build.extra_models import make_critic, make_kl_limit, make_scorers, open_frozen
from headrace.wiring.build.loss import make_preference_loss
from headrace.wiring.build.rollout_executor import make_executor, make_task_source
from headrace.wiring.build.saving import make_record
from headrace.wiring.stage_context import StageContext

REFERENCE_SCORES = "dpo_reference.safetensors"  # in the run folder
COLLECT_AFTER = (10_000, 20, 20)  # objects; collections of the younger generation


async def run_sft(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.sft
    c = config.sft
    assert c is not None
    assert inputs is not None
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    if context.resumed is not None:
        mixture.load_state_dict(context.resumed.state["cursor"])
    await context.runtime.turns.to_training()
    await train_sft(
        SftSettings(steps=num_steps(c), batch_size=c.batch_size, max_tokens=c.max_tokens, eval_every=config.eval.every),
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
    publisher, turns = Publisher([context.sampler]), context.runtime.turns

    async def evaluate_after_sync(step: int) -> EvalResult:
        handle = await asyncio.wrap_future(context.backend.export_weights())
        await turns.to_sampling()
        async with publisher.publish(handle):
            pass
        result = await evaluate_now(step)
        await turns.to_training()
        return result

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
    with watching_thread("loading the teachers", loads=True):
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
    checkpointer = context.checkpointer(lambda: {"cursor": mixture.state_dict()})
    if evaluate_now is not None and config.sft is None and context.start == 0:
        await checkpointer.run_or_stop(evaluate_now(0))
    await train_distillation(
        DistillSettings(
            steps=num_steps(c), batch_size=c.batch_size, kl=c.kl, top_k=c.top_k, eval_every=config.eval.every
        ),
        next_tasks=mixture.next_batch,
        play=play,
        teachers=teachers,
        publish=publish,
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=checkpointer,
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
    scored_before = 0
    if resumed is not None:
        mixture.load_state_dict(resumed["cursor"])
        scored_before = int(resumed.get("reference", {}).get("sequences", 0))
    draws = sum(mixture.counts) + (num_steps(c) - context.start) * c.batch_size
    mixture.load_state_dict(beginning)
    drawn = {id(example): example for example in (*inputs.held_out, *mixture.next_batch(draws))}
    to_score = sum(len(example.scored) for example in drawn.values())
    while to_score < scored_before:  # the stage was planned to be longer
        example = mixture.next()
        to_score += len(example.scored) if id(example) not in drawn else 0
        drawn[id(example)] = example
    mixture.load_state_dict(beginning if resumed is None else resumed["cursor"])
    await context.runtime.turns.to_training()
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
            steps=num_steps(c), batch_size=c.batch_size, loss=make_preference_loss(c), eval_every=config.eval.every
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
            steps=num_steps(c),
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
    source = make_task_source(c, inputs.tasks, config.run.seed)
    utilization = SamplerUtilization()
    context.buffer.cursor = source.position
    part_names = PartNames({} if context.resumed is None else context.resumed.state.get("part_names"))
    executor = make_executor(c, config.run.seed, context, source, utilization, part_names)
    if context.resumed is not None:
        source.load_state_dict(context.resumed.state["executor"]["cursor"])
        executor.load_state_dict(context.resumed.state["executor"])
        await executor.load_current(await asyncio.wrap_future(context.backend.export_weights()))
    critic = None if c.critic is None else make_critic(c, c.critic, context)
    kl_limit = None if c.kl_limit is None else make_kl_limit(c, c.kl_limit, context, functions.loss)

    scorers = make_scorers(c, context, functions)
    for scorer in scorers.values():
        if isinstance(scorer, ClusterScorer):
            await scorer(())  # its model is loaded now: one that cannot be fails before training

    saved = {} if context.resumed is None else context.resumed.state
    signal = SignalWatch(limit=config.run.stop_without_signal, state=saved.get("without_signal"))

    def parts() -> dict[str, Any]:
        state: dict[str, Any] = {"executor": executor.snapshot()}
        if streak := signal.state_dict():
            state["without_signal"] = streak
        if names := part_names.state_dict():
            state["part_names"] = names
        if critic is not None and critic.updater is not None:
            state["critic_skips_in_a_row"] = critic.updater.skips_in_a_row
        if kl_limit is not None:
            state["kl_coef_doublings"] = kl_limit.doublings
        return state

    checkpointer = context.checkpointer(
        parts, beside={} if critic is None or critic.updater is None else {"critic": critic.backend}
    )
    evaluate_now = context.evaluator()
    if evaluate_now is not None and not any((config.sft, config.distill, config.dpo)) and context.start == 0:
        await checkpointer.run_or_stop(evaluate_now(0))
    with rare_collections():
        await train_rl(
            RlSettings(
                steps=num_steps(c),
                minibatches=c.minibatches,
                loss=functions.loss,
                credit=functions.credit,
                credit_params=c.credit_params,
                keys=functions.keys,
                rows=SequenceUnit(c.sequence_unit),
                mixed_versions=c.asynchronous.max_staleness > 0,
                weighting=c.weighting,
                weighting_constant=c.weighting_constant or float(c.max_episode_tokens),
                correction=functions.correction,
                sync_every=c.sync_every,
                eval_every=config.eval.every,
                source_of=source_name if len(c.tasks) > 1 else None,
            ),
            executor=executor,
            backend=context.backend,
            updater=context.updater,
            sink=context.sink,
            checkpointer=checkpointer,
            record=context.buffer.recorder(make_record(c, context.run.folder, check_owner=context.run.check_owner)),
            critic=critic,
            kl_limit=kl_limit,
            utilization=utilization,
            signal=signal,
            scorers=scorers,
            evaluate=evaluate_now,
            start=context.start,
        )


@contextmanager
def rare_collections() -> Iterator[None]:
    """Keep models and libraries out of garbage collections, each of which would stall rollouts for a fifth of a second,
    and collect less often: with ten thousand episodes in flight the usual intervals take a third of the time.

    A program that has frozen objects of its own is left alone: unfreezing ours would unfreeze them too.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    intervals = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # only a collection counts what is left, a quarter of which may be garbage
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*intervals)
        gc.unfreeze()
