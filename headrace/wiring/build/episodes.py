"""Build what plays episodes: sampling parameters, end rules, and the players of training and held-out groups."""

import re
from collections.abc import Awaitable, Callable, Sequence

from headrace.config import Config, DistillConfig, RlConfig, SamplingConfig, SourceConfig, TeacherConfig
from headrace.protocols import Env, RewardRunner, Sampler
from headrace.render import Renderer
from headrace.reward.terms import GroupTerm, Term
from headrace.rollout.group import GroupPlayer
from headrace.types import Episode, FailedEpisode, Group, SamplingParams, ScoredEpisode, Task
from headrace.wiring.build.agent_endpoint import AgentEndpoint
from headrace.wiring.build.data import make_env_of, make_env_of_tasks
from headrace.wiring.build.rewards import make_reward_runner

ENV_THREADS = 64  # for environments that block, in stages without a key for it
Play = Callable[[Task, int], Awaitable[Group]]


def train_player(
    c: RlConfig,
    seed: int,
    sampler: Sampler,
    renderer: Renderer,
    reward_runner: RewardRunner,
    programs: AgentEndpoint,
) -> GroupPlayer:
    """Build the player of training tasks, with the rules of [rl]."""
    sampling = make_sampling(c.sampling, c.sampling.temperature)
    return GroupPlayer(
        group_size=c.group_size,
        make_env=make_env_of_tasks(c.tasks, max_turns=c.max_turns),
        sampler=sampler,
        renderer=renderer,
        reward_runner=reward_runner,
        sampling=sampling,
        max_turns=c.max_turns,
        max_episode_tokens=c.max_episode_tokens,
        timeout_s=c.asynchronous.task_timeout_s,
        run_seed=seed,
        end_tool=c.end_tool,
        end_pattern=make_end_pattern(c),
        threads=programs.threads(c.env_threads),
        generate_fn=programs.generate_fn(c, sampling),
    )


class Unjudged:
    """Stands for the rewards of episodes that are not scored."""

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        raise AssertionError("these episodes are not scored")

    async def close(self) -> None: ...


def distill_player(
    c: DistillConfig, teacher: TeacherConfig, seed: int, sampler: Sampler, renderer: Renderer, programs: AgentEndpoint
) -> GroupPlayer:
    """Build the player of a teacher's tasks, one episode of each, without rewards."""
    return GroupPlayer(
        group_size=1,
        make_env=make_env_of(teacher.tasks, max_turns=c.max_turns),
        sampler=sampler,
        renderer=renderer,
        reward_runner=Unjudged(),
        sampling=make_sampling(c.sampling, c.sampling.temperature),
        max_turns=c.max_turns,
        max_episode_tokens=c.max_episode_tokens,
        run_seed=seed,
        threads=programs.threads(ENV_THREADS),
    )


def eval_player(
    config: Config,
    sampler: Sampler,
    renderer: Renderer,
    terms: Sequence[Term | GroupTerm],
    programs: AgentEndpoint,
    *,
    make_env: Callable[[], Env] | None = None,
) -> GroupPlayer:
    """Build the player of held-out tasks: the rules of [rl] (without it those of [distill], or the defaults), at
    [eval]'s temperature, in the source's own environment unless `make_env` is passed."""
    source = config.eval.source
    assert source is not None
    rl = config.rl or _rules_of_distillation(config.distill, source)
    sampling = make_sampling(rl.sampling, config.eval.temperature)
    return GroupPlayer(
        group_size=config.eval.samples,
        make_env=make_env or make_env_of(source, max_turns=rl.max_turns),
        sampler=sampler,
        renderer=renderer,
        reward_runner=make_reward_runner(terms, rl),
        sampling=sampling,
        max_turns=rl.max_turns,
        max_episode_tokens=rl.max_episode_tokens,
        timeout_s=rl.asynchronous.task_timeout_s,
        run_seed=config.eval.seed,
        end_tool=rl.end_tool,
        end_pattern=make_end_pattern(rl),
        threads=programs.threads(rl.env_threads),
        generate_fn=programs.generate_fn(rl, sampling),
    )


def _rules_of_distillation(c: DistillConfig | None, source: SourceConfig) -> RlConfig:
    """Return the rules of [distill] as those of [rl], or the defaults."""
    if c is None:
        return RlConfig(steps=1, tasks=(source,))
    return RlConfig(
        steps=1,
        tasks=(source,),
        max_turns=c.max_turns,
        max_prompt_tokens=c.max_prompt_tokens,
        max_episode_tokens=c.max_episode_tokens,
        sampling=c.sampling,
    )


def make_end_pattern(c: RlConfig) -> re.Pattern[str] | None:
    """Compile `rl.end_pattern`: a turn in which it is found ends the episode."""
    return None if c.end_pattern is None else re.compile(c.end_pattern)


def make_sampling(c: SamplingConfig, temperature: float) -> SamplingParams:
    """Convert [rl.sampling]."""
    return SamplingParams(
        max_tokens=c.max_tokens,
        temperature=temperature,
        top_p=c.top_p,
        top_k=c.top_k,
        min_p=c.min_p,
        stop_strings=c.stop_strings,
    )
