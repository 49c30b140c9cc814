"""Draw different tasks that belong to one split, and demonstrate them with a solver."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.algo.random import derive_seed
from headrace.envs.tool_env import read_action
from headrace.errors import ConfigError
from headrace.protocols import Env, ToolEnv
from headrace.types import Message, Observation, StepResult, Task

HELD_OUT_SHARE = 0.2
MAX_MISSES = 5000  # the search ends after so many draws in a row without a new task


class SolvableEnv(Env, Protocol):
    """An environment that has a solver."""

    def best_action(self) -> str | None:
        """Return the next action of a best player that knows the whole task, or None where the task is lost.

        After an observation with tools it is a call, as `tool_env.write_call` writes it.
        """


def draw_tasks(
    env_name: str,
    size: int,
    seed: int,
    *,
    split: str,
    draw: Callable[[random.Random], str],
    data_of: Callable[[str], Mapping[str, Any] | None],
    what: str,
    remedy: str,
) -> list[Task]:
    """Draw `size` different tasks. `draw` makes a text, which identifies the task; `data_of` makes its data, or returns
    None to reject it.

    A text belongs to one split by its hash, whatever the seed, so no task is in both. Raises ConfigError ("only 3 of
    50 different maps were found: ...") when the draws bring nothing new.
    """
    check_split(split)
    rng = random.Random(derive_seed(env_name, seed))
    tasks: list[Task] = []
    digests: set[str] = set()
    misses = 0
    while len(tasks) < size and misses < MAX_MISSES:
        misses += 1
        text = draw(rng)
        digest = digest_of(text)
        if digest in digests or is_held_out(digest) != (split == "held_out"):
            continue
        digests.add(digest)
        data = data_of(text)
        if data is None:
            continue
        tasks.append(Task(id=f"{env_name}/{digest}", data=data))
        misses = 0
    if len(tasks) < size:
        raise ConfigError(f"only {len(tasks)} of {size} different {what} were found: {remedy}")
    return tasks


def digest_of(text: str) -> str:
    """Hash a text to 16 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_held_out(digest: str) -> bool:
    """Tell whether a hash belongs to the held-out split."""
    return int(digest, 16) < HELD_OUT_SHARE * 2**64


def check_split(split: str) -> None:
    """Raise ConfigError unless there is a split of that name."""
    if split not in ("train", "held_out"):
        raise ConfigError(f'split is {split!r}: write "train" or "held_out"')


def demonstrate(
    env_name: str, make_env: Callable[[], SolvableEnv], tasks: Sequence[Task], seed: int, mistake_rate: float
) -> list[tuple[Message, ...]]:
    """Play one conversation per task with the solver, which acts at random with probability `mistake_rate`.

    It also acts at random where the task is lost. Episodes that failed are kept: a model that imitates them learns the
    format, and the mistakes.
    """
    if not 0.0 <= mistake_rate <= 1.0:
        raise ConfigError(f"mistake_rate is {mistake_rate}: write a number from 0 to 1")
    return [
        _play(make_env(), task, derive_seed(f"{env_name} demonstration", seed, task.id), mistake_rate) for task in tasks
    ]


def _play(env: SolvableEnv, task: Task, seed: int, mistake_rate: float) -> tuple[Message, ...]:
    rng = random.Random(seed)
    observation = env.reset(task, seed)
    messages = [*task.messages]
    turns = 0
    while True:
        assert observation.actions, "an environment with a solver offers actions"
        mistaken = rng.random() < mistake_rate
        best = None if mistaken else env.best_action()
        action = rng.choice(observation.actions) if best is None else best
        reply, result = play_action(env, observation, action, turn=turns)
        turns += 1
        messages += [*observation.messages, reply]
        if result.done or result.truncated:
            env.close()
            return tuple(messages)
        observation = result.observation


def words_of(action: str) -> str:
    """Write an action with single spaces."""
    return " ".join(action.split())


def turn_result(
    observation: Observation, *, valid: bool, success: bool, turns_left: int, failed: bool = False
) -> StepResult:
    """Make the result of a turn where success is rewarded by 1 and turns are limited; `failed` is a lost episode."""
    done = success or failed
    return StepResult(
        observation=observation,
        reward=float(success),
        done=done,
        truncated=not done and turns_left == 0,
        valid=valid,
        success=success,
    )


def play_action(env: Env, observation: Observation, action: str, *, turn: int) -> tuple[Message, StepResult]:
    """Take an action, in words or as calls; return its message and the environment's answer."""
    if not observation.tools:
        return Message(role="assistant", content=action), env.step(action)
    tool_env: ToolEnv = env  # type: ignore[assignment]  # it offered tools
    parsed = read_action(action, observation.tools, number=turn)
    return Message(role="assistant", content=parsed.content, tool_calls=parsed.calls), tool_env.call(parsed)
