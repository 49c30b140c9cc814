"""One group: several episodes of a task from identical starts, played at once and scored together."""

import asyncio
import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from headrace.algo.random import derive_seed
from headrace.errors import EpisodeError, HeadraceError, Interrupted, boundary
from headrace.protocols import Env, RewardRunner, Sampler
from headrace.render import Renderer
from headrace.rollout.episode import EndRules, play_episode, run_episode, time_limit
from headrace.rollout.journal import EpisodeJournal, Journals, JournalSampler
from headrace.rollout.policies import Chat, RemotePolicy
from headrace.rollout.tell import tell_episode
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

# (task, sampler, renderer, seed); a plain function gets a BlockingSampler, an async one the Sampler itself
GenerateFn = Callable[[Task, Any, Renderer, int], Episode | Awaitable[Episode]]
T = TypeVar("T")


async def play_group(
    task: Task,
    group_id: int,
    *,
    group_size: int,
    make_env: Callable[[], Env],
    sampler: Sampler,
    renderer: Renderer,
    reward_runner: RewardRunner,
    sampling: SamplingParams,
    max_turns: int,
    max_episode_tokens: int,
    timeout_s: float,
    run_seed: int,
    end_tool: str | None = None,
    end_pattern: re.Pattern[str] | None = None,
    threads: Executor | None = None,
    generate_fn: GenerateFn | None = None,
    journals: Journals | None = None,
) -> Group:
    """Play `group_size` episodes and score them; what could not be played or scored is in `failed`.

    All episodes share the environment's seed and each samples with its own; both follow from (run_seed, group_id).
    Episode i has the id "<group_id>/<i>". A user's `generate_fn`, async or plain, takes the place of `run_episode`.
    A group that `journals` knows goes on from there. `end_tool`, `end_pattern` and `threads` are as in `run_episode`.
    """
    assert group_size > 0
    started_version = sampler.version
    kept = [EpisodeJournal() for _ in range(group_size)] if journals is None else journals.open(group_id, group_size)

    async def play_kept(index: int) -> Episode | FailedEpisode:
        journal = kept[index]
        return journal.result if journal.result is not None else journal.ended_with(await play(index, journal))

    async def play(index: int, journal: EpisodeJournal) -> Episode | FailedEpisode:
        id = f"{group_id}/{index}"
        seed = derive_seed(run_seed, "episode", group_id, index)
        if generate_fn is not None:
            through = JournalSampler(sampler, journal)
            return await _generate(generate_fn, id, task, through, renderer, seed, timeout_s)
        env = _made(make_env, id, task)
        if isinstance(env, FailedEpisode):
            return env
        return await run_episode(
            id=id,
            task=task,
            env=env,
            sampler=sampler,
            renderer=renderer,
            sampling=sampling,
            seed=seed,
            env_seed=derive_seed(run_seed, "environment", group_id),
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            timeout_s=timeout_s,
            end_tool=end_tool,
            end_pattern=end_pattern,
            journal=journal,
            threads=threads,
        )

    played = await _gather(play_kept(index) for index in range(group_size))
    return await _scored(task, group_id, played, reward_runner, started_version)


async def play_group_remotely(
    task: Task,
    group_id: int,
    *,
    group_size: int,
    make_env: Callable[[], Env],
    chat: Chat,
    reward_runner: RewardRunner,
    temperature: float,
    max_turns: int,
    timeout_s: float,
    run_seed: int,
    end_tool: str | None = None,
    end_pattern: re.Pattern[str] | None = None,
    threads: Executor | None = None,
) -> Group:
    """As `play_group`, played by a model elsewhere. Its episodes have no tokens: they cannot be trained on."""
    assert group_size > 0

    async def play(index: int) -> Episode | FailedEpisode:
        id = f"{group_id}/{index}"
        seed = derive_seed(run_seed, "episode", group_id, index)
        env = _made(make_env, id, task)
        if isinstance(env, FailedEpisode):
            return env
        return await play_episode(
            id=id,
            task=task,
            env=env,
            policy=RemotePolicy(chat, seed=seed),
            temperature=temperature,
            seed=seed,
            env_seed=derive_seed(run_seed, "environment", group_id),
            rules=EndRules(max_turns=max_turns, tool=end_tool, pattern=end_pattern),
            timeout_s=timeout_s,
            threads=threads,
        )

    played = await _gather(play(index) for index in range(group_size))
    return await _scored(task, group_id, played, reward_runner, 0)


def _made(make_env: Callable[[], Env], id: str, task: Task) -> Env | FailedEpisode:
    try:
        with boundary(EpisodeError, f"task {task.id}: its environment cannot be made"):
            return make_env()
    except EpisodeError as exc:
        logger.warning("episode %s failed: %s", id, exc)
        return FailedEpisode(id=id, task=task, reason=str(exc))


async def _scored(
    task: Task,
    group_id: int,
    ended: Sequence[Episode | FailedEpisode],
    reward_runner: RewardRunner,
    started_version: int,
) -> Group:
    played = same_start(ended)
    for before, episode in zip(ended, played, strict=True):
        if isinstance(episode, FailedEpisode) and episode is not before:
            logger.warning("episode %s failed: %s", episode.id, episode.reason)
    episodes = [episode for episode in played if isinstance(episode, Episode)]
    for episode in episodes:
        tell_episode(episode)
    scored = await reward_runner.score(episodes) if episodes else ()
    assert len(scored) == len(episodes)
    return Group(
        id=group_id,
        task=task,
        episodes=tuple(item for item in scored if isinstance(item, ScoredEpisode)),
        failed=tuple(item for item in (*played, *scored) if isinstance(item, FailedEpisode)),
        started_version=started_version,
    )


def same_start(played: Sequence[Episode | FailedEpisode]) -> tuple[Episode | FailedEpisode, ...]:
    """Episodes whose first observation hashes otherwise than that of the first one played become failed."""
    first = next((start_hash(episode) for episode in played if isinstance(episode, Episode)), None)
    return tuple(
        FailedEpisode(
            id=episode.id,
            task=episode.task,
            reason=f"task {episode.task.id}: the episodes of a group must start alike, but this one's first "
            "observation differs: make the environment's reset depend on the task and the seed alone",
        )
        if isinstance(episode, Episode) and start_hash(episode) != first
        else episode
        for episode in played
    )


async def _gather(plays: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """All results in order; when one raises, or the caller is cancelled, the others are cancelled and waited for."""
    running = [asyncio.ensure_future(play) for play in plays]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for play in running:
            play.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def start_hash(episode: Episode) -> str:
    """Of what an episode began with: its state, and the tokens of its first prompt, which have messages and tools in
    them; where a model elsewhere played, the messages before its first."""
    first = episode.steps[0]
    opening = tuple(takewhile(lambda message: message.role != "assistant", episode.messages))
    shown = first.prompt.tobytes() if len(first.prompt) else repr(opening).encode()
    return hashlib.blake2b(repr(first.state).encode() + b"\0" + shown, digest_size=16).hexdigest()


# --- a user's own rollout --------------------------------------------------------------------------------------------


class BlockingSampler:
    """A sampler for plain functions, which run on a thread of their own: the same verbs, without `await`."""

    def __init__(self, sampler: JournalSampler, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> None:
        self._sampler, self._loop, self._timeout_s = sampler, loop, timeout_s

    @property
    def version(self) -> int:
        return self._sampler.version

    def sample(self, request: SampleRequest) -> Completion:
        """One sequence to its end, across weight updates."""
        return self._wait(self._sampler.sample(request))

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return self._wait(self._sampler.score(sequences, temperature))

    def _wait(self, call: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=self._timeout_s)


async def _generate(
    generate_fn: GenerateFn,
    id: str,
    task: Task,
    sampler: JournalSampler,
    renderer: Renderer,
    seed: int,
    timeout_s: float,
) -> Episode | FailedEpisode:
    """Call the user's function; its episode gets our id and seed, its failure becomes a value."""
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
        logger.warning("episode %s failed: %s", id, exc)
        return FailedEpisode(id=id, task=task, reason=str(exc))
