"""Cells and directions of grids, the words that describe them, and shortest paths through any state graph."""

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from headrace.errors import DataError

Cell = tuple[int, int]  # row, column
S = TypeVar("S", bound=Hashable)

MOVES: dict[str, Cell] = {"go north": (-1, 0), "go south": (1, 0), "go east": (0, 1), "go west": (0, -1)}
MAX_SIDE = 10  # of a map: distances are one digit


def neighbour(cell: Cell, move: str) -> Cell:
    """Return the cell that a move leads to."""
    return (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])


def offset(here: Cell, there: Cell) -> str:
    """Describe where `there` is, seen from `here`: "1S 2E" is one step south and two east."""
    south, east = there[0] - here[0], there[1] - here[1]
    return f"{abs(south)}{'S' if south > 0 else 'N'} {abs(east)}{'W' if east < 0 else 'E'}"


def offsets(here: Cell, cells: Iterable[Cell]) -> str:
    """Describe where the cells are, row by row; "none" if there are none."""
    return " ".join(offset(here, cell) for cell in sorted(cells)) or "none"


def edges(cell: Cell, height: int, width: int) -> str:
    """Describe how many steps it is to the last cell in each direction, walls or not."""
    row, column = cell
    return f"{row}N {height - 1 - row}S {width - 1 - column}E {column}W"


def distance_words() -> tuple[str, ...]:
    """Return every word that `offset` and `edges` use."""
    return tuple(f"{n}{way}" for n in range(MAX_SIDE) for way in "NSEW")


def read_map(rows: Sequence[str], signs: str) -> dict[Cell, str]:
    """Return the sign of every cell; raises DataError on other signs, ragged rows or a map that is too large."""
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    unknown = sorted(set(cells.values()) - set(signs))
    if unknown:
        raise DataError(f"the map has the sign {unknown[0]!r}: use only {' '.join(signs)}")
    if not cells or len({len(row) for row in rows}) != 1:
        raise DataError("the map's rows are not equally long: give every row the same number of signs")
    if len(rows) > MAX_SIDE or len(rows[0]) > MAX_SIDE:
        raise DataError(f"the map is larger than {MAX_SIDE} x {MAX_SIDE}: make it smaller")
    return cells


def scattered(rng: random.Random, *, signs: str, height: int, width: int) -> str:
    """Draw a map with each of `signs` in a cell of its own, and "." in all others."""
    places = rng.sample([(r, c) for r in range(height) for c in range(width)], len(signs))
    placed = dict(zip(places, signs, strict=True))
    return "\n".join("".join(placed.get((r, c), ".") for c in range(width)) for r in range(height))


def the_one(cells: dict[Cell, str], sign: str) -> Cell:
    """Return the only cell with that sign; raises DataError when there is none, or more than one."""
    places = [cell for cell, value in cells.items() if value == sign]
    if len(places) != 1:
        raise DataError(f"the map has {sign} {len(places)} times: put it there exactly once")
    return places[0]


def distances(start: S, after: Callable[[S], Iterable[S]], is_goal: Callable[[S], bool]) -> dict[S, int]:
    """Count the fewest actions to a goal, for every state that is reachable from `start` and from which a goal is.

    `after` returns the states that one action leads to; it is not called on goals, where episodes end.
    """
    before: dict[S, list[S]] = {start: []}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for following in () if is_goal(state) else after(state):
            if following not in before:
                before[following] = []
                queue.append(following)
            before[following].append(state)
    reached = {state: 0 for state in before if is_goal(state)}
    queue = deque(reached)
    while queue:
        state = queue.popleft()
        for earlier in before[state]:
            if earlier not in reached:
                reached[earlier] = reached[state] + 1
                queue.append(earlier)
    return reached


def shortest_way(
    state: S, to_goal: Mapping[S, int], advance: Callable[[S, str], S], actions: Sequence[str]
) -> str | None:
    """Return the first of `actions` that brings the goal nearer, or None at a goal and where none is reachable.

    `to_goal` is the result of `distances`.
    """
    left = to_goal.get(state)
    if not left:
        return None
    return next(action for action in actions if to_goal.get(advance(state, action)) == left - 1)
