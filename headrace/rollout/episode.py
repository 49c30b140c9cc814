"""Run one episode: a policy and an environment take turns until the environment, a rule or a limit ends it.

The policy's text or tool calls go to the environment, whose messages go back to the policy; the tokens that the engine
saw and sampled are kept unchanged in the steps. An episode that cannot be run becomes a value, `FailedEpisode`.
"""

import asyncio
import contextvars
import logging
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from headrace.errors import EpisodeError, HeadraceError, Interrupted, RolloutError, boundary
from headrace.process.watchdog import watching
from headrace.protocols import Env, Sampler, env_flags
from headrace.render import Renderer
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.rollout.policies import Policy, SampledPolicy
from headrace.tool_calls import tool_names
from headrace.types import (
    Action,
    EndReason,
    Episode,
    FailedEpisode,
    Observation,
    SamplingParams,
    Step,
    StepResult,
    StopReason,
    Task,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
BY_ITSELF = (EndReason.DONE, EndReason.END_TOOL, EndReason.END_PATTERN)  # endings that do not truncate the episode
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """Say what ends an episode besides its environment. The environment sees the last turn like any other."""

    max_turns: int
    tool: str | None = None  # a call of this tool, which is offered if the environment has none of that name
    pattern: re.Pattern[str] | None = None  # a turn in which this is found

    def __post_init__(self) -> None:
        assert self.max_turns > 0


async def run_sampled_episode(
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
    end_tool: str | None = None,
    end_pattern: re.Pattern[str] | None = None,
    partial_episode: PartialEpisode | None = None,
    threads: Executor | None = None,
) -> Episode | FailedEpisode:
    """Run one task with a sampler until the environment, one of `EndRules` or the token limit ends it.

    Turn i samples with the seed derive_seed(seed, i). Turns recorded in `partial_episode` are played back in place of
    being sampled. An environment whose attribute `blocking` is true runs off the event loop, on `threads`. A failure
    is returned as a FailedEpisode with one sentence. The environment is closed in any case.
    """
    partial_episode = partial_episode or PartialEpisode()
    partial_episode.replayable = env_flags(env).deterministic
    return await run_episode(
        id=id,
        task=task,
        env=env,
        policy=SampledPolicy(
            sampler=sampler,
            renderer=renderer,
            sampling=sampling,
            seed=seed,
            max_tokens=max_episode_tokens,
            partial_episode=partial_episode,
        ),
        temperature=sampling.temperature,
        seed=seed,
        env_seed=env_seed,
        rules=EndRules(max_turns=max_turns, tool=end_tool, pattern=end_pattern),
        timeout_s=timeout_s,
        threads=threads,
    )


async def run_episode(
    *,
    id: str,
    task: Task,
    env: Env,
    policy: Policy,
    temperature: float,
    seed: int,
    env_seed: int,
    rules: EndRules,
    timeout_s: float,
    threads: Executor | None = None,
) -> Episode | FailedEpisode:
    """Run one task with any policy; otherwise as `run_sampled_episode`."""
    env_calls = _EnvCalls(env, threads)
    try:
        with boundary(EpisodeError, f"task {task.id}"):
            async with time_limit(timeout_s, f"task {task.id}"):
                return await _take_turns(
                    id=id,
                    task=task,
                    env_calls=env_calls,
                    policy=policy,
                    temperature=temperature,
                    seed=seed,
                    env_seed=env_seed,
                    rules=rules,
                )
    except (Interrupted, RolloutError):  # not of this episode alone
        raise
    except HeadraceError as exc:
        reason = str(exc) if f"task {task.id}" in str(exc) else f"task {task.id}: {exc}"
        same = {"repeats": f"an episode failed: {str(exc).replace(f'task {task.id}', 'task')}"}
        logger.warning("episode %s failed: %s", id, reason, extra=same)
        return FailedEpisode(id=id, task=task, reason=reason)
    finally:
        await _close(env_calls, task)


@asynccontextmanager
async def time_limit(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raise EpisodeError when the body takes too long; a TimeoutError of the body itself passes through."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise EpisodeError(
            f"{what}: not finished within {timeout_s:g} s; raise rl.async.task_timeout_s or shorten it"
        ) from exc


async def _take_turns(
    *,
    id: str,
    task: Task,
    env_calls: "_EnvCalls",
    policy: Policy,
    temperature: float,
    seed: int,
    env_seed: int,
    rules: EndRules,
) -> Episode:
    observation = await env_calls.run(partial(env_calls.env.reset, task, env_seed))
    messages = [*task.messages, *observation.messages]
    if not messages:
        raise EpisodeError(f"task {task.id}: neither the task nor its environment has a first message")
    policy.reset(messages, available_tools(observation, rules))
    steps: list[Step] = []
    success: bool | None = None
    ended: EndReason | None = None
    while ended is None:
        turn = await policy.act()
        result = await _step(env_calls, observation, turn.action, rules)
        if not math.isfinite(result.reward):
            raise EpisodeError(f"task {task.id}: the environment's reward is {result.reward}: make it a finite number")
        steps.append(
            Step(
                prompt=turn.prompt,
                completion=turn.completion,
                action=turn.action.text,
                state=observation.state,
                reward=float(result.reward),
                valid=result.valid,
                images=turn.images,
            )
        )
        messages += [turn.reply, *result.observation.messages]
        success = success if result.success is None else result.success
        ended = end_reason(result, turn.action, len(steps), rules)
        observation = result.observation
        if ended is None and not policy.observe(observation.messages, available_tools(observation, rules)):
            ended = EndReason.MAX_TOKENS
    return Episode(
        id=id,
        task=task,
        seed=seed,
        steps=tuple(steps),
        messages=tuple(messages),
        temperature=temperature,
        truncated=ended not in BY_ITSELF or turn.completion.stop is not StopReason.STOP,
        success=success,
        ended=ended,
        final_state=observation.state,
    )


def end_reason(result: StepResult, action: Action, turns: int, rules: EndRules) -> EndReason | None:
    """Return why the episode ends after this step, or None if it goes on.

    The environment decides first, then the policy's tool call or pattern, then the turn limit.
    """
    if result.done:
        return EndReason.DONE
    if result.truncated:
        return EndReason.ENV_LIMIT
    if any(call.name == rules.tool for call in action.calls):
        return EndReason.END_TOOL
    if rules.pattern is not None and rules.pattern.search(action.text):
        return EndReason.END_PATTERN
    return EndReason.MAX_TURNS if turns >= rules.max_turns else None


def available_tools(observation: Observation, rules: EndRules) -> tuple[Mapping[str, Any], ...]:
    """Return the environment's tools and the one that ends the episode."""
    if rules.tool is None or rules.tool in tool_names(observation.tools):
        return observation.tools
    function = {"name": rules.tool, "description": "End the task.", "parameters": {"type": "object", "properties": {}}}
    return (*observation.tools, {"type": "function", "function": function})


async def _step(env_calls: "_EnvCalls", observation: Observation, action: Action, rules: EndRules) -> StepResult:
    """Step the environment. A call of the end tool is left out unless the tool is the environment's, and a turn without
    any other call is not passed on."""
    has_end_tool = rules.tool in tool_names(observation.tools)
    calls = tuple(call for call in action.calls if has_end_tool or call.name != rules.tool)
    if action.calls and not calls:
        return StepResult(observation=Observation(messages=(), state=observation.state), reward=0.0, done=False)
    if not observation.tools:
        return await env_calls.run(partial(env_calls.env.step, action.text))
    call = getattr(env_calls.env, "call", None)
    if call is None:
        raise EpisodeError("the environment offers tools but has no method `call` that takes what is called")
    result: StepResult = await env_calls.run(partial(call, replace(action, calls=calls)))
    return result


class _EnvCalls:
    """Call an environment: on the event loop, or on threads if it blocks."""

    def __init__(self, env: Env, threads: Executor | None) -> None:
        self.env, self._threads = env, threads

    async def run(self, call: Callable[[], T]) -> T:
        if not env_flags(self.env).blocking:
            return call()
        context = contextvars.copy_context()
        with watching(f"a call of {type(self.env).__name__}", has_deadline=True):
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, call))


async def _close(env_calls: _EnvCalls, task: Task) -> None:
    """Close the environment. One that does not close in time is left behind with a warning; its episode stands."""
    limit = asyncio.timeout(CLOSE_TIMEOUT_S)
    try:
        with boundary(EpisodeError, f"task {task.id}: the environment cannot be closed"):
            async with limit:
                await env_calls.run(env_calls.env.close)
    except EpisodeError as exc:
        late = f"task {task.id}: the environment was not closed within {CLOSE_TIMEOUT_S:g} s and is left behind"
        logger.warning("%s", late if limit.expired() else exc)
