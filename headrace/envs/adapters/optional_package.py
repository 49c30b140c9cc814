"""Import a package that may be missing, and make tasks from seeds of its games or from its rows."""

import importlib
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from headrace.algo.random import derive_seed
from headrace.data.shuffle import permutation
from headrace.envs.task_generation import check_split, digest_of, draw_tasks, is_held_out
from headrace.errors import ConfigError, boundary
from headrace.types import Message, Task

MAX_SEED = 2**31 - 1  # the largest that every package accepts


def require(module: str, pip: str) -> Any:
    """Import a module; raises ConfigError with the command that installs it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"{pip} is not installed: run  pip install {pip}")
    with boundary(ConfigError, f"{pip} is installed but cannot be imported"):
        return importlib.import_module(module)


def seed_tasks(env_name: str, size: int, seed: int, *, split: str, data: Mapping[str, Any]) -> list[Task]:
    """Draw `size` tasks that have `data` and a seed of their own, `data["seed"]`, from which the game starts.

    A seed belongs to one split whatever the data, so that a game with other limits is still held out.
    """
    drawn = draw_tasks(
        env_name,
        size,
        seed,
        split=split,
        draw=lambda rng: str(rng.randint(0, MAX_SEED)),
        data_of=lambda text: {**data, "seed": int(text)},
        what="seeds",
        remedy="ask for fewer",
    )
    return [replace(task, id=f"{env_name}/{digest_of(json.dumps(task.data, sort_keys=True))}") for task in drawn]


def choose_tasks(
    env_name: str,
    candidates: Sequence[Task],
    size: int,
    seed: int,
    *,
    split: str,
    settings: Mapping[str, Any],
    what: str,
    by_hash: bool = True,
) -> list[Task]:
    """Choose `size` of the candidates, in an order that `seed` decides, and put `settings` into their data under the
    environment's name.

    A task belongs to one split by the hash of its content, whatever the settings, so no task is in both; unless
    `by_hash`, all candidates are of this split. Raises ConfigError when there are fewer.
    """
    check_split(split)
    by_digest: dict[str, Task] = {}
    for task in candidates:
        digest = digest_of(json.dumps([[asdict(message) for message in task.messages], task.data], sort_keys=True))
        if not by_hash or is_held_out(digest) == (split == "held_out"):
            by_digest[digest] = replace(task, id=f"{env_name}/{digest}", data={**task.data, env_name: settings})
    if len(by_digest) < size:
        remedy = f"set size to {len(by_digest)} or less" if by_digest else "give it more"
        raise ConfigError(f"{what} has {len(by_digest)} different tasks for split = {split!r}: {remedy}")
    tasks = list(by_digest.values())
    return [tasks[index] for index in permutation(len(tasks), key=(derive_seed(env_name, seed),), epoch=0)[:size]]


def no_demonstrations(
    env_name: str, tasks: Sequence[Task], seed: int, mistake_rate: float
) -> list[tuple[Message, ...]]:
    """Raise ConfigError: `EnvSpec.demonstrations` of a package without a solver."""
    raise ConfigError(
        f"the environment {env_name} has no solver to demonstrate with: use it in rl.tasks and eval.source"
    )


def no_vocabulary(env_name: str) -> tuple[str, ...]:
    """Raise ConfigError: `EnvSpec.vocabulary` of a package that may say anything."""
    raise ConfigError(f'the words of the environment {env_name} are not known beforehand: use a real model, not "tiny"')


class IsolatedGlobalRng:
    """Isolates code that draws from the global generators of `random` and numpy.

    Inside `drawing()` the global generators continue from where this one left them; outside they are as they were.
    To be used on the event loop's thread only: another thread that draws meanwhile would draw from this generator.
    """

    def __init__(self, seed: int) -> None:
        python, legacy = random.Random(seed), np.random.RandomState(seed % 2**32)
        self._states: tuple[Any, Any] = (python.getstate(), legacy.get_state())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the global generators draw the numbers of this one."""
        outer_states = (random.getstate(), np.random.get_state())
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = (random.getstate(), np.random.get_state())
            _set_states(outer_states)


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
