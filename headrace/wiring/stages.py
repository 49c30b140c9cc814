"""Run the stages: [sft], [reward_model] and [rl], each from its section of the configuration to its loop."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.algo.datum import SequenceUnit
from headrace.data.conversations import ConversationMixture
from headrace.data.task_source import TaskSource
from headrace.loops.evaluate import EvalResult
from headrace.loops.reward_model import RewardModelSettings, train_reward_model
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.reward.reward_runner import PartNames
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.publisher import Publisher
from headrace.wiring.build.extra_models import make_critic, make_kl_limit, make_scorers
from headrace.wiring.build.rollout_executor import make_executor
from headrace.wiring.build.saving import make_record
from headrace.wiring.stage_context import StageContext

FROZEN_BY_PYTHON = 10_000  # Python 3.12 starts with some hundred frozen objects


async def run_sft(context: StageContext) -> None:
    config, inputs = context.run.config, context.run.inputs.sft
    c = config.sft
    assert c is not None
    assert inputs is not None
    mixture = ConversationMixture(inputs.sources, config.run.seed)
    if context.resumed is not None:
        mixture.load_state_dict(context.resumed.state["cursor"])
    evaluate_now = context.evaluator()
    publisher = None if evaluate_now is None else Publisher([context.sampler])

    async def evaluate_after_sync(step: int) -> EvalResult:
        assert evaluate_now is not None
        assert publisher is not None
        handle = await asyncio.wrap_future(context.backend.export_weights())
        async with publisher.publish(handle):
            pass
        return await evaluate_now(step)

    await train_sft(
        SftSettings(steps=c.steps, batch_size=c.batch_size, max_tokens=c.max_tokens, eval_every=config.eval.every),
        next_batch=mixture.next_batch,
        renderer=context.renderer,
        backend=context.backend,
        updater=context.updater,
        sink=context.sink,
        checkpointer=context.checkpointer(lambda: {"cursor": mixture.state_dict()}),
        held_out=inputs.held_out,
        evaluate=None if evaluate_now is None else evaluate_after_sync,
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
    if evaluate_now is not None and config.sft is None and context.start == 0:
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
