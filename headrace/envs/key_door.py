"""Two rooms told in text: fetch the key, open the locked door, reach the goal, before the turns run out.

A task's map is in `task.data["map"]`, one text line per row:

    #######     # wall, . floor, A agent, K key, D locked door, G goal
    #A..#.#
    #.K.D.#
    #...#G#
    #######

The agent sees where things are relative to itself ("key 1S 2E": one step south, two east) and which ways are blocked.
The reward is 1 when the goal is reached and 0 otherwise. Everything follows from the map: the seed of `reset` plays
no part. This file knows nothing of models or tokens beyond the closed list of words it speaks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from headrace.envs import grid
from headrace.envs.grid import MAX_SIDE, MOVES, Cell, neighbour, offset, the_one
from headrace.envs.task_generation import draw_tasks, turn_result, words_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Observation, StepResult, Task

ACTIONS = (*MOVES, "take key", "open door")  # among equally short solutions, the solver takes the first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoorMap:
    """The fixed parts of an episode. The door is a floor cell that is shut at first."""

    floor: frozenset[Cell]
    start: Cell
    key: Cell
    door: Cell
    goal: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoorState:
    """The changing parts of an episode: the agent's cell, whether it holds the key, whether the door is open."""

    cell: Cell
    held: bool = False
    opened: bool = False

    @property
    def name(self) -> str:
        """Anchor key of this state; states of different maps may share it."""
        return f"{self.cell[0]},{self.cell[1]} {'held' if self.held else 'lying'} {'open' if self.opened else 'locked'}"


# --- the rules, as pure functions ------------------------------------------------------------------------------------


def parse_map(rows: Sequence[str]) -> KeyDoorMap:
    """Parse a map; raises DataError on an unknown sign or when A, K, D or G is not there exactly once."""
    cells = grid.read_map(rows, "#.AKDG")
    places = {sign: the_one(cells, sign) for sign in "AKDG"}
    floor = frozenset(cell for cell, sign in cells.items() if sign != "#")
    return KeyDoorMap(floor=floor, start=places["A"], key=places["K"], door=places["D"], goal=places["G"])


def advance(layout: KeyDoorMap, state: KeyDoorState, action: str) -> KeyDoorState:
    """Return the state after an action of `ACTIONS`; one that is impossible here changes nothing."""
    if action in MOVES:
        cell = neighbour(state.cell, action)
        return (
            KeyDoorState(cell=cell, held=state.held, opened=state.opened) if _walkable(layout, state, cell) else state
        )
    if action == "take key":
        return replace(state, held=True) if state.cell == layout.key else state
    assert action == "open door"
    beside = any(neighbour(state.cell, move) == layout.door for move in MOVES)
    return replace(state, opened=True) if beside and state.held else state


def describe(layout: KeyDoorMap, state: KeyDoorState) -> str:
    """Describe to the agent what it sees, in the words of `vocabulary`."""
    key = "held" if state.held else offset(state.cell, layout.key)
    blocked = [move for move in MOVES if not _walkable(layout, state, neighbour(state.cell, move))]
    return " ".join(
        [
            f"key {key} door {offset(state.cell, layout.door)} {'open' if state.opened else 'locked'}",
            f"goal {offset(state.cell, layout.goal)} blocked",
            *(move[3].upper() for move in blocked),  # "go north" -> N
        ]
    )


def _walkable(layout: KeyDoorMap, state: KeyDoorState, cell: Cell) -> bool:
    return cell in layout.floor and (cell != layout.door or state.opened)


def vocabulary() -> tuple[str, ...]:
    """Return every word that the environment says or understands."""
    offsets = (f"{n}{way}" for n in range(MAX_SIDE) for way in "NESW" if n or way in "NE")
    actions = (word for action in ACTIONS for word in action.split())
    return tuple(dict.fromkeys((*actions, "held", "locked", "goal", "blocked", *"NESW", *offsets)))


# --- the solver ------------------------------------------------------------------------------------------------------


def distances(layout: KeyDoorMap) -> dict[KeyDoorState, int]:
    """Count the fewest actions to the goal from every reachable state from which the goal is reachable."""
    return grid.distances(
        KeyDoorState(cell=layout.start),
        lambda state: [advance(layout, state, action) for action in ACTIONS],
        lambda state: state.cell == layout.goal,
    )


def solve(layout: KeyDoorMap, state: KeyDoorState, to_goal: dict[KeyDoorState, int] | None = None) -> str | None:
    """Return the next action of a shortest solution; north and south come before east and west.

    `to_goal` is `distances(layout)`.
    """
    return grid.shortest_way(
        state, distances(layout) if to_goal is None else to_goal, partial(advance, layout), ACTIONS
    )


# --- the environment -------------------------------------------------------------------------------------------------


class KeyDoorEnv:
    """Plays key and door. `valid` means an action of `ACTIONS`; other and impossible actions cost a turn."""

    deterministic = True

    def __init__(self) -> None:
        self._layout: KeyDoorMap | None = None
        self._state = KeyDoorState(cell=(0, 0))
        self._turns_left = 0
        self._to_goal: dict[KeyDoorState, int] | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        if "map" not in task.data or "max_turns" not in task.data:
            raise DataError(f"task {task.id} is not of the environment key_door: its data need `map` and `max_turns`")
        self._layout = parse_map(task.data["map"])
        self._state = KeyDoorState(cell=self._layout.start)
        self._turns_left = int(task.data["max_turns"])
        self._to_goal = None
        return self._observe(self._layout)

    def step(self, action: str) -> StepResult:
        assert self._layout is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        words = words_of(action)
        valid = words in ACTIONS
        if valid:
            self._state = advance(self._layout, self._state, words)
        success = self._state.cell == self._layout.goal
        self._turns_left = 0 if success else self._turns_left - 1
        return turn_result(self._observe(self._layout), valid=valid, success=success, turns_left=self._turns_left)

    def best_action(self) -> str | None:
        """Return the next action of a shortest solution."""
        assert self._layout is not None, "reset comes before best_action"
        if self._to_goal is None:
            self._to_goal = distances(self._layout)
        return solve(self._layout, self._state, self._to_goal)

    def _observe(self, layout: KeyDoorMap) -> Observation:
        message = Message(role="user", content=describe(layout, self._state))
        return Observation(messages=(message,), state=self._state.name, actions=ACTIONS)

    def close(self) -> None:
        self._layout = None


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    room_width: int = 3,
    height: int = 4,
    walls: int = 0,
    max_turns: int = 14,
    min_optimal: int = 4,
    max_optimal: int = 9,
) -> list[Task]:
    """Draw `size` different maps whose shortest solution takes `min_optimal` to `max_optimal` actions.

    A map belongs to one split by its hash, whatever the seed, so no map is in both. `walls` floor cells are walled up
    at random. Raises ConfigError when that many maps cannot be found.
    """
    if room_width * height < 2 or room_width < 1 or 2 * room_width + 3 > MAX_SIDE or height + 2 > MAX_SIDE:
        raise ConfigError(f"rooms of {room_width} x {height} do not fit into a map of {MAX_SIDE} x {MAX_SIDE}")
    if max_turns < max_optimal:
        raise ConfigError(f"max_turns is {max_turns}: it must be at least max_optimal, {max_optimal}")
    return draw_tasks(
        "key_door",
        size,
        seed,
        split=split,
        draw=partial(_random_map, room_width=room_width, height=height, walls=walls),
        data_of=partial(_data_of, max_turns=max_turns, min_optimal=min_optimal, max_optimal=max_optimal),
        what="maps",
        remedy="ask for fewer, larger rooms, or more turns",
    )


def _data_of(text: str, *, max_turns: int, min_optimal: int, max_optimal: int) -> dict[str, Any] | None:
    rows = text.split("\n")
    layout = parse_map(rows)
    optimal = distances(layout).get(KeyDoorState(cell=layout.start)) if _at_least(layout) <= max_optimal else None
    if optimal is None or not min_optimal <= optimal <= max_optimal:
        return None
    return {"map": rows, "max_turns": max_turns, "optimal": optimal}


def _at_least(layout: KeyDoorMap) -> int:
    """Bound the shortest solution from below, quickly: the way past key and door if there were no walls."""
    ways = ((layout.start, layout.key), (layout.key, layout.door), (layout.door, layout.goal))
    return 2 + sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in ways)  # 2: take key, open door


def _random_map(rng: random.Random, *, room_width: int, height: int, walls: int) -> str:
    """Draw two rooms side by side; the agent and the key are in one of them, west or east, the goal in the other."""
    wall_column = room_width + 1
    rooms = [
        [(r, c) for r in range(1, height + 1) for c in range(first, first + room_width)]
        for first in (1, wall_column + 1)
    ]
    rng.shuffle(rooms)
    start, key = rng.sample(rooms[0], 2)
    signs = {cell: "." for room in rooms for cell in room}
    signs[(rng.randint(1, height), wall_column)] = "D"
    signs[rng.choice(rooms[1])] = "G"
    signs[key] = "K"
    signs[start] = "A"
    free = sorted(cell for cell, sign in signs.items() if sign == ".")
    for cell in rng.sample(free, min(walls, len(free))):
        signs[cell] = "#"
    return "\n".join("".join(signs.get((r, c), "#") for c in range(2 * room_width + 3)) for r in range(height + 2))
