"""The stages: [sft], [reward_model] and [rl], each from its section of the configuration to its loop."""

import asyncio
import gc
from typing import Any

from headrace.algo.datum import Rows
from headrace.loops.evaluate import Evaluation
from headrace.loops.reward_model import RewardModelSettings, train_reward_model
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.rollout.conversations import Mixture
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.tasks import TaskSource
from headrace.wiring.beside import make_critic, make_scorers, make_trust
from headrace.wiring.desk import Desk, Run
from headrace.wiring.objective import make_correction, make_keys, make_loss
from headrace.wiring.record import make_record
from headrace.wiring.rollouts import make_executor
from headrace.wiring.sources import conversations_of, pairs_of, training_conversations


async def run_sft(run: Run, desk: Desk) -> None:
    c = run.config.sft
    assert c is not None
    mixture = Mixture(training_conversations(run.config, c), run.config.run.seed)
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
        held_out=conversations_of(c.held_out) if c.held_out else (),
        evaluate=None if evaluate_now is None else evaluate_after_sync,
        start=desk.start,
    )


async def run_reward_model(run: Run, desk: Desk) -> None:
    c = run.config.reward_model
    assert c is not None
    mixture = Mixture([(pairs_of(source), source.weight) for source in c.sources], run.config.run.seed)
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
        held_out=pairs_of(c.held_out) if c.held_out else (),
        start=desk.start,
    )


async def run_rl(run: Run, desk: Desk) -> None:
    config, c = run.config, run.config.rl
    assert c is not None
    assert run.tasks is not None
    source = TaskSource(run.tasks, config.run.seed)
    utilization = SamplerUtilization()
    executor = make_executor(c, config.run.seed, desk, source, utilization)
    if desk.found is not None:
        source.load_state_dict(desk.found.state["executor"]["cursor"])
        executor.load_state_dict(desk.found.state["executor"])
        await executor.load_current(await asyncio.wrap_future(desk.backend.export_weights()))
    evaluate_now = desk.evaluator()
    if evaluate_now is not None and config.sft is None and desk.start == 0:
        await evaluate_now(0)

    loss = make_loss(c)
    critic = None if c.critic is None else make_critic(c, c.critic, desk)

    trust = None if c.kl_limit is None else make_trust(c, c.kl_limit, desk, loss)

    def parts() -> dict[str, Any]:
        state: dict[str, Any] = {"executor": executor.snapshot()}
        if critic is not None and critic.updater is not None:
            state["critic_skips_in_a_row"] = critic.updater.skips_in_a_row
        if trust is not None:
            state["kl_coef_doublings"] = trust.doublings
        return state

    gc.collect()
    gc.freeze()  # to look through models and libraries takes a fifth of a second every few batches, and stalls rollouts
    await train_rl(
        RlSettings(
            steps=c.steps,
            minibatches=c.minibatches,
            loss=loss,
            credit=c.credit,
            credit_params=c.credit_params,
            keys=make_keys(c),
            rows=Rows(c.rows),
            mixed_versions=c.asynchronous.max_staleness > 0,
            weighting=c.weighting,
            weighting_constant=c.weighting_constant or float(c.max_episode_tokens),
            correction=make_correction(c, loss),
            sync_every=c.sync_every,
            eval_every=config.eval.every,
        ),
        executor=executor,
        backend=desk.backend,
        updater=desk.updater,
        sink=desk.sink,
        keeper=desk.keeper(
            parts, beside={} if critic is None or critic.updater is None else {"critic": critic.backend}
        ),
        record=make_record(c, run.folder),
        critic=critic,
        trust=trust,
        utilization=utilization,
        scorers=make_scorers(c, desk, loss),
        evaluate=evaluate_now,
        start=desk.start,
    )
