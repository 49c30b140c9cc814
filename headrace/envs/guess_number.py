"""Guess a number: the answer to every guess is whether the number is higher or lower.

A task has `low`, `high` and the `secret` number between them. Numbers are told digit by digit ("1 7"), so that a model
whose words are digits can say any of them; in an action the spaces between digits do not matter. The state is the
interval in which the number must be, by all answers so far. The reward is 1 when it is found. The seed of `reset` plays
no part.
"""

import random
import re
from functools import partial
from typing import Any, Literal

from headrace.envs.task_generation import draw_tasks
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Observation, StepResult, Task

MAX_NUMBER = 999
_NUMBER = re.compile(rf"[0-9]{{1,{len(str(MAX_NUMBER))}}}")


def spell(number: int) -> str:
    """Write a number digit by digit."""
    return " ".join(str(number))


def read_number(action: str) -> int | None:
    """Parse the number of an action, spaces or not; return None if it is anything else."""
    digits = "".join(action.split())
    return int(digits) if _NUMBER.fullmatch(digits) else None


def best_guess(low: int, high: int) -> int:
    """Return the middle, which finds any number in floor(log2(high - low + 1)) + 1 guesses; no strategy is surer."""
    assert low <= high
    return (low + high) // 2


def fewest_guesses(low: int, high: int) -> int:
    """Count the guesses that the best player needs at most."""
    return (high - low + 1).bit_length()


def vocabulary() -> tuple[str, ...]:
    """Return every word that the environment says or understands."""
    return ("number", "from", "to", "higher", "lower", "found", "what", *"0123456789")


class GuessNumberEnv:
    """Plays the guessing game. `valid` means a number; one out of the interval is answered and changes nothing."""

    deterministic = True

    def __init__(self) -> None:
        self._secret = 0
        self._low, self._high = 0, -1  # what the number can still be
        self._found = False
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        if not {"low", "high", "secret", "max_turns"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment guess_number: its data need "
                "`low`, `high`, `secret`, `max_turns`"
            )
        self._low, self._high, self._secret = (int(task.data[key]) for key in ("low", "high", "secret"))
        if not 0 <= self._low <= self._secret <= self._high <= MAX_NUMBER:
            raise DataError(f"task {task.id}: `low`, `secret`, `high` must not fall, and be from 0 to {MAX_NUMBER}")
        self._found = False
        self._turns_left = int(task.data["max_turns"])
        return self._observe(f"number from {spell(self._low)} to {spell(self._high)}")

    def step(self, action: str) -> StepResult:
        assert self._turns_left > 0, "the episode is over"
        guess = read_number(action)
        if guess is None:
            says = "what"
        elif guess < self._secret:
            says, self._low = "higher", max(self._low, guess + 1)
        elif guess > self._secret:
            says, self._high = "lower", min(self._high, guess - 1)
        else:
            says, self._found, self._low, self._high = "found", True, guess, guess
        self._turns_left = 0 if self._found else self._turns_left - 1
        return StepResult(
            observation=self._observe(says),
            reward=float(self._found),
            done=self._found,
            truncated=not self._found and self._turns_left == 0,
            valid=guess is not None,
            success=self._found,
        )

    def best_action(self) -> str | None:
        return spell(best_guess(self._low, self._high))

    def _observe(self, says: str) -> Observation:
        return Observation(
            messages=(Message(role="user", content=says),),
            state=f"{self._low}-{self._high}{' found' if self._found else ''}",
            actions=tuple(spell(number) for number in range(self._low, self._high + 1)),
        )

    def close(self) -> None:
        self._turns_left = 0


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    max_number: int = 99,
    numbers: int = 15,
    max_turns: int = 6,
) -> list[Task]:
    """Draw `size` different pairs of an interval of `numbers` numbers, none above `max_number`, and a secret in it."""
    if not 1 <= max_number <= MAX_NUMBER:
        raise ConfigError(f"max_number is {max_number}: write a number from 1 to {MAX_NUMBER}")
    if not 1 <= numbers <= max_number + 1:
        raise ConfigError(f"numbers is {numbers}: there are only {max_number + 1} from 0 to max_number")
    guesses = fewest_guesses(1, numbers)
    if max_turns < guesses:
        raise ConfigError(f"max_turns is {max_turns}: one of {numbers} numbers can take {guesses} guesses")
    return draw_tasks(
        "guess_number",
        size,
        seed,
        split=split,
        draw=partial(_random_secret, max_number=max_number, numbers=numbers),
        data_of=partial(_data_of, max_turns=max_turns),
        what="secrets",
        remedy="ask for fewer, or raise max_number",
    )


def _random_secret(rng: random.Random, *, max_number: int, numbers: int) -> str:
    low = rng.randint(0, max_number + 1 - numbers)
    return f"{low} {low + numbers - 1} {low + rng.randrange(numbers)}"


def _data_of(text: str, *, max_turns: int) -> dict[str, Any]:
    low, high, secret = (int(word) for word in text.split())
    return {"low": low, "high": high, "secret": secret, "max_turns": max_turns, "optimal": fewest_guesses(low, high)}
