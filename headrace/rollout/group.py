"""Play one group: several episodes of a task from identical starts, run concurrently and scored together."""

import asyncio
import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

from headrace.algo.random import derive_seed
from headrace.errors import EpisodeError, HeadraceError, Interrupted, boundary
from headrace.process.watchdog import watching
from headrace.protocols import Env, RewardRunner, Sampler
from headrace.render import Renderer
from headrace.rollout.episode import EndRules, run_episode, run_sampled_episode, time_limit
from headrace.rollout.episode_log import log_episode
from headrace.rollout.partial_rollout import PartialEpisode, PartialRollouts, ResumableSampler
from headrace.rollout.policies import Chat, RemotePolicy
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    FloatArray,
    Group,
    IntArray,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    Task,
)

logger = logging.getLogger(__name__)

# (task, sampler, renderer, seed); a plain function gets a BlockingSampler, an async one a ResumableSampler
GenerateFn = Callable[[Task, Any, Renderer, int], Episode | Awaitable[Episode]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvByTask:
    """Chooses the function that makes the environment of a task, where tasks are from several sources."""

    choose: Callable[[Task], Callable[[], Env]]


MakeEnv = Callable[[], Env] | EnvByTask


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlayer:
    """Play groups of episodes with a sampler and score them: `group = await player(task, group_id)`.

    All episodes of a group share the environment's seed and each samples with its own; both follow from
    (run_seed, group_id). Episode i has the id "<group_id>/<i>". Episodes that fail are in the group's `failed`.
    """

    group_size: int
    make_env: MakeEnv
    sampler: Sampler
    renderer: Renderer
    reward_runner: RewardRunner
    sampling: SamplingParams
    max_turns: int = 16
    max_episode_tokens: int = 1024  # the prompt included
    timeout_s: float = 600.0  # of one episode
    run_seed: int = 0
    end_tool: str | None = None  # a call of this tool ends the episode (`EndRules`)
    end_pattern: re.Pattern[str] | None = None  # a turn in which this is found ends the episode
    threads: Executor | None = None  # where environments that block run
    generate_fn: GenerateFn | None = None  # a user's function, async or plain, in place of `run_sampled_episode`
    partial_rollouts: PartialRollouts | None = None  # records running episodes; a restored group continues from it

    def __post_init__(self) -> None:
        assert self.group_size > 0

    async def __call__(self, task: Task, group_id: int) -> Group:
        """Play one group of the task and score it."""
        started_version = self.sampler.version
        ended = await self.play_episodes(task, group_id)
        return await score_group(task, group_id, ended, self.reward_runner, started_version)

    async def play_episodes(self, task: Task, group_id: int) -> list[Episode | FailedEpisode]:
        """Play the episodes of a group and leave them unscored."""
        if self.partial_rollouts is None:
            partial_episodes: Sequence[PartialEpisode] = [PartialEpisode() for _ in range(self.group_size)]
        else:
            partial_episodes = self.partial_rollouts.open(group_id, self.group_size)
        return await _gather(
            self._run_or_resume(task, group_id, index, partial_episode)
            for index, partial_episode in enumerate(partial_episodes)
        )

    async def _run_or_resume(
        self, task: Task, group_id: int, index: int, partial_episode: PartialEpisode
    ) -> Episode | FailedEpisode:
        """Return a restored result, or run the episode from where `partial_episode` stands."""
        if partial_episode.result is not None:
            return partial_episode.result
        return partial_episode.ended_with(await self._run(task, group_id, index, partial_episode))

    async def _run(
        self, task: Task, group_id: int, index: int, partial_episode: PartialEpisode
    ) -> Episode | FailedEpisode:
        id = f"{group_id}/{index}"
        seed = derive_seed(self.run_seed, "episode", group_id, index)
        if self.generate_fn is not None:
            sampler = ResumableSampler(self.sampler, partial_episode)
            return await _generate(self.generate_fn, id, task, sampler, self.renderer, seed, self.timeout_s)
        env = make_env_or_fail(self.make_env, id, task)
        if isinstance(env, FailedEpisode):
            return env
        return await run_sampled_episode(
            id=id,
            task=task,
            env=env,
            sampler=self.sampler,
            renderer=self.renderer,
            sampling=self.sampling,
            seed=seed,
            env_seed=derive_seed(self.run_seed, "environment", group_id),
            max_turns=self.max_turns,
            max_episode_tokens=self.max_episode_tokens,
            timeout_s=self.timeout_s,
            end_tool=self.end_tool,
            end_pattern=self.end_pattern,
            partial_episode=partial_episode,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGroupPlayer:
    """Play groups as `GroupPlayer` does, with a remote chat model. Its episodes have no tokens to train."""

    group_size: int
    make_env: Callable[[], Env]
    chat: Chat
    reward_runner: RewardRunner
    temperature: float
    max_turns: int
    timeout_s: float  # of one episode
    run_seed: int
    end_tool: str | None = None
    end_pattern: re.Pattern[str] | None = None
    threads: Executor | None = None

    def __post_init__(self) -> None:
        assert self.group_size > 0

    async def __call__(self, task: Task, group_id: int) -> Group:
        """Play one group of the task and score it."""
        ended = await _gather(self._run(task, group_id, index) for index in range(self.group_size))
        return await score_group(task, group_id, ended, self.reward_runner, 0)

    async def _run(self, task: Task, group_id: int, index: int) -> Episode | FailedEpisode:
        id = f"{group_id}/{index}"
        seed = derive_seed(self.run_seed, "episode", group_id, index)
        env = make_env_or_fail(self.make_env, id, task)
        if isinstance(env, FailedEpisode):
            return env
        return await run_episode(
            id=id,
            task=task,
            env=env,
            policy=RemotePolicy(self.chat, seed=seed),
            temperature=self.temperature,
            seed=seed,
            env_seed=derive_seed(self.run_seed, "environment", group_id),
            rules=EndRules(max_turns=self.max_turns, tool=self.end_tool, pattern=self.end_pattern),
            timeout_s=self.timeout_s,
            threads=self.threads,
        )


def make_env_or_fail(make_env: MakeEnv, id: str, task: Task) -> Env | FailedEpisode:
    """Make the environment of episode `id`; return a FailedEpisode if that raises."""
    try:
        with boundary(EpisodeError, f"task {task.id}: its environment cannot be made"):
            return (make_env.choose(task) if isinstance(make_env, EnvByTask) else make_env)()
    except EpisodeError as exc:
        same = {"repeats": f"an episode failed: {str(exc).replace(f'task {task.id}', 'task')}"}
        logger.warning("episode %s failed: %s", id, exc, extra=same)
        return FailedEpisode(id=id, task=task, reason=str(exc))


async def score_group(
    task: Task,
    group_id: int,
    ended: Sequence[Episode | FailedEpisode],
    reward_runner: RewardRunner,
    started_version: int,
) -> Group:
    """Reject episodes that started differently, log and score the others, and build the group."""
    accepted = reject_different_starts(ended)
    for before, after in zip(ended, accepted, strict=True):
        if isinstance(after, FailedEpisode) and after is not before:
            logger.warning("episode %s failed: %s", after.id, after.reason)
    episodes = [episode for episode in accepted if isinstance(episode, Episode)]
    for episode in episodes:
        log_episode(episode)
    with watching(f"the rewards of group {group_id}", has_deadline=True):
        scored = await reward_runner.score(episodes) if episodes else ()
    assert len(scored) == len(episodes)
    return Group(
        id=group_id,
        task=task,
        episodes=tuple(episode for episode in scored if isinstance(episode, ScoredEpisode)),
        failed=tuple(episode for episode in (*accepted, *scored) if isinstance(episode, FailedEpisode)),
        started_version=started_version,
    )


def reject_different_starts(ended: Sequence[Episode | FailedEpisode]) -> tuple[Episode | FailedEpisode, ...]:
    """Turn every episode into a failed one whose first observation differs from the first episode's."""
    expected = next((start_hash(episode) for episode in ended if isinstance(episode, Episode)), None)
    return tuple(
        FailedEpisode(
            id=episode.id,
            task=episode.task,
            reason=f"task {episode.task.id}: the episodes of a group must start alike, but this one's first "
            "observation differs: make the environment's reset depend on the task and the seed alone",
        )
        if isinstance(episode, Episode) and start_hash(episode) != expected
        else episode
        for episode in ended
    )


async def _gather(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return all results in order. When one raises or the caller is cancelled, cancel the others and wait for them."""
    running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def start_hash(episode: Episode) -> str:
    """Hash an episode's start: its first state, pictures and prompt tokens, which contain messages and tools.

    An episode without tokens, played by a remote model, is hashed by its messages before the first reply.
    """
    first = episode.steps[0]
    opening = tuple(takewhile(lambda message: message.role != "assistant", episode.messages))
    content = first.prompt.tobytes() if len(first.prompt) else repr(opening).encode()
    content += b"".join(placed.image.digest.encode() for placed in first.images)
    return hashlib.blake2b(repr(first.state).encode() + b"\0" + content, digest_size=16).hexdigest()


# --- a user's own rollout --------------------------------------------------------------------------------------------


class BlockingSampler:
    """Sample without `await`, for plain functions, which run on a thread of their own."""

    def __init__(self, sampler: ResumableSampler, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> None:
        self._sampler, self._loop, self._timeout_s = sampler, loop, timeout_s

    @property
    def version(self) -> int:
        return self._sampler.version

    def sample(self, request: SampleRequest) -> Completion:
        """Sample one sequence to its end, across weight updates."""
        return self._wait(self._sampler.sample(request))

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        """Return the log-probs of every sequence's tokens."""
        return self._wait(self._sampler.score(sequences, temperature))

    def _wait(self, call: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=self._timeout_s)


async def _generate(
    generate_fn: GenerateFn,
    id: str,
    task: Task,
    sampler: ResumableSampler,
    renderer: Renderer,
    seed: int,
    timeout_s: float,
) -> Episode | FailedEpisode:
    """Call the user's function. Its episode gets our id and seed; a failure becomes a FailedEpisode."""
    try:
        with boundary(EpisodeError, f"task {task.id}: generate_fn failed"):
            async with time_limit(timeout_s, f"task {task.id}: generate_fn"):
                if inspect.iscoroutinefunction(generate_fn):
                    episode = await generate_fn(task, sampler, renderer, seed)
                else:
                    blocking = BlockingSampler(sampler, asyncio.get_running_loop(), timeout_s=timeout_s)
                    episode = await asyncio.to_thread(generate_fn, task, blocking, renderer, seed)
        if not isinstance(episode, Episode) or not episode.steps:
            raise EpisodeError(
                f"task {task.id}: generate_fn returned a {type(episode).__name__} with nothing sampled: "
                "return an Episode with at least one step"
            )
        return replace(episode, id=id, seed=seed)
    except Interrupted:
        raise
    except HeadraceError as exc:
        same = {"repeats": f"an episode failed: {str(exc).replace(f'task {task.id}', 'task')}"}
        logger.warning("episode %s failed: %s", id, exc, extra=same)
        return FailedEpisode(id=id, task=task, reason=str(exc))
