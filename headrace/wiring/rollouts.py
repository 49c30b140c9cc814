"""[rl] and [rl.async] to the executor that plays its groups."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.config import Async, Rl
from headrace.rollout.build import build_executor
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.filters import FILTERS, Filter, named_filter
from headrace.rollout.group import play_group
from headrace.rollout.keep import SCORES, Keep, KeepBest, KeepFirst
from headrace.rollout.load_function import load_function
from headrace.rollout.meter import Meter
from headrace.rollout.settings import AsyncSettings, Interrupt, StaleAction
from headrace.rollout.tasks import TaskSource
from headrace.wiring.desk import StageContext
from headrace.wiring.play import ending, make_sampling
from headrace.wiring.rewards import make_reward_runner, make_truncation
from headrace.wiring.sources import make_env_of


def make_executor(c: Rl, seed: int, desk: StageContext, source: TaskSource, meter: Meter) -> RolloutExecutor:
    play = partial(
        play_group,
        group_size=c.group_size,
        make_env=make_env_of(c.tasks),
        sampler=desk.sampler,
        renderer=desk.renderer,
        reward_runner=make_reward_runner(desk.terms, c, make_truncation(c)),
        sampling=make_sampling(c.sampling, c.sampling.temperature),
        max_turns=c.max_turns,
        max_episode_tokens=c.max_episode_tokens,
        timeout_s=c.asynchronous.task_timeout_s,
        run_seed=seed,
        **ending(c),
        threads=desk.programs.threads(c.env_threads),
        generate_fn=desk.programs.generate_fn(c, make_sampling(c.sampling, c.sampling.temperature)),
    )
    return build_executor(
        make_settings(c.asynchronous),
        batch_groups=c.groups,
        samplers=[desk.sampler],
        play=play,
        source=source,
        filters=make_filters(c),
        keep=make_keep(c.asynchronous),
        around=meter.around,
    )


def make_settings(c: Async) -> AsyncSettings:
    """Next-version log-probs are of use from a lag of 2 on: up to 1, the weights at the start of the step are them."""
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


def make_keep(c: Async) -> Keep:
    if c.keep == "first":
        return KeepFirst()
    return KeepBest(SCORES[c.score] if c.score in SCORES else load_function(c.score))


def make_filters(c: Rl) -> list[Filter]:
    return [_filter(each.fn, each.options) for each in c.filters]


def _filter(name: str, options: Mapping[str, Any]) -> Filter:
    if name in FILTERS:
        return named_filter(name, options)
    fn = load_function(name)
    return partial(fn, **options) if options else fn
