"""The calculator and guess-the-number: rules by hand, solvers against brute force."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from headrace.envs import ENVIRONMENTS, calculator, environment_tasks, guess_number
from headrace.envs.calculator import CalculatorEnv, Numbers, read_answer, read_call, read_question
from headrace.envs.guess_number import GuessNumberEnv
from headrace.envs.tool_env import read_action
from headrace.errors import ConfigError, DataError
from headrace.tool_calls import tool_names
from headrace.types import Task

SUM = Task(id="sum", data={"question": "( 12 + 7 ) * 3", "max_turns": 6})
SECRET = Task(id="secret", data={"low": 3, "high": 17, "secret": 12, "max_turns": 5})


# --- calculator ------------------------------------------------------------------------------------------------------


def test_an_expression_is_worked_out_with_the_calculator() -> None:
    env = CalculatorEnv()
    first = env.reset(SUM, seed=0)
    assert first.messages[0].content == "( 1 2 + 7 ) * 3 ="
    assert first.state == "known 3 7 12"
    results = [env.step(action) for action in ("calc 1 2 + 7", "calc 19*3", "answer 5 7")]
    assert [result.observation.messages[0].content for result in results] == ["result 1 9", "result 5 7", "right"]
    assert [result.observation.state for result in results] == [
        "known 3 7 12 19", "known 3 7 12 19 57", "known 3 7 12 19 57 answered 57",
    ]  # fmt: skip
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 2 + [(True, 1.0, True)]


@pytest.mark.parametrize("action", ["answer 5 7", "calc 5 7 + 7", "calc 1 9 * 3", "calc 3 * 1 9"])
def test_a_number_that_was_not_shown_cannot_be_used(action: str) -> None:
    env = CalculatorEnv()
    first = env.reset(SUM, seed=0)
    result = env.step(action)
    assert (result.valid, result.done, result.reward) == (True, False, 0.0)
    assert result.observation.messages[0].content == "unknown"
    assert result.observation.state == first.state


def test_a_wrong_answer_ends_the_episode_without_reward() -> None:
    env = CalculatorEnv()
    env.reset(SUM, seed=0)
    result = env.step("answer 1 2")
    assert (result.done, result.success, result.reward) == (True, False, 0.0)
    assert result.observation.messages[0].content == "wrong"


@pytest.mark.parametrize(
    "action", ["", "12 + 7", "calc", "calc 12", "calc 12 / 7", "answer", "answer 1 + 2", "Calc 1+2"]
)
def test_what_is_neither_call_nor_answer_is_invalid(action: str) -> None:
    env = CalculatorEnv()
    first = env.reset(SUM, seed=0)
    result = env.step(action)
    assert (result.valid, result.observation.messages[0].content) == (False, "what")
    assert result.observation.state == first.state


def test_with_tools_the_same_is_worked_out_by_calls() -> None:
    env = CalculatorEnv()
    first = env.reset(Task(id="sum", data={**SUM.data, "tools": True}), seed=0)
    assert [message.content for message in first.messages] == ["( 12 + 7 ) * 3 ="]
    assert tool_names(first.tools) == ("calculate", "answer")
    both = (
        '[{"name": "calculate", "arguments": {"left": 12, "operator": "+", "right": 7}},'
        ' {"name": "calculate", "arguments": {"left": 19, "operator": "*", "right": 3}}]'
    )
    two = env.call(read_action(both, first.tools))
    assert [(message.role, message.content) for message in two.observation.messages] == [("tool", "19"), ("tool", "57")]
    assert (two.observation.state, two.valid, two.done) == ("known 3 7 12 19 57", True, False)
    ended = env.call(read_action('{"name": "answer", "arguments": {"number": 57}}', first.tools))
    assert (ended.done, ended.reward, ended.observation.messages[0].content) == (True, 1.0, "right")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("57", ["call a tool"]),
        (
            '{"name": "sing"}',
            [
                'this is no call that can be made: write {"name": ..., "arguments": {...}} with one of the tools '
                "answer, calculate"
            ],
        ),
        (
            '[{"name": "calculate", "arguments": {"left": 12, "operator": "+", "right": 7}}, {"name": "answer"}]',
            ["not made", "these are no arguments of the tool"],
        ),
    ],
)
def test_a_turn_without_a_call_that_can_be_made_is_invalid_and_told(said: str, told: list[str]) -> None:
    env = CalculatorEnv()
    first = env.reset(Task(id="sum", data={**SUM.data, "tools": True}), seed=0)
    result = env.call(read_action(said, first.tools))
    assert (result.valid, result.done, result.observation.state) == (False, False, first.state)
    assert [message.content for message in result.observation.messages] == told


def test_an_unknown_number_in_a_call_is_told_and_changes_nothing() -> None:
    env = CalculatorEnv()
    first = env.reset(Task(id="sum", data={**SUM.data, "tools": True}), seed=0)
    result = env.call(read_action('{"name": "answer", "arguments": {"number": 57}}', first.tools))
    assert (result.valid, result.done, result.observation.state) == (True, False, first.state)
    assert result.observation.messages[0].content == "a number that was not shown, or too large a result"


def test_negative_results_can_be_used_and_huge_ones_are_not_shown() -> None:
    assert read_call("calc 7 - - 1 2") == (7, "-", -12)
    assert read_answer("answer - 5") == -5
    env = CalculatorEnv()
    env.reset(Task(id="x", data={"question": "7 - 12", "max_turns": 20}), seed=0)
    assert env.step("calc 7 - 12").observation.messages[0].content == "result - 5"
    assert env.step("calc 7 - -5").observation.messages[0].content == "result 1 2"
    for number in (12, 144):
        assert env.step(f"calc {number} * {number}").observation.messages[0].content.startswith("result")
    assert env.step("calc 20736 * 20736").observation.messages[0].content == "unknown"


@pytest.mark.parametrize(
    ("question", "value"), [("2 + 3", 5), ("( 2 + 3 ) * 4", 20), ("2 + ( 3 * 4 )", 14), ("9 - ( 2 - 1 )", 8)]
)
def test_questions_have_the_value_that_brackets_give_them(question: str, value: int) -> None:
    assert read_question(question)[1] == value


@pytest.mark.parametrize("question", ["", "2", "2 + 3 + 4", "__import__('os')", "100 + 1"])
def test_other_questions_are_refused(question: str) -> None:
    with pytest.raises(DataError, match="write it like"):
        read_question(question)


def fewest_turns(known: Numbers, value: int) -> int:
    """Level by level over sets of known numbers."""
    level, turns = {known}, 1
    while not any(value in numbers for numbers in level):
        level = {
            numbers | {result}
            for numbers in level
            for left in numbers
            for right in numbers
            for result in (left + right, left - right, left * right)
        }
        turns += 1
    return turns


@settings(max_examples=20, deadline=None)
@given(integers(0, 10_000), integers(1, 2))
def test_the_calculators_solver_takes_the_fewest_turns(seed: int, operations: int) -> None:
    [task] = calculator.generate_tasks(1, seed, operations=operations)
    known, value = read_question(task.data["question"])
    assert value == task.data["value"] == eval(task.data["question"])
    assert fewest_turns(known, value) == task.data["optimal"] == operations + 1
    env = CalculatorEnv()
    env.reset(task, seed=0)
    for turn in range(operations + 1):
        action = env.best_action()
        assert action is not None
        assert env.step(action).success == (turn == operations)


def test_states_of_the_calculator_are_equal_if_the_known_numbers_are() -> None:
    names = []
    for actions in (("calc 12+7", "calc 12-7"), ("calc 12-7", "calc 7+12"), ("calc 12+7", "calc 12*7")):
        env = CalculatorEnv()
        env.reset(SUM, seed=0)
        names.append([env.step(action).observation.state for action in actions][-1])
    assert names[0] == names[1] != names[2]


# --- guess the number ------------------------------------------------------------------------------------------------


def test_guesses_are_answered_and_narrow_the_interval() -> None:
    env = GuessNumberEnv()
    first = env.reset(SECRET, seed=0)
    assert first.messages[0].content == "number from 3 to 1 7"
    results = [env.step(guess) for guess in ("1 0", "15", "9", "1 2")]
    assert [result.observation.messages[0].content for result in results] == ["higher", "lower", "higher", "found"]
    assert [result.observation.state for result in results] == ["11-17", "11-14", "11-14", "12-12 found"]
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 3 + [(True, 1.0, True)]


def test_a_number_known_but_not_yet_said_is_another_state_than_found() -> None:
    env = GuessNumberEnv()
    env.reset(SECRET, seed=0)
    env.step("11")
    assert env.step("13").observation.state == "12-12"
    assert env.step("12").observation.state == "12-12 found"


@pytest.mark.parametrize("action", ["", "twelve", "-1", "1000", "1.5", "١٢"])
def test_what_is_no_number_is_invalid(action: str) -> None:
    env = GuessNumberEnv()
    first = env.reset(SECRET, seed=0)
    result = env.step(action)
    assert (result.valid, result.observation.messages[0].content) == (False, "what")
    assert result.observation.state == first.state


@cache
def worst_case(numbers: int) -> int:
    """The fewest guesses that surely find one of so many numbers, by trying every first guess."""
    if numbers == 0:
        return 0
    return 1 + min(max(worst_case(below), worst_case(numbers - 1 - below)) for below in range(numbers))


@pytest.mark.parametrize("numbers", [1, 2, 3, 4, 7, 8, 15, 16, 31, 40])
def test_no_player_needs_fewer_guesses_at_worst(numbers: int) -> None:
    taken = []
    for secret in range(5, 5 + numbers):
        env = GuessNumberEnv()
        env.reset(Task(id="x", data={"low": 5, "high": 4 + numbers, "secret": secret, "max_turns": 99}), seed=0)
        taken.append(1)
        while not env.step(str(env.best_action())).done:
            taken[-1] += 1
    assert max(taken) == worst_case(numbers) == guess_number.fewest_guesses(5, 4 + numbers)


@pytest.mark.parametrize("secret", [2, 18, -1])
def test_a_secret_out_of_its_interval_is_refused(secret: int) -> None:
    with pytest.raises(DataError, match="must not fall"):
        GuessNumberEnv().reset(Task(id="x", data={**SECRET.data, "secret": secret}), seed=0)


# --- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("calculator", {"operations": 3}, "from 1 to 2"),
        ("calculator", {"max_number": 100}, "from 1 to 99"),
        ("calculator", {"max_turns": 2}, "2 calls and an answer take 3"),
        ("calculator", {"operations": 1, "max_number": 2}, "different questions were found"),
        ("guess_number", {"max_number": 1000}, "from 1 to 999"),
        ("guess_number", {"numbers": 101}, "only 100 from 0"),
        ("guess_number", {"max_turns": 3}, "15 numbers can take 4 guesses"),
        ("guess_number", {"max_number": 3, "numbers": 4}, "different secrets were found"),
    ],
)
def test_options_that_are_wrong_are_refused_with_a_reason(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks(name, 50, 0, options)


@pytest.mark.parametrize("name", ["calculator", "guess_number"])
def test_a_task_of_another_world_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"not of the environment {name}"):
        ENVIRONMENTS[name].make_env().reset(Task(id="x"), seed=0)
