"""What the worlds share: drawing different tasks that belong to one split, and demonstrating them with a solver."""

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
MAX_MISSES = 5000  # draws in a row that give no new task before the search ends


class SolvableEnv(Env, Protocol):
    """An environment that knows how to play itself."""

    def best_action(self) -> str | None:
        """The next action of a best player, who knows the whole task; None where nothing helps any more.

        After an observation with tools it is a call, as `actions.write_call` writes it.
        """


def draw_tasks(
    world: str,
    size: int,
    seed: int,
    *,
    split: str,
    draw: Callable[[random.Random], str],
    data_of: Callable[[str], Mapping[str, Any] | None],
    what: str,
    remedy: str,
) -> list[Task]:
    """`size` different tasks. `draw` makes a text, which is the task's identity, and `data_of` its data, or None.

    A text belongs to one split by its hash, whatever the seed, so train and held-out tasks never meet. Raises
    ConfigError ("only 3 of 50 different maps were found: ...") when the draws bring nothing new.
    """
    check_split(split)
    rng = random.Random(derive_seed(world, seed))
    tasks: list[Task] = []
    tried: set[str] = set()
    misses = 0
    while len(tasks) < size and misses < MAX_MISSES:
        misses += 1
        text = draw(rng)
        digest = digest_of(text)
        if digest in tried or is_held_out(digest) != (split == "held_out"):
            continue
        tried.add(digest)
        data = data_of(text)
        if data is None:
            continue
        tasks.append(Task(id=f"{world}/{digest}", data=data))
        misses = 0
    if len(tasks) < size:
        raise ConfigError(f"only {len(tasks)} of {size} different {what} were found: {remedy}")
    return tasks


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_held_out(digest: str) -> bool:
    return int(digest, 16) < HELD_OUT_SHARE * 2**64


def check_split(split: str) -> None:
    if split not in ("train", "held_out"):
        raise ConfigError(f'split is {split!r}: write "train" or "held_out"')


def demonstrate(
    world: str, make_env: Callable[[], SolvableEnv], tasks: Sequence[Task], seed: int, mistake_rate: float
) -> list[tuple[Message, ...]]:
    """One conversation per task by the solver, which with probability `mistake_rate` does something at random.

    It does so too where nothing helps any more. Episodes that failed are kept: whoever imitates these learns the
    format, and the mistakes.
    """
    if not 0.0 <= mistake_rate <= 1.0:
        raise ConfigError(f"mistake_rate is {mistake_rate}: write a number from 0 to 1")
    return [
        _play(make_env(), task, derive_seed(f"{world} demonstration", seed, task.id), mistake_rate) for task in tasks
    ]


def _play(env: SolvableEnv, task: Task, seed: int, mistake_rate: float) -> tuple[Message, ...]:
    rng = random.Random(seed)
    observation = env.reset(task, seed)
    messages = [*task.messages]
    turns = 0
    while True:
        assert observation.actions, "a world that demonstrates offers actions"
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
    """What the policy wrote, with single spaces."""
    return " ".join(action.split())


def turn_result(
    observation: Observation, *, valid: bool, success: bool, turns_left: int, failed: bool = False
) -> StepResult:
    """Of a world with one reward, 1 for success, and a limit of turns; `failed`: nothing can be won any more."""
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
    """The message that an action is, in words or as calls, and what the environment answers."""
    if not observation.tools:
        return Message(role="assistant", content=action), env.step(action)
    tool_env: ToolEnv = env  # type: ignore[assignment]  # it offered tools
    read = read_action(action, observation.tools, number=turn)
    return Message(role="assistant", content=read.content, tool_calls=read.calls), tool_env.call(read)
