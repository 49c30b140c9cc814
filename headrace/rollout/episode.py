"""One episode: a policy and an environment take turns, and every token the engine saw or sampled is kept as it was.

Text goes to the environment and back; tokens only ever grow. Where the chat template cannot extend the tokens so far,
the next turn starts from a prompt of its own. An episode that cannot be played is a value, `FailedEpisode`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import EpisodeError, HeadraceError, Interrupted, boundary
from headrace.protocols import Env, Sampler
from headrace.render import Renderer
from headrace.rollout.journal import EpisodeJournal
from headrace.types import (
    Episode,
    FailedEpisode,
    IntArray,
    Message,
    SampleRequest,
    SamplingParams,
    Step,
    Stop,
    Task,
    int_array,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
T = TypeVar("T")


async def run_episode(
    *,
    id: str,
    task: Task,
    env: Env,
    sampler: Sampler,
    renderer: Renderer,
    sampling: SamplingParams,
    seed: int,
    env_seed: int,
    max_turns: int,
    max_episode_tokens: int,
    timeout_s: float,
    journal: EpisodeJournal | None = None,
) -> Episode | FailedEpisode:
    """Play one task to its end: the environment's, or a limit's (`truncated`). The environment is closed in any case.

    Turn i samples with the seed derive_seed(seed, i). An environment with a true attribute `blocking` runs off the
    event loop. Turns that the journal has on record are played back in place of being sampled. What goes wrong comes
    back as a FailedEpisode with one sentence.
    """
    assert max_turns > 0
    journal = journal or EpisodeJournal()
    journal.replayable = bool(getattr(env, "deterministic", False))
    try:
        with boundary(EpisodeError, f"task {task.id}"):
            async with time_limit(timeout_s, f"task {task.id}"):
                return await _play(
                    id=id,
                    task=task,
                    env=env,
                    sampler=sampler,
                    renderer=renderer,
                    sampling=sampling,
                    seed=seed,
                    env_seed=env_seed,
                    max_turns=max_turns,
                    max_episode_tokens=max_episode_tokens,
                    journal=journal,
                )
    except Interrupted:
        raise
    except HeadraceError as exc:
        logger.warning("episode %s failed: %s", id, exc)
        return FailedEpisode(id=id, task=task, reason=str(exc))
    finally:
        await _close(env, task)


@asynccontextmanager
async def time_limit(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raises EpisodeError when the body takes longer; a TimeoutError of the body's own passes through."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise EpisodeError(f"{what}: not finished within {timeout_s:g} s; raise task_timeout_s or shorten it") from exc


async def _play(
    *,
    id: str,
    task: Task,
    env: Env,
    sampler: Sampler,
    renderer: Renderer,
    sampling: SamplingParams,
    seed: int,
    env_seed: int,
    max_turns: int,
    max_episode_tokens: int,
    journal: EpisodeJournal,
) -> Episode:
    observation = await _off_loop_if_blocking(env, partial(env.reset, task, env_seed))
    messages = [*task.messages, *observation.messages]
    if not messages:
        raise EpisodeError(f"task {task.id}: neither the task nor its environment has a first message")
    prompt = renderer.prompt(messages)
    if len(prompt) >= max_episode_tokens:
        raise EpisodeError(
            f"task {task.id}: the prompt has {len(prompt)} tokens and an episode may have {max_episode_tokens}; "
            "raise max_episode_tokens or leave the task out"
        )
    steps: list[Step] = []
    while True:
        room = min(sampling.max_tokens, max_episode_tokens - len(prompt))
        params = replace(sampling, max_tokens=room, seed=derive_seed(seed, len(steps)))
        completion = await journal.sample(sampler, SampleRequest(prompt=prompt, params=params))
        action = renderer.decode(completion.tokens)
        result = await _off_loop_if_blocking(env, partial(env.step, action))
        if not math.isfinite(result.reward):
            raise EpisodeError(f"task {task.id}: the environment's reward is {result.reward}: make it a finite number")
        steps.append(
            Step(
                prompt=prompt,
                completion=completion,
                action=action,
                state=observation.state,
                reward=float(result.reward),
                valid=result.valid,
            )
        )
        messages.append(Message(role="assistant", content=action))
        told, messages = messages, [*messages, *result.observation.messages]
        if result.done or result.truncated or len(steps) == max_turns:
            break
        prompt = _next_prompt(renderer, steps[-1], told, result.observation.messages)
        observation = result.observation
        if len(prompt) >= max_episode_tokens:
            break
    return Episode(
        id=id,
        task=task,
        seed=seed,
        steps=tuple(steps),
        messages=tuple(messages),
        temperature=sampling.temperature,
        truncated=not (result.done and completion.stop is Stop.STOP),
        success=result.success,
    )


def _next_prompt(renderer: Renderer, step: Step, told: Sequence[Message], new: Sequence[Message]) -> IntArray:
    """What the engine saw and sampled, extended by the new messages; a fresh prompt where the template cannot."""
    seen = int_array(np.concatenate([step.prompt, step.completion.tokens]))
    extended = renderer.continue_prompt(seen, told, new)
    return renderer.prompt([*told, *new]) if extended is None else extended


async def _off_loop_if_blocking(env: Env, call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call) if getattr(env, "blocking", False) else call()


async def _close(env: Env, task: Task) -> None:
    """An environment that cannot be closed in time is left behind with a warning; its episode stands."""
    try:
        with boundary(EpisodeError, f"task {task.id}: the environment cannot be closed"):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _off_loop_if_blocking(env, env.close)
    except EpisodeError as exc:
        logger.warning("%s", exc)
