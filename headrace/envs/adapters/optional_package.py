"""What the adapters share: importing a package that may be missing, and tasks that are the seeds of its games."""

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

MAX_SEED = 2**31 - 1  # what every package takes


def require(module: str, pip: str) -> Any:
    """The imported module; raises ConfigError with the command that installs it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"{pip} is not installed: run  pip install {pip}")
    with boundary(ConfigError, f"{pip} is installed but cannot be imported"):
        return importlib.import_module(module)


def seed_tasks(world: str, size: int, seed: int, *, split: str, data: Mapping[str, Any]) -> list[Task]:
    """`size` tasks that have `data` and a seed of their own, `data["seed"]`, from which the game starts.

    A seed belongs to one split whatever the data, so that a game with other limits is still held out.
    """
    drawn = draw_tasks(
        world,
        size,
        seed,
        split=split,
        draw=lambda rng: str(rng.randint(0, MAX_SEED)),
        data_of=lambda text: {**data, "seed": int(text)},
        what="seeds",
        remedy="ask for fewer",
    )
    return [replace(task, id=f"{world}/{digest_of(json.dumps(task.data, sort_keys=True))}") for task in drawn]


def choose_tasks(
    world: str,
    known: Sequence[Task],
    size: int,
    seed: int,
    *,
    split: str,
    settings: Mapping[str, Any],
    what: str,
    by_hash: bool = True,
) -> list[Task]:
    """`size` of the tasks that somebody else has written, in an order that `seed` decides, with `settings` in their
    data under the world's name.

    A task belongs to one split by what is written in it, whatever the settings, so the two never meet; not `by_hash`:
    all are of this split. Raises ConfigError when there are fewer.
    """
    check_split(split)
    found: dict[str, Task] = {}
    for task in known:
        digest = digest_of(json.dumps([[asdict(message) for message in task.messages], task.data], sort_keys=True))
        if not by_hash or is_held_out(digest) == (split == "held_out"):
            found[digest] = replace(task, id=f"{world}/{digest}", data={**task.data, world: settings})
    if len(found) < size:
        remedy = f"set size to {len(found)} or less" if found else "give it more"
        raise ConfigError(f"{what} has {len(found)} different tasks for split = {split!r}: {remedy}")
    tasks = list(found.values())
    return [tasks[index] for index in permutation(len(tasks), key=(derive_seed(world, seed),), epoch=0)[:size]]


def no_demonstrations(world: str, tasks: Sequence[Task], seed: int, mistake_rate: float) -> list[tuple[Message, ...]]:
    """`World.demonstrations` of a package that cannot play itself."""
    raise ConfigError(f"the world {world} has no solver to demonstrate with: use it in rl.tasks and eval.source")


def no_vocabulary(world: str) -> tuple[str, ...]:
    """`World.vocabulary` of a package that may say anything."""
    raise ConfigError(f'the words of the world {world} are not known beforehand: use a real model, not "tiny"')


class IsolatedGlobalRng:
    """Random numbers for code that draws from the global generators of `random` and numpy.

    Inside `drawing()` the global generators continue from where this one left them; outside they are as they were.
    Whoever uses it stays on the event loop's thread: another thread that draws meanwhile would draw from here.
    """

    def __init__(self, seed: int) -> None:
        python, legacy = random.Random(seed), np.random.RandomState(seed % 2**32)
        self._states: tuple[Any, Any] = (python.getstate(), legacy.get_state())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        theirs = (random.getstate(), np.random.get_state())
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = (random.getstate(), np.random.get_state())
            _set_states(theirs)


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
