"""How episodes are played: sampling parameters, and the rules of a held-out group."""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from headrace.config import Config, Rl, Sampling
from headrace.protocols import Env, Sampler
from headrace.render import Renderer
from headrace.reward.terms import GroupTerm, Term
from headrace.rollout.group import play_group
from headrace.types import Group, SamplingParams, Task
from headrace.wiring.programs import AgentEndpoint
from headrace.wiring.rewards import make_reward_runner
from headrace.wiring.sources import make_env_of

Play = Callable[[Task, int], Awaitable[Group]]


def play_held_out(
    config: Config,
    sampler: Sampler,
    renderer: Renderer,
    terms: Sequence[Term | GroupTerm],
    programs: AgentEndpoint,
    *,
    make_env: Callable[[], Env] | None = None,
) -> Play:
    """Held-out tasks are played by the rules of [rl] (its defaults when there is none), at [eval]'s temperature; in
    their own world unless another is passed."""
    source = config.eval.source
    assert source is not None
    rl = config.rl or Rl(steps=1, tasks=source)
    sampling = make_sampling(rl.sampling, config.eval.temperature)
    return partial(
        play_group,
        group_size=config.eval.samples,
        make_env=make_env or make_env_of(source),
        sampler=sampler,
        renderer=renderer,
        reward_runner=make_reward_runner(terms, rl),
        sampling=sampling,
        max_turns=rl.max_turns,
        max_episode_tokens=rl.max_episode_tokens,
        timeout_s=rl.asynchronous.task_timeout_s,
        run_seed=config.eval.seed,
        **ending(rl),
        threads=programs.threads(rl.env_threads),
        generate_fn=programs.generate_fn(rl, sampling),
    )


def ending(c: Rl) -> dict[str, Any]:
    """What ends an episode besides its world and the limits, as `play_group` takes it."""
    return {"end_tool": c.end_tool, "end_pattern": None if c.end_pattern is None else re.compile(c.end_pattern)}


def make_sampling(c: Sampling, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=c.max_tokens,
        temperature=temperature,
        top_p=c.top_p,
        top_k=c.top_k,
        min_p=c.min_p,
        stop_strings=c.stop_strings,
    )
