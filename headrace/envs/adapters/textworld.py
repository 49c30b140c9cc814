"""Play text adventures that TextWorld generates: rooms, things, and a quest that is told at the start.

A task's seed decides the game; the seed of `reset` plays no part. The state is the set of all facts of the game, the
actions are the commands that are possible. Games are played by their logic, without compiling them: the text is
written here, from the facts that the player can see. The reward is 1 when the quest is done. The game knows the next
command of a solution from every state that has one, which gives demonstrations.
"""

import hashlib
import tempfile
import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headrace.envs.adapters.optional_package import require, seed_tasks
from headrace.errors import ConfigError, DataError, boundary
from headrace.types import Message, Observation, StepResult, Task

DIRECTIONS = ("north", "south", "east", "west")
_IDLE = ("examine ", "inventory", "look")  # commands that change nothing
_MAKING = threading.Lock()  # TextWorld's generator keeps global state


class TextWorldGameEnv:
    """Plays a TextWorld game. `valid` means a possible command; anything else costs a turn and changes nothing."""

    deterministic = True
    blocking = True  # a game takes tenths of a second to make

    def __init__(self) -> None:
        self._play: Any = None
        self._state: Any = None
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        keys = ("seed", "rooms", "objects", "quest_length")
        if not {*keys, "max_turns"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment textworld: its data need {', '.join(keys)} and max_turns"
            )
        self._play = start_game(*(int(task.data[key]) for key in keys))
        self._state = self._play.reset()
        self._turns_left = int(task.data["max_turns"])
        return self._observe(f"{self._state['objective']}\n\n")

    def step(self, action: str) -> StepResult:
        assert self._play is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        command = " ".join(action.split())
        valid = command in commands(self._state)
        if valid:
            self._state, _, _ = self._play.step(command)
        won, lost = bool(self._state["won"]), bool(self._state["lost"])
        self._turns_left = 0 if won or lost else self._turns_left - 1
        return StepResult(
            observation=self._observe(""),
            reward=float(won),
            done=won or lost,
            truncated=not won and not lost and self._turns_left == 0,
            valid=valid,
            success=won,
        )

    def best_action(self) -> str | None:
        """Return the next command of the game's own solution, or None if it has none."""
        way = self._state["policy_commands"]
        return str(way[0]) if way else None

    def _observe(self, opening: str) -> Observation:
        facts = sorted(str(fact) for fact in self._state["_facts"])
        return Observation(
            messages=(Message(role="user", content=opening + describe(self._state)),),
            state=hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest(),
            actions=commands(self._state),
        )

    def close(self) -> None:
        self._play = None


# --- what is shown ---------------------------------------------------------------------------------------------------


def commands(state: Any) -> tuple[str, ...]:
    """Return the possible commands that change something."""
    return tuple(command for command in state["admissible_commands"] if not command.startswith(_IDLE))


def describe(state: Any) -> str:
    """Describe the room, what is in it, the ways out, what is carried and what can be done."""
    facts = [(fact.name, tuple(variable.name for variable in fact.arguments)) for fact in state["_facts"]]
    names = state["game"].infos
    [here] = [places[1] for name, places in facts if name == "at" and places[0] == "P"]
    ways = [way for way in DIRECTIONS if any(name == f"{way}_of" and places[1] == here for name, places in facts)]
    return "\n".join(
        (
            f"You are in the {names[here].name}.",
            f"You see: {_listing(facts, names, _visible(facts, here))}.",
            f"Ways: {', '.join(ways) or 'none'}.",
            f"You carry: {_listing(facts, names, [p[0] for name, p in facts if name == 'in' and p[1] == 'I'])}.",
            f"You can: {', '.join(commands(state)) or 'nothing'}.",
        )
    )


def _visible(facts: list[tuple[str, tuple[str, ...]]], here: str) -> list[str]:
    """List the things and doors of the room, and the things on them, or in them if they are open."""
    in_room = [places[0] for name, places in facts if name == "at" and places[1] == here and places[0] != "P"]
    in_room += [places[1] for name, places in facts if name == "link" and places[0] == here]
    opened = {places[0] for name, places in facts if name == "open"}
    inside = [places[0] for name, places in facts if name == "in" and places[1] in in_room and places[1] in opened]
    return [*in_room, *inside, *(places[0] for name, places in facts if name == "on" and places[1] in in_room)]


def _listing(facts: list[tuple[str, tuple[str, ...]]], names: Any, things: Iterable[str]) -> str:
    def describe_thing(thing: str) -> str:
        marks = [name for name, places in facts if places == (thing,) and name in ("open", "closed", "locked")]
        lies = [(name, p[1]) for name, p in facts if name in ("in", "on") and p[0] == thing and p[1] != "I"]
        return " ".join([*marks, names[thing].name, *(f"{where} the {names[place].name}" for where, place in lies)])

    return ", ".join(sorted(describe_thing(thing) for thing in things)) or "nothing"


# --- games and tasks -------------------------------------------------------------------------------------------------


def start_game(seed: int, rooms: int, objects: int, quest_length: int) -> Any:
    """Make the game of a seed, to be reset and played; raises ConfigError when TextWorld cannot make it."""
    with _MAKING:
        return _make_game(seed, rooms, objects, quest_length).copy()


@lru_cache(maxsize=64)
def _make_game(seed: int, rooms: int, objects: int, quest_length: int) -> Any:
    textworld = require("textworld", "textworld")
    options = textworld.GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = rooms, objects, quest_length, seed
    infos = textworld.EnvInfos(policy_commands=True, admissible_commands=True)
    problem = f"TextWorld cannot make a game of {rooms} rooms, {objects} objects and {quest_length} commands"
    with boundary(ConfigError, problem), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "game.json"
        textworld.generator.make_game(options).save(str(file))
        play = textworld.start(str(file), infos)
        play.reset()
        return play


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    rooms: int = 3,
    objects: int = 4,
    quest_length: int = 3,
    max_turns: int = 12,
) -> list[Task]:
    """Draw `size` seeds of games with so many rooms and objects, whose quest takes `quest_length` commands."""
    if min(rooms, objects, quest_length) < 1 or max_turns < quest_length:
        raise ConfigError("rooms, objects and quest_length must be at least 1, and max_turns at least quest_length")
    start_game(0, rooms, objects, quest_length)
    data = {"rooms": rooms, "objects": objects, "quest_length": quest_length, "max_turns": max_turns}
    return seed_tasks("textworld", size, seed, split=split, data=data)
