"""Play TextArena's games for one player: GuessTheNumber, FrozenLake, TowerOfHanoi, Sokoban, Mastermind and more.

A task's seed decides how the game starts; the seed of `reset` decides its luck from then on, so all episodes of a
group have the same of both. The model sees what the game says since its last action, and answers in the format that
the game wants ("[5]"). A move the game refuses costs a turn and nothing else. The reward is the game's, at its end: 1
for a win, and often a part of it for a part of the way. The state is all that the game keeps, histories included.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from headrace.algo.random import derive_seed
from headrace.envs.adapters.optional_package import IsolatedGlobalRng, require, seed_tasks
from headrace.errors import ConfigError, DataError, boundary
from headrace.types import Message, Observation, StepResult, Task


class TextArenaEnv:
    """Plays a TextArena game. `valid` means that the game accepted the action."""

    deterministic = True  # the luck follows from the seed

    def __init__(self) -> None:
        self._game: Any = None
        self._luck = IsolatedGlobalRng(0)
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode.

        Raises DataError when the task is not one of this environment, ConfigError when the game cannot be made.
        """
        if not {"env", "settings", "seed", "max_turns"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment textarena: its data need "
                "`env`, `settings`, `seed`, `max_turns`"
            )
        self._game = start_game(task.data["env"], task.data["settings"], int(task.data["seed"]))
        self._turns_left = int(task.data["max_turns"])
        self._game.state.error_allowance = self._turns_left  # a refused move never ends the game
        self._luck = IsolatedGlobalRng(derive_seed("textarena", seed))
        return self._observe()

    def step(self, action: str) -> StepResult:
        assert self._game is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        state = self._game.state
        refused_before = state.error_count
        with self._luck.drawing():
            done, _ = self._game.step(action=action)
        self._turns_left = 0 if done else self._turns_left - 1
        reward = float((state.rewards or {}).get(0, 0.0)) if done else 0.0
        return StepResult(
            observation=self._observe(),
            reward=reward,
            done=bool(done),
            truncated=not done and self._turns_left == 0,
            valid=state.error_count <= refused_before,
            success=bool(done) and reward >= 1.0,
        )

    def _observe(self) -> Observation:
        """Collect the game's messages since the last time, without the player's own."""
        _, messages = self._game.get_observation()
        lines = [text for speaker, text, kind in messages if kind.name != "PLAYER_ACTION"]
        text = "\n".join(lines) or str((self._game.state.game_info.get(0) or {}).get("reason") or "")
        return Observation(messages=(Message(role="user", content=text),), state=state_key(self._game.state.game_state))

    def close(self) -> None:
        self._game = None


def start_game(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    """Make a game and reset it; raises ConfigError if it cannot be made, or not for one player."""
    arena = require("textarena", "textarena")
    game = name if name.endswith("-raw") else f"{name}-raw"  # without wrappers, which repeat all earlier messages
    with IsolatedGlobalRng(seed).drawing():
        with boundary(ConfigError, f"TextArena cannot make {name}"):
            env = arena.make(game, **settings)
        with boundary(ConfigError, f"TextArena's {name} cannot be played by one player"):
            env.reset(num_players=1, seed=seed)
    if not isinstance(env.state, arena.SinglePlayerState):
        raise ConfigError(f"TextArena's {name} is not a game for one player: take GuessTheNumber-v0, say")
    return env


def state_key(game_state: Any) -> str:
    """Hash all that a game keeps; equal states have equal hashes, in any process.

    >>> state_key({"seen": {2, 1}, "at": (0, 1)}) == state_key({"at": [0, 1], "seen": {1, 2}})
    True
    """
    return hashlib.blake2b(json.dumps(_plain(game_state)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ["map", sorted(([repr(key), _plain(item)] for key, item in value.items()), key=lambda pair: pair[0])]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_plain(item)) for item in value)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [type(value).__name__, _plain(vars(value)) if hasattr(value, "__dict__") else repr(value)]


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    env: str = "GuessTheNumber-v0",
    settings: dict[str, Any] = {},  # noqa: B006 - never changed; its type says what the option takes
    max_turns: int = 20,
) -> list[Task]:
    """Draw `size` seeds of the game `env`, made with the keyword arguments `settings`."""
    start_game(env, settings, seed=0)
    return seed_tasks(
        "textarena", size, seed, split=split, data={"env": env, "settings": settings, "max_turns": max_turns}
    )
