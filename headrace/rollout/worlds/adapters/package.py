"""What the adapters share: importing a package that may be missing, and tasks that are the seeds of its games."""

import importlib
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from headrace.errors import ConfigError, boundary
from headrace.rollout.worlds.making import draw_tasks
from headrace.types import Message, Task

MAX_SEED = 2**31 - 1  # what every package takes


def require(module: str, pip: str) -> Any:
    """The imported module; raises ConfigError with the command that installs it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"{pip} is not installed: run  pip install {pip}")
    with boundary(ConfigError, f"{pip} is installed but cannot be imported"):
        return importlib.import_module(module)


def seed_tasks(world: str, size: int, seed: int, *, split: str, data: Mapping[str, Any]) -> list[Task]:
    """`size` tasks that have `data` and a seed of their own, `data["seed"]`, from which the game starts."""
    return draw_tasks(
        world,
        size,
        seed,
        split=split,
        draw=partial(_random_text, settings=json.dumps(data, sort_keys=True)),
        data_of=lambda text: {**data, "seed": int(text.partition(" ")[0])},
        what="seeds",
        remedy="ask for fewer",
    )


def _random_text(rng: random.Random, *, settings: str) -> str:
    return f"{rng.randint(0, MAX_SEED)} {settings}"


def no_demonstrations(world: str, tasks: Sequence[Task], seed: int, mistake_rate: float) -> list[tuple[Message, ...]]:
    """`World.demonstrations` of a package that cannot play itself."""
    raise ConfigError(f"the world {world} has no solver to demonstrate with: use it in rl.tasks and eval.source")


def no_vocabulary(world: str) -> tuple[str, ...]:
    """`World.vocabulary` of a package that may say anything."""
    raise ConfigError(f'the words of the world {world} are not known beforehand: use a real model, not "tiny"')


class OwnLuck:
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
