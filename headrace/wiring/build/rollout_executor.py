"""Build the executor that plays groups from [rl] and [rl.async]."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.algo.random import derive_seed
from headrace.algo.staleness import LiveCounts
from headrace.config import AsyncConfig, RlConfig, SourceConfig
from headrace.data.curriculum import Curriculum
from headrace.data.task_mixture import TaskMixture
from headrace.data.task_source import TaskSource
from headrace.reward.reward_runner import PartNames
from headrace.rollout.executor import AsyncSettings, ExecutorParts, RolloutExecutor, StaleAction, build_executor
from headrace.rollout.executor.admission import Limit
from headrace.rollout.executor.selection import SCORES, GroupSelection, TakeBest, TakeFirst
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.filters import FILTERS, Filter, named_filter
from headrace.rollout.publisher import Interrupt
from headrace.types import Task
from headrace.user_code import check_arguments, load_function
from headrace.wiring.build.episodes import train_player
from headrace.wiring.build.rewards import make_reward_runner, make_truncation
from headrace.wiring.stage_context import StageContext

Tasks = TaskSource | Curriculum | TaskMixture


def make_task_source(c: RlConfig, tasks: Sequence[Sequence[Task]], seed: int) -> Tasks:
    """Build what draws the tasks of [rl], which are those of each source in turn."""
    if len(tasks) == 1:
        return _make_part(c.tasks[0], tasks[0], seed)
    parts = [
        (_make_part(source, part, derive_seed(seed, "tasks", number)), source.weight)
        for number, (source, part) in enumerate(zip(c.tasks, tasks, strict=True))
    ]
    return TaskMixture(parts)


def _make_part(source: SourceConfig, tasks: Sequence[Task], seed: int) -> TaskSource | Curriculum:
    return TaskSource(tasks, seed) if source.curriculum is None else Curriculum(tasks, seed)


def make_executor(
    c: RlConfig,
    seed: int,
    context: StageContext,
    source: Tasks,
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
        outcomes=None if isinstance(source, TaskSource) else source,
        play=(lambda player: player) if cluster is None else cluster.play,
        turns=context.runtime.turns,
        parts=ExecutorParts(limits=make_limits(c.asynchronous)),
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


def make_limits(c: AsyncConfig) -> tuple[Limit, ...]:
    """Load the limits of `rl.async.limits`, each of which is called as limit(counts)."""
    return tuple(_make_limit(spec) for spec in c.limits)


def _make_limit(spec: str) -> Limit:
    fn = load_function(spec)
    check_arguments(fn, 1, f"'rl.async.limits': {spec}", "counts")

    def limit(counts: LiveCounts) -> int:
        allowed: int = fn(counts)
        return allowed

    limit.__name__ = spec
    return limit


def make_filters(c: RlConfig) -> list[Filter]:
    """Build the filters of [[rl.filters]], in their order."""
    return [_make_filter(filter.fn, filter.options) for filter in c.filters]


def _make_filter(name: str, options: Mapping[str, Any]) -> Filter:
    if name in FILTERS:
        return named_filter(name, options)
    fn = load_function(name)
    return partial(fn, **options) if options else fn
