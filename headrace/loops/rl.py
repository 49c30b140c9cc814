"""Reinforcement learning, the whole line written out:

    task -> rollout -> reward -> advantage -> datum -> forward_backward -> optim_step -> publish weights

The same text runs at every scale, because each stage is called through a protocol. Knows no model, engine or file.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.algo.advantages.anchor_keys import KeysFn, default_keys
from headrace.algo.advantages.credit import CreditedBatch, CreditMethod, credit
from headrace.algo.datum import SequenceUnit
from headrace.algo.loss_signature import LossFn, loss_inputs
from headrace.algo.losses import find_loss
from headrace.algo.staleness import drop_older_tokens
from headrace.algo.staleness_metrics import lag_metrics, staleness_metrics
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.credit_health import CreditHealth, SignalWatch
from headrace.loops.credit_log import log_credit
from headrace.loops.critic import Critic
from headrace.loops.episode_metrics import StepTimer, drop_shares, episode_metrics, mismatch_metrics, source_metrics
from headrace.loops.evaluate import EvalResult
from headrace.loops.kl_limit import KlLimit
from headrace.loops.step_batch import CorrectionSettings, Score, add_loss_inputs, minibatches, step_batch
from headrace.loops.update import Updater
from headrace.metrics import Metric, merge_metrics, metric_values
from headrace.protocols import MetricSink, TrainBackend
from headrace.reward.reward_health import RewardHealth
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.types import CreditedEpisode, Group, LossSpec, Task

NO_SCORERS: Mapping[str, Score] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """The settings of the loop."""

    steps: int
    minibatches: int  # updates of a training step
    loss: LossSpec
    credit: CreditMethod = "grpo"
    credit_params: Mapping[str, float | str] = field(default_factory=dict)
    keys: KeysFn = default_keys  # anchor states, for step-level credit
    rows: SequenceUnit = SequenceUnit.EPISODE
    mixed_versions: bool = False  # a group may mix policy versions
    weighting: str = "token_mean"
    weighting_constant: float = 1.0  # the length that weighting "constant" divides by
    correction: CorrectionSettings | None = None  # None: only if the loss takes one
    sync_every: int = 1  # training steps between two publications of the weights
    eval_every: int = 0  # training steps; 0: only after the last
    source_of: Callable[[Task], str] | None = None  # names the source of a task, if there are several


async def train_rl(
    c: RlSettings,
    *,
    executor: RolloutExecutor,
    backend: TrainBackend,
    updater: Updater,
    sink: MetricSink,
    checkpointer: Checkpointer,
    record: Callable[[int, Sequence[Group], Sequence[CreditedEpisode]], None],
    scorers: Mapping[str, Score] = NO_SCORERS,
    critic: Critic | None = None,
    kl_limit: KlLimit | None = None,
    utilization: SamplerUtilization | None = None,
    signal: SignalWatch | None = None,
    evaluate: Callable[[int], Awaitable[EvalResult]] | None = None,
    start: int = 0,
) -> dict[str, float]:
    """Train from step `start` to the end and return the last step's metrics; raises Interrupted on a stop request, and
    NoSignalError, after a checkpoint, when `signal` finds that advantages have been 0 for too long.

    `scorers` compute, by name, the arrays that the loss takes and rollouts do not bring. A critic gives the advantages
    instead of `c.credit`. `kl_limit` may skip the rest of a step's minibatches. `utilization` is the executor's.
    """
    values: dict[str, float] = {}
    loss_fn = find_loss(c.loss.fn)
    signal = signal if signal is not None and learns_from_credit(loss_fn) else SignalWatch(limit=0)
    health, reward_health = CreditHealth(method=c.credit, mixed_versions=c.mixed_versions), RewardHealth()
    async with executor:
        for step in range(start, c.steps):
            timer = StepTimer()
            if utilization is not None:
                utilization.lap()
            taking = executor.take_batch()  # task -> rollout -> reward
            groups = await (checkpointer.run_or_stop(taking) if step % c.sync_every == 0 else taking)
            timer.lap("rollout")
            credited: CreditedBatch | None = None
            if critic is None:  # reward -> advantage -> datum
                credited = credit(groups, method=c.credit, params=c.credit_params, keys=c.keys)
                batch = step_batch(credited, c.rows)
            else:
                batch = await critic.credit(groups)
            log_credit(groups, batch.episodes)
            record(step, groups, batch.episodes)  # before the health checks, so that rejected batches can be inspected
            health.check(groups, credited)
            reward_health.check(groups)
            signal_metrics = signal.check(groups, batch.episodes)
            batch = replace(batch, data=drop_older_tokens(batch.data, oldest=executor.oldest))
            batch = await add_loss_inputs(batch, loss_fn, scorers, correction=c.correction, version=executor.version)
            fresh = [e.scored for e in batch.episodes if e.group_id in executor.training]  # without replayed groups
            metrics = merge_metrics({**batch.metrics, **signal_metrics}, episode_metrics(fresh))
            if c.source_of is not None:
                metrics = merge_metrics(metrics, source_metrics(fresh, c.source_of))
            metrics = merge_metrics(metrics, lag_metrics(batch.data, version=executor.version))
            parts = minibatches(batch, c.minibatches, loss_fn, weighting=c.weighting, constant=c.weighting_constant)
            for part, data in enumerate(parts):
                loss = c.loss if kl_limit is None else kl_limit.loss(c.loss)
                updated = await updater.update(step, data, loss)  # datum -> loss -> optimiser
                metrics = merge_metrics(metrics, updated.metrics)
                stale = staleness_metrics(data, updated.forward.logprobs, version=executor.version)
                metrics = merge_metrics(metrics, stale)
                if part == 0 and step % c.sync_every == 0:
                    mismatch = mismatch_metrics(data, updated.forward.logprobs, version=executor.version)
                    metrics = merge_metrics(metrics, mismatch)
                if kl_limit is not None:
                    checked = await kl_limit.after_update(step, data, left=len(parts) - part - 1)
                    metrics = merge_metrics(metrics, checked.metrics)
                    if checked.stop:
                        break
            if kl_limit is not None:
                metrics = merge_metrics(metrics, kl_limit.end_step())
            if critic is not None:
                metrics = merge_metrics(metrics, await critic.update(step, batch))
            executor.done(groups)
            timer.lap("train")
            published = (step + 1) % c.sync_every == 0 or step + 1 == c.steps
            if published:
                await executor.publish(await asyncio.wrap_future(backend.export_weights()))  # -> version + 1
            timer.lap("publish")
            counts = executor.metrics()
            values = metric_values(metrics) | counts | drop_shares(counts) | timer.values()
            shares = {} if utilization is None else utilization.lap()
            sink.log(step + 1, values | shares | _rates(metrics, timer, shares))
            if not published:
                continue  # the sampler's weights are not the trainer's: neither evaluate nor checkpoint
            score = None
            if evaluate is not None and (step + 1 == c.steps or (c.eval_every and (step + 1) % c.eval_every == 0)):
                score = await checkpointer.evaluate_or_save(step + 1, evaluate(step + 1))
            await checkpointer.end_of_step(step + 1, score)
            if (error := signal.error()) is not None:
                await checkpointer.save_now()
                raise error
    return values


def learns_from_credit(fn: LossFn) -> bool:
    """Tell whether a loss learns nothing where all advantages are 0: it takes them, and no teacher's log-probs."""
    inputs = loss_inputs(fn)
    arrays = (*inputs.required, *inputs.optional)
    return "advantages" in arrays and "teacher_logprobs" not in arrays


def _rates(metrics: Mapping[str, Metric], timer: StepTimer, utilization: Mapping[str, float]) -> dict[str, float]:
    """Compute tokens per second, sampled (while a group was running) and trained, and the share of the step in which
    the trainer waited for a batch."""
    sampled, computed = metrics["rollout/sampled_tokens"].value(), metrics["train/computed_tokens"].value()
    step_s, waited_s = timer.values()["time/step_s"], timer.parts["time/rollout_s"]
    sampling_s = (1.0 - utilization["perf/sampler_idle"]) * step_s if utilization else waited_s
    return {
        "perf/sampled_tokens_per_s": sampled / max(sampling_s, 1e-9),
        "perf/trained_tokens_per_s": computed / max(timer.parts["time/train_s"], 1e-9),
        "perf/trainer_idle": waited_s / max(step_s, 1e-9),
    }
