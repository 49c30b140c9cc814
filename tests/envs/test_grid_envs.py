"""Frozen lake and Sokoban: rules by hand, solvers against brute force, states that are equal only if they are."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats, integers

from headrace.envs import ENVIRONMENTS, environment_demonstrations, environment_tasks, frozen_lake, sokoban
from headrace.envs.frozen_lake import FrozenLakeEnv
from headrace.envs.grid import MOVES, Cell, scattered
from headrace.envs.sokoban import SokobanEnv, SokobanState
from headrace.errors import ConfigError, DataError
from headrace.types import Task

LAKE = [
    "A..",
    ".O.",
    "..G",
]
ROOM = [
    "A..#",
    ".B..",
    "..T.",
]


def lake_task(rows: list[str], *, slip: float = 0.0, max_turns: int = 10) -> Task:
    return Task(id="hand", data={"map": rows, "slip": slip, "max_turns": max_turns})


def room_task(rows: list[str], max_turns: int = 10) -> Task:
    return Task(id="hand", data={"map": rows, "max_turns": max_turns})


# --- frozen lake -----------------------------------------------------------------------------------------------------


def test_the_lake_is_told_from_where_the_agent_stands() -> None:
    env = FrozenLakeEnv()
    first = env.reset(lake_task(LAKE), seed=0)
    assert first.messages[0].content == "goal 2S 2E holes 1S 1E edges 0N 2S 2E 0W"
    assert first.state == "0,0"
    result = env.step("go east")
    assert result.observation.messages[0].content == "goal 2S 1E holes 1S 0E edges 0N 2S 1E 1W"
    assert result.observation.state == "0,1"


def test_a_lake_without_holes_says_so() -> None:
    first = FrozenLakeEnv().reset(lake_task(["A.G"]), seed=0)
    assert first.messages[0].content == "goal 0N 2E holes none edges 0N 0S 2E 0W"


def test_a_hole_ends_the_episode_without_reward_and_the_goal_with_it() -> None:
    env = FrozenLakeEnv()
    env.reset(lake_task(LAKE), seed=0)
    env.step("go east")
    fallen = env.step("go south")
    assert (fallen.done, fallen.reward, fallen.success, fallen.truncated) == (True, 0.0, False, False)
    env.reset(lake_task(LAKE), seed=0)
    results = [env.step(action) for action in ("go south", "go south", "go east", "go east")]
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 3 + [(True, 1.0, True)]


def test_the_edge_stops_and_malformed_actions_cost_a_turn() -> None:
    env = FrozenLakeEnv()
    first = env.reset(lake_task(LAKE, max_turns=3), seed=0)
    assert env.step("go north").observation == first
    malformed = env.step("north")
    assert (malformed.valid, malformed.observation) == (False, first)
    assert env.step("go west").truncated


def brute_force_lake(lake: frozen_lake.Lake, cell: Cell, turns: int, slip: float) -> float:
    """The probability to arrive in time, by following every way to its end."""
    if cell == lake.goal:
        return 1.0
    if cell in lake.holes or turns == 0:
        return 0.0
    return max(
        sum(share * brute_force_lake(lake, to, turns - 1, slip) for share, to in where(lake, cell, move, slip))
        for move in MOVES
    )


def where(lake: frozen_lake.Lake, cell: Cell, move: str, slip: float) -> list[tuple[float, Cell]]:
    """Written another way than `outcomes`: turn the direction by a quarter, clamp at the edges."""
    south, east = MOVES[move]
    ways = [(1 - slip, (south, east)), (slip / 2, (east, south)), (slip / 2, (-east, -south))]
    return [
        (share, (min(max(cell[0] + s, 0), lake.height - 1), min(max(cell[1] + e, 0), lake.width - 1)))
        for share, (s, e) in ways
    ]


def value_of_plan(lake: frozen_lake.Lake, cell: Cell, turns: int, slip: float, moves: list[dict[Cell, str]]) -> float:
    """The probability to arrive in time by the solver's moves."""
    if cell == lake.goal:
        return 1.0
    if cell in lake.holes or cell not in moves[turns]:
        return 0.0
    return sum(
        share * value_of_plan(lake, to, turns - 1, slip, moves)
        for share, to in where(lake, cell, moves[turns][cell], slip)
    )


@settings(max_examples=15, deadline=None)
@given(integers(0, 10_000), integers(0, 3), floats(0.0, 0.9))
def test_no_way_over_the_ice_is_surer_than_the_solvers(seed: int, holes: int, slip: float) -> None:
    rows = scattered(random.Random(seed), signs="AG" + "O" * holes, height=3, width=3).split("\n")
    lake, turns = frozen_lake.parse_map(rows), 4
    moves = frozen_lake.plan(lake, turns, slip)
    best = brute_force_lake(lake, lake.start, turns, slip)
    assert value_of_plan(lake, lake.start, turns, slip, moves) == pytest.approx(best, abs=1e-12)


def fewest_by_words(rows: list[str], limit: int) -> int | None:
    """The shortest sequence of moves that the environment calls a success, by trying all of them, short ones first."""
    for length in range(1, limit + 1):
        for moves in product(MOVES, repeat=length):
            env = FrozenLakeEnv()
            env.reset(lake_task(rows), seed=0)
            results = []
            for move in moves:
                results.append(env.step(move))
                if results[-1].done:
                    break
            if results[-1].success:
                return length
    return None


@settings(max_examples=8, deadline=None)
@given(integers(0, 10_000), integers(0, 4))
def test_on_dry_ice_the_solver_takes_the_fewest_moves(seed: int, holes: int) -> None:
    rows = scattered(random.Random(seed), signs="AG" + "O" * holes, height=3, width=3).split("\n")
    fewest = fewest_by_words(rows, limit=5)
    known = frozen_lake.fewest_moves(frozen_lake.parse_map(rows))
    assert known == fewest or (fewest is None and (known is None or known > 5))
    if fewest is None:
        return
    env = FrozenLakeEnv()
    env.reset(lake_task(rows), seed=0)
    for turn in range(fewest):
        action = env.best_action()
        assert action is not None
        assert env.step(action).success == (turn + 1 == fewest)


def test_slips_follow_from_the_seed_and_have_the_rate_asked_for() -> None:
    rows = [".........", "....A....", "........G"]
    ended: dict[str | None, int] = {}
    for seed in range(2000):
        env = FrozenLakeEnv()
        env.reset(lake_task(rows, slip=0.5), seed)
        state = env.step("go north").observation.state
        env.reset(lake_task(rows, slip=0.5), seed)
        assert env.step("go north").observation.state == state
        ended[state] = ended.get(state, 0) + 1
    assert set(ended) == {"0,4", "1,3", "1,5"}  # as meant, west, east; never back
    assert ended["0,4"] / 2000 == pytest.approx(0.5, abs=0.05)
    assert ended["1,3"] / 2000 == pytest.approx(0.25, abs=0.05)


# --- sokoban ---------------------------------------------------------------------------------------------------------


def test_the_room_is_told_and_solved_as_worked_out_by_hand() -> None:
    env = SokobanEnv()
    first = env.reset(room_task(ROOM), seed=0)
    assert first.messages[0].content == "boxes 1S 1E targets 2S 2E walls 0N 3E edges 0N 2S 3E 0W"
    assert first.state == "0,0 1,1"
    # push it east from the west side, walk around by the north, push it south
    solution = ["go south", "go east", "go north", "go east", "go south"]
    results = [env.step(action) for action in solution]
    assert [result.observation.state for result in results] == [
        "1,0 1,1", "1,1 1,2", "0,1 1,2", "0,2 1,2", "1,2 2,2",
    ]  # fmt: skip
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 4 + [(True, 1.0, True)]
    assert sokoban.pushes_left(sokoban.parse_map(ROOM))[SokobanState(cell=(0, 0), boxes=frozenset({(1, 1)}))] == 5


@pytest.mark.parametrize(
    ("rows", "move"),
    [
        (["A#BT"], "go east"),  # a wall
        (["ABB", "TT."], "go east"),  # two boxes in a row
        (["TAB"], "go east"),  # a box at the edge
        (["AB#T"], "go east"),  # a box at a wall
        (["TBA"], "go north"),  # the edge
    ],
)
def test_what_cannot_be_pushed_stays(rows: list[str], move: str) -> None:
    env = SokobanEnv()
    first = env.reset(room_task(rows), seed=0)
    result = env.step(move)
    assert result.valid
    assert result.observation == first


def test_a_box_in_a_corner_leaves_the_solver_without_a_move() -> None:
    env = SokobanEnv()
    env.reset(room_task(["AB..", "..T."]), seed=0)
    assert env.best_action() is None  # the box is on the north edge, it can only go east and west
    assert not env.step("go east").done


@settings(max_examples=10, deadline=None)
@given(integers(0, 10_000), integers(1, 2))
def test_rooms_are_solved_in_the_fewest_moves(seed: int, boxes: int) -> None:
    [task] = sokoban.generate_tasks(1, seed, boxes=boxes, walls=1)
    room = sokoban.parse_map(task.data["map"])
    level, seen, count = {room.start}, set[SokobanState](), 0
    while not any(sokoban.is_solved(room, state) for state in level):
        seen |= level
        level = {sokoban.advance(room, state, move) for state in level for move in MOVES} - seen
        count += 1
    assert count == task.data["optimal"]
    env = SokobanEnv()
    env.reset(task, seed=0)
    for turn in range(count):
        action = env.best_action()
        assert action is not None
        assert env.step(action).success == (turn + 1 == count)


# --- both ------------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(integers(0, 1000))
def test_state_names_of_a_room_are_equal_only_if_the_states_are(seed: int) -> None:
    [task] = sokoban.generate_tasks(1, seed, boxes=2, walls=0, height=3, width=4)
    states = list(sokoban.pushes_left(sokoban.parse_map(task.data["map"])))
    assert len({state.name for state in states}) == len(states) > 10


@pytest.mark.parametrize(
    ("read", "rows", "says"),
    [
        (frozen_lake.parse_map, ["A.."], "G 0 times"),
        (frozen_lake.parse_map, ["AAG"], "A 2 times"),
        (frozen_lake.parse_map, ["A.G", ".."], "equally long"),
        (frozen_lake.parse_map, ["AG" + "." * 9], "larger than 10 x 10"),
        (frozen_lake.parse_map, ["AGX"], "the sign 'X'"),
        (frozen_lake.parse_map, [], "equally long"),
        (sokoban.parse_map, ["ABT", "B.."], "2 boxes and 1 targets"),
        (sokoban.parse_map, ["A.."], "0 boxes and 0 targets"),
        (sokoban.parse_map, ["BT."], "A 0 times"),
    ],
)
def test_a_map_that_is_wrong_is_refused_with_a_reason(read: object, rows: list[str], says: str) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=says):
        read(rows)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("frozen_lake", {"slip": 1.0}, "0.667 for the classic"),
        ("frozen_lake", {"side": 11}, "2 to 10 long"),
        ("frozen_lake", {"side": 2, "holes": 3}, "do not fit"),
        ("frozen_lake", {"side": 2, "holes": 0}, "different maps were found"),
        ("sokoban", {"boxes": 4}, "1 to 3 boxes"),
        ("sokoban", {"height": 1, "width": 3, "walls": 2}, "do not fit"),
        ("sokoban", {"max_turns": 9}, "at least max_optimal"),
        ("sokoban", {"height": 1, "width": 4, "walls": 0}, "different maps were found"),
        ("sokoban", {"split": "all"}, 'write "train" or "held_out"'),
    ],
)
def test_options_that_are_wrong_are_refused_with_a_reason(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks(name, 50, 0, options)


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_a_task_of_another_world_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"not of the environment {name}"):
        ENVIRONMENTS[name].make_env().reset(Task(id="x"), seed=0)


def test_solvers_fail_on_slippery_ice_only_by_bad_luck() -> None:
    options = {"slip": 0.3, "max_turns": 20}
    talks = environment_demonstrations("frozen_lake", 200, 0, options)
    tasks = environment_tasks("frozen_lake", 200, 0, options)
    lengths = [len(talk) // 2 for talk in talks]
    assert sum(length > task.data["optimal"] for length, task in zip(lengths, tasks, strict=True)) > 50
