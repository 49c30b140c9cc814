"""Run an agent program that calls the model itself, and turn the calls recorded by the endpoint into an episode.

A program is `agent(base_url, task)`, async or plain, and talks to the model at `base_url` by OpenAI's API. Its return
value is its reward: None, a number, or True and False for success. `program_fn` makes it the `generate_fn` of a
`GroupPlayer`, so groups, rewards and weight updates work as for any episode. Knows no HTTP: the endpoint is passed in.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from headrace.errors import EpisodeError, HeadraceError, boundary
from headrace.render import Renderer
from headrace.types import Completion, EndReason, Episode, Message, SampleRequest, SamplingParams, Step, Task

Outcome = bool | float | None
Program = Callable[[str, Task], Outcome | Awaitable[Outcome]]


class ProgramSampler(Protocol):
    """Sample one sequence to its end."""

    async def sample(self, request: SampleRequest) -> Completion: ...


class ProgramRecord(Protocol):
    """Hold what an endpoint recorded of one episode (`infer.openai_api.session.ChatSession`)."""

    @property
    def base_url(self) -> str: ...

    @property
    def steps(self) -> tuple[Step, ...]: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def temperature(self) -> float: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def limit(self) -> EndReason | None: ...

    @property
    def error(self) -> HeadraceError | None: ...


class ChatEndpoint(Protocol):
    """Give each episode a base URL (`infer.openai_api.app.OpenAIEndpoint`)."""

    def open(
        self, *, sampler: ProgramSampler, sampling: SamplingParams, seed: int, max_calls: int, max_tokens: int
    ) -> Any: ...

    def close(self, record: Any) -> None: ...


async def play_program(
    program: Program,
    *,
    task: Task,
    endpoint: ChatEndpoint,
    sampler: ProgramSampler,
    sampling: SamplingParams,
    seed: int,
    max_turns: int,
    max_episode_tokens: int,
    id: str = "",
) -> Episode:
    """Run the program to its end. Every call it made is a step, and its return value is the reward of the last one.

    A program that fails after the endpoint refused it a call, for lack of tokens or turns, ends as an episode does at a
    limit: truncated. Any other failure raises EpisodeError, and a failure of the sampler is raised unchanged. The
    caller sets the time limit; when it cancels, open calls are cancelled too. A plain function runs on a thread.
    """
    record: ProgramRecord = endpoint.open(
        sampler=sampler, sampling=sampling, seed=seed, max_calls=max_turns, max_tokens=max_episode_tokens
    )
    outcome: Outcome = None
    try:
        with boundary(EpisodeError, f"task {task.id}: the agent program failed"):
            outcome = await _run(program, record.base_url, task)
    except EpisodeError:
        if record.error is None and not (record.limit is not None and record.steps):
            raise
    finally:
        endpoint.close(record)
    if record.error is not None:  # also when the program made do without the reply
        raise record.error
    return _episode(record, _checked(outcome, task), id=id, task=task, seed=seed)


def program_fn(
    program: Program, endpoint: ChatEndpoint, *, sampling: SamplingParams, max_turns: int, max_episode_tokens: int
) -> Callable[[Task, ProgramSampler, Renderer, int], Awaitable[Episode]]:
    """Turn the program into a `generate_fn` of a `GroupPlayer`."""

    async def generate(task: Task, sampler: ProgramSampler, renderer: Renderer, seed: int) -> Episode:
        return await play_program(
            program,
            task=task,
            endpoint=endpoint,
            sampler=sampler,
            sampling=sampling,
            seed=seed,
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
        )

    return generate


async def _run(program: Program, base_url: str, task: Task) -> Outcome:
    if inspect.iscoroutinefunction(program):
        outcome: Outcome = await program(base_url, task)
        return outcome
    returned = await asyncio.to_thread(program, base_url, task)
    return await returned if inspect.isawaitable(returned) else returned


def _checked(outcome: Outcome, task: Task) -> Outcome:
    valid = outcome is None or (isinstance(outcome, bool | int | float) and math.isfinite(outcome))
    if not valid:
        raise EpisodeError(
            f"task {task.id}: the agent program returned {str(outcome)[:60]!r}: return None, a finite number, or True "
            "or False"
        )
    return outcome


def _episode(record: ProgramRecord, outcome: Outcome, *, id: str, task: Task, seed: int) -> Episode:
    steps = record.steps
    if not steps:
        raise EpisodeError(f"task {task.id}: the agent program never called the model: let it use its base_url")
    if outcome is not None:
        steps = (*steps[:-1], replace(steps[-1], reward=float(outcome)))
    return Episode(
        id=id,
        task=task,
        seed=seed,
        steps=steps,
        messages=record.messages,
        temperature=record.temperature,
        truncated=record.truncated,
        ended=record.limit or EndReason.DONE,
        success=outcome if isinstance(outcome, bool) else None,
    )
