"""The built-in worlds: rules by hand, the solver against brute force, splits that never meet."""

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from

from headrace.envs import BUILT_IN, ENVIRONMENTS, environment_demonstrations, environment_tasks, key_door
from headrace.envs.key_door import ACTIONS, KeyDoorEnv, KeyDoorState, advance, describe, distances, parse_map, solve
from headrace.envs.single_turn import SingleTurnEnv
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Task

MAP = [
    "#######",
    "#A.#.G#",
    "#K.D..#",
    "#######",
]
# south, take; east (beside the door), open; east (through it), east, north, east
SOLUTION = ["go south", "take key", "go east", "open door", "go east", "go east", "go north", "go east"]
TASK = Task(id="hand", data={"map": MAP, "max_turns": 10})


def test_the_hand_made_map_is_described_and_solved_as_worked_out_by_hand() -> None:
    layout = parse_map(MAP)
    state = KeyDoorState(cell=layout.start)
    assert describe(layout, state) == "key 1S 0E door 1S 2E locked goal 0N 4E blocked N W"
    assert distances(layout)[state] == len(SOLUTION)
    for action in SOLUTION[:4]:
        state = advance(layout, state, action)
    assert state == KeyDoorState(cell=(2, 2), held=True, opened=True)
    assert describe(layout, state) == "key held door 0N 1E open goal 1N 3E blocked S"


def test_the_solver_prefers_north_and_south() -> None:
    layout = parse_map(MAP)
    state, taken = KeyDoorState(cell=layout.start), []
    while state.cell != layout.goal:
        taken.append(solve(layout, state))
        state = advance(layout, state, taken[-1])
    assert taken == SOLUTION


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (KeyDoorState(cell=(1, 1)), "go north"),  # a wall
        (KeyDoorState(cell=(1, 1)), "take key"),  # the key is elsewhere
        (KeyDoorState(cell=(2, 2)), "go east"),  # the door is locked
        (KeyDoorState(cell=(2, 2)), "open door"),  # no key
        (KeyDoorState(cell=(1, 2), held=True), "open door"),  # the door is two steps away
        (KeyDoorState(cell=(2, 1), held=True), "take key"),  # held already
    ],
)
def test_what_cannot_be_done_changes_nothing(state: KeyDoorState, action: str) -> None:
    assert advance(parse_map(MAP), state, action) == state


def test_success_is_rewarded_once_at_the_end() -> None:
    env = KeyDoorEnv()
    first = env.reset(TASK, seed=0)
    assert first.state == "1,1 lying locked"
    results = [env.step(action) for action in SOLUTION]
    assert [result.reward for result in results] == [0.0] * 7 + [1.0]
    assert [result.done for result in results] == [False] * 7 + [True]
    assert [result.success for result in results] == [False] * 7 + [True]
    assert not any(result.truncated for result in results)
    assert results[3].observation.state == "2,2 held open"


def test_malformed_actions_are_invalid_cost_a_turn_and_change_nothing() -> None:
    env = KeyDoorEnv()
    first = env.reset(TASK, seed=0)
    for malformed in ["", "north", "go", "go north go", "take door", "GO NORTH"]:
        result = env.step(malformed)
        assert (result.valid, result.reward, result.observation) == (False, 0.0, first)
    assert env.step(" go  south\n").valid  # white space is not a mistake
    assert [env.step("go north").truncated for _ in range(3)] == [False, False, True]  # 10 turns in all


def test_a_well_formed_action_that_cannot_be_done_is_valid() -> None:
    env = KeyDoorEnv()
    first = env.reset(TASK, seed=0)
    result = env.step("open door")
    assert result.valid
    assert result.observation == first


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["AKD"], "G 0 times"),
        (["AKDGG"], "G 2 times"),
        (["AKDG?"], "the sign '?'"),
        (["AKDG......."], "larger than 10 x 10"),
    ],
)
def test_a_map_that_is_wrong_is_refused_with_a_reason(rows: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says.replace("?", r"\?")):
        parse_map(rows)


def test_a_task_of_another_world_is_refused() -> None:
    with pytest.raises(DataError, match="not of the environment key_door"):
        KeyDoorEnv().reset(Task(id="x"), seed=0)


def _fewest_actions(layout: key_door.KeyDoorMap) -> int | None:
    """Level by level from the start: another way to the same number as the solver's search back from the goal."""
    level, seen, count = {KeyDoorState(cell=layout.start)}, set[KeyDoorState](), 0
    while level:
        if any(state.cell == layout.goal for state in level):
            return count
        seen |= level
        level = {advance(layout, state, action) for state in level for action in ACTIONS} - seen
        count += 1
    return None


@settings(max_examples=20, deadline=None)
@given(integers(0, 10_000), integers(0, 3))
def test_tasks_can_be_solved_in_as_many_actions_as_they_say(seed: int, walls: int) -> None:
    [task] = key_door.generate_tasks(1, seed, walls=walls)
    layout = parse_map(task.data["map"])
    assert _fewest_actions(layout) == task.data["optimal"]
    assert 4 <= task.data["optimal"] <= 9
    env = KeyDoorEnv()
    env.reset(task, seed=0)
    state = KeyDoorState(cell=layout.start)
    for turn in range(task.data["optimal"]):
        action = solve(layout, state)
        state = advance(layout, state, action)
        assert env.step(action).done == (turn + 1 == task.data["optimal"])


@settings(max_examples=20, deadline=None)
@given(integers(0, 1000), lists(sampled_from(ACTIONS), max_size=14))
def test_the_world_speaks_only_its_vocabulary(seed: int, actions: list[str]) -> None:
    words = set(key_door.vocabulary())
    [task] = key_door.generate_tasks(1, seed)
    layout = parse_map(task.data["map"])
    state = KeyDoorState(cell=layout.start)
    for action in actions:
        assert set(describe(layout, state).split()) <= words
        assert set(action.split()) <= words
        state = advance(layout, state, action)


@pytest.mark.parametrize("name", BUILT_IN)
def test_splits_never_meet_and_a_seed_fixes_the_tasks(name: str) -> None:
    train = environment_tasks(name, 200, 0, {})
    held_out = environment_tasks(name, 100, 0, {"split": "held_out"})
    other_seed = environment_tasks(name, 100, 99, {"split": "held_out"})
    assert not {task.id for task in train} & {task.id for task in (*held_out, *other_seed)}
    assert len({task.id for task in train}) == 200
    assert environment_tasks(name, 200, 0, {}) == train
    assert other_seed != held_out


demonstrated = ENVIRONMENTS["key_door"].demonstrations


def test_demonstrations_without_mistakes_are_shortest_solutions() -> None:
    tasks = environment_tasks("key_door", 30, 3, {})
    for task, conversation in zip(tasks, demonstrated(tasks, 0, 0.0), strict=True):
        assert [message.role for message in conversation] == ["user", "assistant"] * task.data["optimal"]


def test_mistakes_lower_the_success_of_demonstrations_into_the_useful_range() -> None:
    tasks = environment_tasks("key_door", 300, 1, {})
    solved = [_solves(task, talk) for task, talk in zip(tasks, demonstrated(tasks, 0, 0.45), strict=True)]
    assert 0.2 <= sum(solved) / len(solved) <= 0.6
    assert demonstrated(tasks[:5], 0, 0.45) == demonstrated(tasks, 0, 0.45)[:5]
    assert demonstrated(tasks[:5], 1, 0.45) != demonstrated(tasks[:5], 0, 0.45)


def _solves(task: Task, conversation: tuple[Message, ...]) -> bool:
    """Replays the conversation: what was shown must be what the environment shows."""
    env = KeyDoorEnv()
    observation = env.reset(task, seed=0)
    result = None
    for shown, said in zip(conversation[::2], conversation[1::2], strict=True):
        assert observation.messages == (shown,)
        result = env.step(said.content)
        assert result.valid
        observation = result.observation
    assert result is not None
    assert result.done or result.truncated
    return result.done


def test_sums_have_their_digits_as_words() -> None:
    for task in environment_tasks("add", 100, 0, {}):
        [question] = task.messages
        left, right = question.content.removesuffix(" =").split(" + ")
        total = int(left.replace(" ", "")) + int(right.replace(" ", ""))
        assert task.data["answer"] == " ".join(str(total))


def test_sums_are_demonstrated_with_mistakes_at_the_rate_asked_for() -> None:
    tasks = environment_tasks("add", 500, 0, {})
    talks = environment_demonstrations("add", 500, 0, {"mistake_rate": 0.5})
    right = [talk[-1].content == task.data["answer"] for task, talk in zip(tasks, talks, strict=True)]
    assert 0.45 < sum(right) / 500 < 0.65  # half are untouched, a tenth of the others is right by chance
    words = set(ENVIRONMENTS["add"].vocabulary())
    assert all(set(message.content.split()) <= words for talk in talks for message in talk)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("key_dor", {}, "did you mean 'key_door'"),
        ("key_door", {"hight": 3}, "did you mean 'height'"),
        ("key_door", {"height": "3"}, "option 'height' .* is '3'"),
        ("key_door", {"split": "test"}, 'write "train" or "held_out"'),
        ("key_door", {"room_width": 9}, "do not fit"),
        ("key_door", {"max_turns": 5}, "at least max_optimal"),
        ("key_door", {"room_width": 1, "height": 2}, "different maps were found"),
        ("add", {"max_number": 3}, "different sums"),
        ("add", {"max_number": 0}, "from 1 to 999"),
    ],
)
def test_options_that_are_wrong_are_refused_with_a_reason(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks(name, 50, 0, options)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("rate", [1.5, -0.1, "often", True])
def test_a_mistake_rate_that_is_no_share_is_refused(name: str, rate: object) -> None:
    with pytest.raises(ConfigError, match="mistake_rate"):
        environment_demonstrations(name, 1, 0, {"mistake_rate": rate})


def test_a_single_turn_task_needs_a_prompt() -> None:
    with pytest.raises(DataError, match="needs a prompt"):
        SingleTurnEnv().reset(Task(id="x"), seed=0)


# --- all of them -----------------------------------------------------------------------------------------------------

SOLVED = ("key_door", "frozen_lake", "sokoban", "calculator", "guess_number")


@pytest.mark.parametrize("name", SOLVED)
def test_demonstrations_are_what_the_environment_shows_and_succeed(name: str) -> None:
    tasks = environment_tasks(name, 30, 3, {})
    for task, talk in zip(tasks, environment_demonstrations(name, 30, 3, {}), strict=True):
        observation = (env := ENVIRONMENTS[name].make_env()).reset(task, seed=0)
        for shown, said in zip(talk[::2], talk[1::2], strict=True):
            assert observation.messages == (shown,)
            result = env.step(said.content)
            observation = result.observation
        assert result.success
        assert len(talk) // 2 <= task.data["optimal"]  # of a guess: at worst
        assert name == "guess_number" or len(talk) // 2 == task.data["optimal"]


@pytest.mark.parametrize("name", SOLVED)
def test_mistakes_make_demonstrations_fail(name: str) -> None:
    assert environment_demonstrations(name, 20, 0, {"mistake_rate": 1.0}) != environment_demonstrations(name, 20, 0, {})
    assert (
        environment_demonstrations(name, 5, 0, {"mistake_rate": 0.5})
        == environment_demonstrations(name, 20, 0, {"mistake_rate": 0.5})[:5]
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_all_that_is_said_is_in_the_vocabulary(name: str) -> None:
    words = ENVIRONMENTS[name].vocabulary()
    assert len(set(words)) == len(words)
    talks = environment_demonstrations(name, 100, 7, {"mistake_rate": 0.6})
    said = {word for talk in talks for message in talk for word in message.content.split()}
    assert said <= set(words)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_task_and_a_seed_give_one_first_observation(name: str) -> None:
    for task in environment_tasks(name, 5, 0, {}):
        first = ENVIRONMENTS[name].make_env().reset(task, seed=4)
        assert ENVIRONMENTS[name].make_env().reset(task, seed=4) == first
        assert first.state is not None
