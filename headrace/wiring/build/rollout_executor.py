"""Build the executor that plays groups from [rl] and [rl.async]."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.config import AsyncConfig, RlConfig
from headrace.data.task_source import TaskSource
from headrace.reward.reward_runner import PartNames
from headrace.rollout.executor import AsyncSettings, RolloutExecutor, StaleAction, build_executor
from headrace.rollout.executor.selection import SCORES, GroupSelection, TakeBest, TakeFirst
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.filters import FILTERS, Filter, named_filter
from headrace.rollout.publisher import Interrupt
from headrace.user_code import load_function
from headrace.wiring.build.episodes import train_player
from headrace.wiring.build.rewards import make_reward_runner, make_truncation
from headrace.wiring.stage_context import StageContext


def make_executor(
    c: RlConfig,
    seed: int,
    context: StageContext,
    source: TaskSource,
    utilization: SamplerUtilization,
    part_names: PartNames,
) -> RolloutExecutor:
    """Build the executor of the [rl] stage."""
    cluster = context.cluster
    reward_runner = None if cluster is None else cluster.reward_runner
    player = train_player(
        c,
        seed,
        context.sampler,
        context.renderer,
        reward_runner or make_reward_runner(context.terms, c, make_truncation(c), part_names),
        context.programs,
    )
    return build_executor(
        make_settings(c.asynchronous),
        batch_groups=c.groups,
        samplers=[context.sampler],
        player=player,
        source=source,
        filters=make_filters(c),
        selection=make_selection(c.asynchronous),
        utilization=utilization,
        play=(lambda player: player) if cluster is None else cluster.play,
    )


def make_settings(c: AsyncConfig) -> AsyncSettings:
    """Convert [rl.async]. Next-version log-probs are of use from a lag of 2 on: up to a lag of 1, the weights at the
    start of the step are those of the next version."""
    return AsyncSettings(
        max_staleness=c.max_staleness,
        max_running=c.max_running,
        stale_action=StaleAction(c.stale_action),
        interrupt=Interrupt(c.interrupt),
        oversampling=c.oversampling,
        replay_groups=c.replay_groups,
        next_logprobs=c.behaviour_weight == "one_step" and c.max_staleness >= 2,
        drain_s=c.drain_s,
        slow_wait_s=c.slow_wait_s,
        task_timeout_s=c.task_timeout_s,
        max_consecutive_drops=c.max_consecutive_drops,
        lockstep_tokens=c.lockstep_tokens,
    )


def make_selection(c: AsyncConfig) -> GroupSelection:
    """Build the rule that chooses a batch among more groups than it needs."""
    if c.select == "first":
        return TakeFirst()
    return TakeBest(SCORES[c.select_score] if c.select_score in SCORES else load_function(c.select_score))


def make_filters(c: RlConfig) -> list[Filter]:
    """Build the filters of [[rl.filters]], in their order."""
    return [_make_filter(filter.fn, filter.options) for filter in c.filters]


def _make_filter(name: str, options: Mapping[str, Any]) -> Filter:
    if name in FILTERS:
        return named_filter(name, options)
    fn = load_function(name)
    return partial(fn, **options) if options else fn
