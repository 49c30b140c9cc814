"""Play tasks that are only a prompt: one answer ends the episode, and reward functions judge it.

Also makes a verifiable task that needs no data: adding two numbers, digit by digit ("1 2 + 3 9 =" -> "5 1").
"""

import random
from collections.abc import Sequence
from typing import Literal

from headrace.algo.random import derive_seed
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Observation, StepResult, Task

HELD_OUT_SHARE = 0.2


class SingleTurnEnv:
    """An environment of one turn: shows the task's own messages, takes one answer, and gives no reward of its own."""

    deterministic = True

    def __init__(self) -> None:
        self._answered = True

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task has no prompt."""
        if not task.messages:
            raise DataError(f"task {task.id} has no messages: a single-turn task needs a prompt")
        self._answered = False
        return Observation(messages=(), state="prompt")

    def step(self, action: str) -> StepResult:
        assert not self._answered, "the episode is over"
        self._answered = True
        return StepResult(observation=Observation(messages=(), state="answered"), reward=0.0, done=True)

    def close(self) -> None:
        self._answered = True


# --- adding two numbers ----------------------------------------------------------------------------------------------


def addition_vocabulary() -> tuple[str, ...]:
    """Return every word of questions and answers."""
    return (*"0123456789", "+", "=")


def addition_tasks(
    size: int, seed: int, *, split: Literal["train", "held_out"] = "train", max_number: int = 99
) -> list[Task]:
    """Draw `size` different sums of two numbers up to `max_number`; `exact_match` compares with `data["answer"]`.

    A sum belongs to one split whatever the seed. Raises ConfigError when there are not that many.
    """
    if split not in ("train", "held_out"):
        raise ConfigError(f'split is {split!r}: write "train" or "held_out"')
    if not 1 <= max_number <= 999:
        raise ConfigError(f"max_number is {max_number}: write a number from 1 to 999")
    numbers = range(max_number + 1)
    pairs = [(a, b) for a in numbers for b in numbers if _is_held_out(a, b) == (split == "held_out")]
    if size > len(pairs):
        raise ConfigError(f"there are only {len(pairs)} different sums: ask for fewer, or raise max_number")
    return [_addition(a, b) for a, b in random.Random(derive_seed("add", seed)).sample(pairs, size)]


def addition_demonstrations(tasks: Sequence[Task], seed: int, mistake_rate: float) -> list[tuple[Message, ...]]:
    """Write question and answer for every task; with probability `mistake_rate` one digit of the answer is random."""
    if not 0.0 <= mistake_rate <= 1.0:
        raise ConfigError(f"mistake_rate is {mistake_rate}: write a number from 0 to 1")
    conversations = []
    for task in tasks:
        rng = random.Random(derive_seed("add demonstration", seed, task.id))
        digits = str(task.data["answer"]).split()
        if rng.random() < mistake_rate:
            digits[rng.randrange(len(digits))] = rng.choice("0123456789")
        conversations.append((*task.messages, Message(role="assistant", content=" ".join(digits))))
    return conversations


def _is_held_out(a: int, b: int) -> bool:
    return derive_seed("add split", a, b) < HELD_OUT_SHARE * 2**63


def _addition(a: int, b: int) -> Task:
    question = Message(role="user", content=" ".join([*str(a), "+", *str(b), "="]))
    return Task(id=f"add/{a}+{b}", messages=(question,), data={"answer": " ".join(str(a + b))})
