"""One episode: a policy and an environment take turns until one of the rules of ending says so.

Text, or calls of tools, go to the environment and its messages back; what the engine saw and sampled is kept by the
policy's moves as it was. An episode that cannot be played is a value, `FailedEpisode`.
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

from headrace.errors import EpisodeError, HeadraceError, Interrupted, boundary
from headrace.protocols import Env, Sampler
from headrace.render import Renderer
from headrace.rollout.journal import EpisodeJournal
from headrace.rollout.policies import Policy, SampledPolicy, tool_names
from headrace.types import (
    Action,
    Ended,
    Episode,
    FailedEpisode,
    Observation,
    SamplingParams,
    Step,
    StepResult,
    Stop,
    Task,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
BY_ITSELF = (Ended.DONE, Ended.END_TOOL, Ended.END_PATTERN)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """What ends an episode besides its environment: `max_turns`; a call of the tool named `tool`, which is offered
    beside the environment's own if it has none of that name; a turn in which `pattern` is found. The environment sees
    the last turn as it sees any, before the episode ends."""

    max_turns: int
    tool: str | None = None
    pattern: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        assert self.max_turns > 0


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
    end_tool: str | None = None,
    end_pattern: re.Pattern[str] | None = None,
    journal: EpisodeJournal | None = None,
    threads: Executor | None = None,
) -> Episode | FailedEpisode:
    """Play one task with a sampler to its end: the environment's, one of `EndRules`, or that of the tokens it may have.

    Turn i samples with the seed derive_seed(seed, i). An environment with a true attribute `blocking` runs off the
    event loop, on `threads`. Turns that the journal has on record are played back in place of being sampled. What goes
    wrong comes back as a FailedEpisode with one sentence. The environment is closed in any case.
    """
    journal = journal or EpisodeJournal()
    journal.replayable = bool(getattr(env, "deterministic", False))
    return await play_episode(
        id=id,
        task=task,
        env=env,
        policy=SampledPolicy(
            sampler=sampler,
            renderer=renderer,
            sampling=sampling,
            seed=seed,
            max_tokens=max_episode_tokens,
            journal=journal,
        ),
        temperature=sampling.temperature,
        seed=seed,
        env_seed=env_seed,
        rules=EndRules(max_turns=max_turns, tool=end_tool, pattern=end_pattern),
        timeout_s=timeout_s,
        threads=threads,
    )


async def play_episode(
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
    """As `run_episode`, with any policy."""
    world = _World(env, threads)
    try:
        with boundary(EpisodeError, f"task {task.id}"):
            async with time_limit(timeout_s, f"task {task.id}"):
                return await _play(
                    id=id,
                    task=task,
                    world=world,
                    policy=policy,
                    temperature=temperature,
                    seed=seed,
                    env_seed=env_seed,
                    rules=rules,
                )
    except Interrupted:
        raise
    except HeadraceError as exc:
        reason = str(exc) if f"task {task.id}" in str(exc) else f"task {task.id}: {exc}"
        logger.warning("episode %s failed: %s", id, reason)
        return FailedEpisode(id=id, task=task, reason=reason)
    finally:
        await _close(world, task)


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
        raise EpisodeError(
            f"{what}: not finished within {timeout_s:g} s; raise rl.async.task_timeout_s or shorten it"
        ) from exc


async def _play(
    *,
    id: str,
    task: Task,
    world: "_World",
    policy: Policy,
    temperature: float,
    seed: int,
    env_seed: int,
    rules: EndRules,
) -> Episode:
    observation = await world.run(partial(world.env.reset, task, env_seed))
    messages = [*task.messages, *observation.messages]
    if not messages:
        raise EpisodeError(f"task {task.id}: neither the task nor its environment has a first message")
    policy.begin(messages, _offered(observation, rules))
    steps: list[Step] = []
    success: bool | None = None
    ended: Ended | None = None
    while ended is None:
        move = await policy.move()
        result = await _act(world, observation, move.action, rules)
        if not math.isfinite(result.reward):
            raise EpisodeError(f"task {task.id}: the environment's reward is {result.reward}: make it a finite number")
        steps.append(
            Step(
                prompt=move.prompt,
                completion=move.completion,
                action=move.action.text,
                state=observation.state,
                reward=float(result.reward),
                valid=result.valid,
            )
        )
        messages += [move.reply, *result.observation.messages]
        success = success if result.success is None else result.success
        ended = how_it_ends(result, move.action, len(steps), rules)
        observation = result.observation
        if ended is None and not policy.tell(observation.messages, _offered(observation, rules)):
            ended = Ended.MAX_TOKENS
    return Episode(
        id=id,
        task=task,
        seed=seed,
        steps=tuple(steps),
        messages=tuple(messages),
        temperature=temperature,
        truncated=ended not in BY_ITSELF or move.completion.stop is not Stop.STOP,
        success=success,
        ended=ended,
        final_state=observation.state,
    )


def how_it_ends(result: StepResult, action: Action, turns: int, rules: EndRules) -> Ended | None:
    """None: it goes on. The environment's own word counts first, then the policy's, then the limit."""
    if result.done:
        return Ended.DONE
    if result.truncated:
        return Ended.ENV_LIMIT
    if any(call.name == rules.tool for call in action.calls):
        return Ended.END_TOOL
    if rules.pattern is not None and rules.pattern.search(action.text):
        return Ended.END_PATTERN
    return Ended.MAX_TURNS if turns >= rules.max_turns else None


def _offered(observation: Observation, rules: EndRules) -> tuple[Mapping[str, Any], ...]:
    """The environment's tools, and the one that ends the episode."""
    if rules.tool is None or rules.tool in tool_names(observation.tools):
        return observation.tools
    function = {"name": rules.tool, "description": "End the task.", "parameters": {"type": "object", "properties": {}}}
    return (*observation.tools, {"type": "function", "function": function})


async def _act(world: "_World", observation: Observation, action: Action, rules: EndRules) -> StepResult:
    """The environment's answer. It is not told of a tool that is not its own, nor of a turn that is only that."""
    own = rules.tool in tool_names(observation.tools)
    calls = tuple(call for call in action.calls if own or call.name != rules.tool)
    if action.calls and not calls:
        return StepResult(observation=Observation(messages=(), state=observation.state), reward=0.0, done=False)
    if not observation.tools:
        return await world.run(partial(world.env.step, action.text))
    call = getattr(world.env, "call", None)
    if call is None:
        raise EpisodeError("the environment offers tools but has no method `call` that takes what is called")
    result: StepResult = await world.run(partial(call, replace(action, calls=calls)))
    return result


class _World:
    """An environment, and the threads it runs on if it is one that blocks."""

    def __init__(self, env: Env, threads: Executor | None) -> None:
        self.env, self._threads = env, threads

    async def run(self, call: Callable[[], T]) -> T:
        if not getattr(self.env, "blocking", False):
            return call()
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, call))


async def _close(world: _World, task: Task) -> None:
    """An environment that cannot be closed in time is left behind with a warning; its episode stands."""
    limit = asyncio.timeout(CLOSE_TIMEOUT_S)
    try:
        with boundary(EpisodeError, f"task {task.id}: the environment cannot be closed"):
            async with limit:
                await world.run(world.env.close)
    except EpisodeError as exc:
        late = f"task {task.id}: the environment was not closed within {CLOSE_TIMEOUT_S:g} s and is left behind"
        logger.warning("%s", late if limit.expired() else exc)
