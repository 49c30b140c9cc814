"""Push every box onto a target, before the turns run out; boxes cannot be pulled, so some pushes cannot be undone.

A task's map is in `task.data["map"]`, one text line per row:

    A..#        A agent, B box, T target, # wall, . floor; beyond the edge is wall
    .B..
    ..T.

The agent is told where boxes, targets, walls and edges are, seen from where it stands. The reward is 1 when every box
is on a target and 0 otherwise. Everything follows from the map: the seed of `reset` plays no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from headrace.envs.grid import (
    MAX_SIDE,
    MOVES,
    Cell,
    distance_words,
    distances,
    edges,
    neighbour,
    offsets,
    read_map,
    scattered,
    shortest_way,
    the_one,
)
from headrace.envs.task_generation import draw_tasks, turn_result, words_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Observation, StepResult, Task

ACTIONS = tuple(MOVES)  # among equally short solutions, the solver takes the first
MAX_BOXES = 3  # the solver looks at every state


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The fixed parts of an episode."""

    height: int
    width: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    start: "SokobanState"


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanState:
    """The changing parts of an episode: the cells of the agent and of the boxes, which are all alike."""

    cell: Cell
    boxes: frozenset[Cell]

    @property
    def name(self) -> str:
        """Anchor key of this state; states of different maps may share it."""
        return " ".join(f"{row},{column}" for row, column in (self.cell, *sorted(self.boxes)))


# --- the rules, as pure functions ------------------------------------------------------------------------------------


def parse_map(rows: Sequence[str]) -> Room:
    """Parse a map; raises DataError on an unknown sign, or not one A, or not as many boxes as targets."""
    cells = read_map(rows, "#.ABT")
    of = {sign: frozenset(cell for cell, value in cells.items() if value == sign) for sign in "#BT"}
    if not 0 < len(of["B"]) == len(of["T"]):
        raise DataError(f"the map has {len(of['B'])} boxes and {len(of['T'])} targets: put in one of each, or more")
    return Room(
        height=len(rows),
        width=len(rows[0]),
        walls=of["#"],
        targets=of["T"],
        start=SokobanState(cell=the_one(cells, "A"), boxes=of["B"]),
    )


def advance(room: Room, state: SokobanState, move: str) -> SokobanState:
    """Return the state after a move; one against a wall, or a box that cannot be pushed, changes nothing."""
    cell = neighbour(state.cell, move)
    if not _is_floor(room, cell):
        return state
    if cell not in state.boxes:
        return SokobanState(cell=cell, boxes=state.boxes)
    beyond = neighbour(cell, move)
    if beyond in state.boxes or not _is_floor(room, beyond):
        return state
    return SokobanState(cell=cell, boxes=state.boxes - {cell} | {beyond})


def is_solved(room: Room, state: SokobanState) -> bool:
    """Tell whether every box is on a target."""
    return state.boxes == room.targets


def describe(room: Room, state: SokobanState) -> str:
    """Describe to the agent what it sees, in the words of `vocabulary`."""
    here = state.cell
    return (
        f"boxes {offsets(here, state.boxes)} targets {offsets(here, room.targets)} "
        f"walls {offsets(here, room.walls)} edges {edges(here, room.height, room.width)}"
    )


def _is_floor(room: Room, cell: Cell) -> bool:
    return 0 <= cell[0] < room.height and 0 <= cell[1] < room.width and cell not in room.walls


def vocabulary() -> tuple[str, ...]:
    """Return every word that the environment says or understands."""
    actions = (word for action in ACTIONS for word in action.split())
    return tuple(dict.fromkeys((*actions, "boxes", "targets", "walls", "none", "edges", *distance_words())))


def pushes_left(room: Room) -> dict[SokobanState, int]:
    """Count the fewest moves to the end from every reachable state from which the room can be solved."""
    return distances(
        room.start,
        lambda state: [advance(room, state, move) for move in ACTIONS],
        lambda state: is_solved(room, state),
    )


# --- the environment -------------------------------------------------------------------------------------------------


class SokobanEnv:
    """Plays Sokoban. `valid` means an action of `ACTIONS`; other and impossible actions cost a turn."""

    deterministic = True

    def __init__(self) -> None:
        self._room: Room | None = None
        self._state = SokobanState(cell=(0, 0), boxes=frozenset())
        self._turns_left = 0
        self._left: dict[SokobanState, int] | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        if not {"map", "max_turns"} <= task.data.keys():
            raise DataError(f"task {task.id} is not of the environment sokoban: its data need `map` and `max_turns`")
        self._room = parse_map(task.data["map"])
        self._state = self._room.start
        self._turns_left = int(task.data["max_turns"])
        self._left = None
        return self._observe(self._room)

    def step(self, action: str) -> StepResult:
        assert self._room is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        words = words_of(action)
        valid = words in ACTIONS
        if valid:
            self._state = advance(self._room, self._state, words)
        success = is_solved(self._room, self._state)
        self._turns_left = 0 if success else self._turns_left - 1
        return turn_result(self._observe(self._room), valid=valid, success=success, turns_left=self._turns_left)

    def best_action(self) -> str | None:
        """Return the first move of a shortest solution, or None once a box is stuck."""
        assert self._room is not None, "reset comes before best_action"
        if self._left is None:
            self._left = pushes_left(self._room)
        return shortest_way(self._state, self._left, partial(advance, self._room), ACTIONS)

    def _observe(self, room: Room) -> Observation:
        message = Message(role="user", content=describe(room, self._state))
        return Observation(messages=(message,), state=self._state.name, actions=ACTIONS)

    def close(self) -> None:
        self._room = None


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    height: int = 4,
    width: int = 4,
    boxes: int = 1,
    walls: int = 2,
    max_turns: int = 16,
    min_optimal: int = 2,
    max_optimal: int = 10,
) -> list[Task]:
    """Draw `size` different rooms whose shortest solution takes `min_optimal` to `max_optimal` moves."""
    if not 1 <= height <= MAX_SIDE or not 1 <= width <= MAX_SIDE or height * width < 2 * boxes + walls + 1:
        raise ConfigError(f"{boxes} boxes and {walls} walls do not fit into a room of {height} x {width}")
    if not 1 <= boxes <= MAX_BOXES or walls < 0:
        raise ConfigError(f"there are {boxes} boxes and {walls} walls: write 1 to {MAX_BOXES} boxes, 0 or more walls")
    if max_turns < max_optimal:
        raise ConfigError(f"max_turns is {max_turns}: it must be at least max_optimal, {max_optimal}")
    return draw_tasks(
        "sokoban",
        size,
        seed,
        split=split,
        draw=partial(scattered, signs="A" + "B" * boxes + "T" * boxes + "#" * walls, height=height, width=width),
        data_of=partial(_data_of, max_turns=max_turns, min_optimal=min_optimal, max_optimal=max_optimal),
        what="maps",
        remedy="ask for fewer, a larger room, fewer walls, or more turns",
    )


def _data_of(text: str, *, max_turns: int, min_optimal: int, max_optimal: int) -> dict[str, Any] | None:
    rows = text.split("\n")
    room = parse_map(rows)
    optimal = pushes_left(room).get(room.start)
    if optimal is None or not min_optimal <= optimal <= max_optimal:
        return None
    return {"map": rows, "max_turns": max_turns, "optimal": optimal}
