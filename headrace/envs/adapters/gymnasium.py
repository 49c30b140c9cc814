"""Play gymnasium's toy-text games (FrozenLake, CliffWalking, Taxi, Blackjack) and other discrete games.

A task's seed decides how the game starts; the seed of `reset` decides its luck from then on, so all episodes of a
group have the same of both. Rewards are the game's. Observations are written here, in few words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrace.envs.adapters.optional_package import require, seed_tasks
from headrace.errors import ConfigError, DataError, boundary
from headrace.types import Message, Observation, StepResult, Task

COLOURS = ("red", "green", "yellow", "blue")  # Taxi's places, in its order
MAX_ACTIONS = 20  # of a game whose actions have no names here


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """Words for a game's actions and observations."""

    actions: tuple[str, ...]
    describe: Callable[[Any, Any], str]  # of the unwrapped environment and its observation
    won: Callable[[float], bool]  # by the reward of the last step
    first_action: int = 0  # the number of the first of `actions`


def spell(number: int) -> str:
    """Write a number digit by digit."""
    return " ".join(str(number))


def _frozen_lake(env: Any, observed: Any) -> str:
    cells = [sign.decode() for sign in env.desc.flatten()]
    cells[int(observed)] = "A"
    width = env.desc.shape[1]
    return " , ".join(" ".join(cells[start : start + width]) for start in range(0, len(cells), width))


def _cliff(env: Any, observed: Any) -> str:
    row, column = divmod(int(observed), 12)
    return f"row {spell(row)} column {spell(column)}"


def _taxi(env: Any, observed: Any) -> str:
    row, column, passenger, destination = env.decode(int(observed))
    where = "inside" if passenger == len(COLOURS) else COLOURS[passenger]
    return f"row {row} column {column} passenger {where} destination {COLOURS[destination]}"


def _blackjack(env: Any, observed: Any) -> str:
    total, dealer, ace = (int(part) for part in observed)
    return f"hand {spell(total)} dealer {spell(dealer)} ace {'yes' if ace else 'no'}"


def _numbers(env: Any, observed: Any) -> str:
    parts = observed if isinstance(observed, tuple) else (observed,)
    return f"state {' , '.join(spell(int(part)) for part in parts)}"


GAMES: Mapping[str, Game] = {
    "FrozenLake": Game(actions=("left", "down", "right", "up"), describe=_frozen_lake, won=lambda last: last > 0),
    "CliffWalking": Game(actions=("up", "right", "down", "left"), describe=_cliff, won=lambda last: True),
    "Taxi": Game(
        actions=("south", "north", "east", "west", "pickup", "dropoff"), describe=_taxi, won=lambda last: last > 0
    ),
    "Blackjack": Game(actions=("stick", "hit"), describe=_blackjack, won=lambda last: last > 0),
}


def vocabulary() -> tuple[str, ...]:
    """Return every word that any of the games says or understands."""
    names = (name for game in GAMES.values() for name in game.actions)
    words = "row column passenger inside destination hand dealer ace yes no state , A S F H G"
    return tuple(dict.fromkeys((*names, *words.split(), *COLOURS, "-", *"0123456789")))


class GymnasiumEnv:
    """Plays a gymnasium game. `valid` means one of its actions; the game does not see others, which cost a turn."""

    deterministic = True  # the luck follows from the seed

    def __init__(self) -> None:
        self._env: Any = None
        self._game = Game(actions=(), describe=_numbers, won=lambda last: last > 0)
        self._observation = Observation(messages=())
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is of another environment, or the game cannot be made."""
        if not {"env", "settings", "seed", "max_turns"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment gymnasium: its data need "
                "`env`, `settings`, `seed`, `max_turns`"
            )
        self.close()
        self._env, self._game = make_game(task.data["env"], task.data["settings"])
        observed, _ = self._env.reset(seed=int(task.data["seed"]))
        self._env.np_random = np.random.default_rng(seed)
        self._turns_left = int(task.data["max_turns"])
        return self._observe(observed)

    def step(self, action: str) -> StepResult:
        assert self._env is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        self._turns_left -= 1
        word = " ".join(action.split())
        if word not in self._game.actions:
            return self._result(reward=0.0, done=False, valid=False)
        observed, reward, done, _, _ = self._env.step(self._game.first_action + self._game.actions.index(word))
        self._observe(observed)
        return self._result(reward=float(reward), done=bool(done), valid=True)

    def _result(self, *, reward: float, done: bool, valid: bool) -> StepResult:
        truncated = not done and self._turns_left == 0
        if done:
            self._turns_left = 0
        won = done and self._game.won(reward)
        return StepResult(
            observation=self._observation, reward=reward, done=done, truncated=truncated, valid=valid, success=won
        )

    def _observe(self, observed: Any) -> Observation:
        parts = observed if isinstance(observed, tuple) else (observed,)
        self._observation = Observation(
            messages=(Message(role="user", content=self._game.describe(self._env, observed)),),
            state=" ".join(str(int(part)) for part in parts),
            actions=self._game.actions,
        )
        return self._observation

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None


def make_game(name: str, settings: Mapping[str, Any]) -> tuple[Any, Game]:
    """Make the game without its time limit, with its words; raises ConfigError if it cannot be played here."""
    gymnasium = require("gymnasium", "gymnasium")
    with boundary(ConfigError, f"gymnasium cannot make {name}"):
        env = gymnasium.make(name, **settings).unwrapped
    game = GAMES.get(name.partition("-")[0])
    if game is not None:
        return env, game
    spaces = gymnasium.spaces
    space = env.observation_space
    parts = space.spaces if isinstance(space, spaces.Tuple) else (space,)
    if not isinstance(env.action_space, spaces.Discrete) or env.action_space.n > MAX_ACTIONS:
        raise ConfigError(f"{name} has no short list of actions: take a game with discrete ones, Taxi-v4 say")
    if not all(isinstance(part, spaces.Discrete) for part in parts):
        raise ConfigError(f"what {name} shows are not whole numbers: take a game with discrete states, Taxi-v4 say")
    first = int(env.action_space.start)
    actions = tuple(spell(first + index) for index in range(int(env.action_space.n)))
    return env, Game(actions=actions, describe=_numbers, won=lambda last: last > 0, first_action=first)


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    env: str = "FrozenLake-v1",
    settings: dict[str, Any] = {},  # noqa: B006 - never changed; its type says what the option takes
    max_turns: int = 30,
) -> list[Task]:
    """Draw `size` seeds of the game `env`, made with the keyword arguments `settings`."""
    game, _ = make_game(env, settings)
    game.close()
    return seed_tasks(
        "gymnasium", size, seed, split=split, data={"env": env, "settings": settings, "max_turns": max_turns}
    )
