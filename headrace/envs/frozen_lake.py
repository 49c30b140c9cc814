"""Cross a frozen lake without falling into a hole; on slippery ice a move may go sideways instead.

A task's map is in `task.data["map"]`, one text line per row:

    A...        A agent, . ice, O hole, G goal; no move leads beyond the edge
    .O.O
    ...O
    O..G

With probability `task.data["slip"]` a move goes to the left or right of its direction, each as likely
(2/3 is the classic slippery lake). The slips follow from the seed of `reset` and the number of the turn alone. The
agent is told where the goal, the holes and the edges are, seen from where it stands. The reward is 1 at the goal.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from headrace.algo.random import derive_seed
from headrace.envs.grid import (
    MAX_SIDE,
    MOVES,
    Cell,
    distance_words,
    distances,
    edges,
    neighbour,
    offset,
    offsets,
    read_map,
    scattered,
    the_one,
)
from headrace.envs.task_generation import draw_tasks, turn_result, words_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Observation, StepResult, Task

ACTIONS = tuple(MOVES)  # among equally good moves, the solver takes the first
_SIDEWAYS = {
    move: ("go east", "go west") if move in ("go north", "go south") else ("go north", "go south") for move in MOVES
}
Value = tuple[float, float]  # probability to reach the goal, and minus the turns it is expected to take


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """The fixed parts of an episode."""

    height: int
    width: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]


# --- the rules, as pure functions ------------------------------------------------------------------------------------


def parse_map(rows: Sequence[str]) -> Lake:
    """Parse a map; raises DataError on an unknown sign or when A or G is not there exactly once."""
    cells = read_map(rows, ".AGO")
    return Lake(
        height=len(rows),
        width=len(rows[0]),
        start=the_one(cells, "A"),
        goal=the_one(cells, "G"),
        holes=frozenset(cell for cell, sign in cells.items() if sign == "O"),
    )


def advance(lake: Lake, cell: Cell, move: str) -> Cell:
    """Return the cell that a move leads to if it does not slip; at the edge it leads nowhere."""
    row, column = neighbour(cell, move)
    return (row, column) if 0 <= row < lake.height and 0 <= column < lake.width else cell


def outcomes(lake: Lake, cell: Cell, move: str, slip: float) -> tuple[tuple[float, Cell], ...]:
    """Return where a move may lead, with probabilities: straight, and to either side."""
    straight = (1.0 - slip, advance(lake, cell, move))
    return (straight, *((slip / 2, advance(lake, cell, side)) for side in _SIDEWAYS[move])) if slip else (straight,)


def describe(lake: Lake, cell: Cell) -> str:
    """Describe to the agent what it sees, in the words of `vocabulary`."""
    return (
        f"goal {offset(cell, lake.goal)} holes {offsets(cell, lake.holes)} edges {edges(cell, lake.height, lake.width)}"
    )


def vocabulary() -> tuple[str, ...]:
    """Return every word that the environment says or understands."""
    actions = (word for action in ACTIONS for word in action.split())
    return tuple(dict.fromkeys((*actions, "goal", "holes", "none", "edges", *distance_words())))


# --- the solver ------------------------------------------------------------------------------------------------------


def fewest_moves(lake: Lake) -> int | None:
    """Count the moves to the goal if none of them slips; return None if holes are in the way."""

    def after(cell: Cell) -> list[Cell]:
        return [] if cell in lake.holes else [advance(lake, cell, move) for move in ACTIONS]

    return distances(lake.start, after, lambda cell: cell == lake.goal).get(lake.start)


def plan(lake: Lake, turns: int, slip: float) -> list[dict[Cell, str]]:
    """Compute the best move with 0, 1, ..., `turns` turns left, for every cell from which the goal is reachable.

    V_0(s) = [s is the goal], V_n(s) = max_a E[V_(n-1)(s')]: the probability to arrive in time, and among moves that
    are equal in that, the one that arrives in fewer turns.
    """
    cells = [(r, c) for r in range(lake.height) for c in range(lake.width)]
    open_cells = [cell for cell in cells if cell != lake.goal and cell not in lake.holes]
    values: dict[Cell, Value] = {cell: (float(cell == lake.goal), 0.0) for cell in cells}
    moves: list[dict[Cell, str]] = [{}]
    for _ in range(turns):
        worth = {cell: {move: _expected(lake, cell, move, slip, values) for move in ACTIONS} for cell in open_cells}
        best = {cell: max(ACTIONS, key=lambda move, of=of: of[move]) for cell, of in worth.items()}  # type: ignore[misc]
        values = {**values, **{cell: worth[cell][move] for cell, move in best.items()}}
        moves.append({cell: move for cell, move in best.items() if values[cell][0] > 0.0})
    return moves


def _expected(lake: Lake, cell: Cell, move: str, slip: float, values: dict[Cell, Value]) -> Value:
    ways = [(share, values[to]) for share, to in outcomes(lake, cell, move, slip)]
    return sum(share * value[0] for share, value in ways), sum(share * value[1] for share, value in ways) - 1.0


# --- the environment -------------------------------------------------------------------------------------------------


class FrozenLakeEnv:
    """Plays the frozen lake. `valid` means an action of `ACTIONS`; anything else costs a turn and moves nothing."""

    deterministic = True  # the slips follow from the seed

    def __init__(self) -> None:
        self._lake: Lake | None = None
        self._cell: Cell = (0, 0)
        self._slip = 0.0
        self._turns_left = 0
        self._rng = random.Random(0)
        self._plan: list[dict[Cell, str]] | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        if not {"map", "max_turns", "slip"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment frozen_lake: its data need `map`, `max_turns`, `slip`"
            )
        self._lake = parse_map(task.data["map"])
        self._cell = self._lake.start
        self._slip = float(task.data["slip"])
        self._turns_left = int(task.data["max_turns"])
        self._rng = random.Random(derive_seed("frozen_lake slips", seed))
        self._plan = None
        return self._observe(self._lake)

    def step(self, action: str) -> StepResult:
        assert self._lake is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        words = words_of(action)
        valid = words in ACTIONS
        drawn, side = self._rng.random(), self._rng.randrange(2)  # always two, so that the draws of turn n are its own
        if valid:
            move = _SIDEWAYS[words][side] if drawn < self._slip else words
            self._cell = advance(self._lake, self._cell, move)
        success, sunk = self._cell == self._lake.goal, self._cell in self._lake.holes
        self._turns_left = 0 if success or sunk else self._turns_left - 1
        return turn_result(
            self._observe(self._lake), valid=valid, success=success, failed=sunk, turns_left=self._turns_left
        )

    def best_action(self) -> str | None:
        """Return the move that most likely leads to the goal in the turns that are left."""
        assert self._lake is not None, "reset comes before best_action"
        if self._plan is None:
            self._plan = plan(self._lake, self._turns_left, self._slip)
        return self._plan[self._turns_left].get(self._cell)

    def _observe(self, lake: Lake) -> Observation:
        message = Message(role="user", content=describe(lake, self._cell))
        return Observation(messages=(message,), state=f"{self._cell[0]},{self._cell[1]}", actions=ACTIONS)

    def close(self) -> None:
        self._lake = None


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    side: int = 4,
    holes: int = 4,
    slip: float = 0.0,
    max_turns: int = 12,
    min_optimal: int = 3,
) -> list[Task]:
    """Draw `size` different lakes whose shortest path has `min_optimal` moves or more, and at most `max_turns`."""
    if not 2 <= side <= MAX_SIDE or not 0 <= holes <= side * side - 2:
        raise ConfigError(f"{holes} holes do not fit into a lake of side {side}: a side is 2 to {MAX_SIDE} long")
    if not 0.0 <= slip < 1.0:
        raise ConfigError(f"slip is {slip}: write a number from 0 to below 1, 0.667 for the classic slippery lake")
    return draw_tasks(
        "frozen_lake",
        size,
        seed,
        split=split,
        draw=partial(scattered, signs="AG" + "O" * holes, height=side, width=side),
        data_of=partial(_data_of, slip=slip, max_turns=max_turns, min_optimal=min_optimal),
        what="maps",
        remedy="ask for fewer, a longer side, fewer holes, or more turns",
    )


def _data_of(text: str, *, slip: float, max_turns: int, min_optimal: int) -> dict[str, Any] | None:
    rows = text.split("\n")
    optimal = fewest_moves(parse_map(rows))
    if optimal is None or not min_optimal <= optimal <= max_turns:
        return None
    return {"map": rows, "max_turns": max_turns, "slip": slip, "optimal": optimal}
