"""Work out an expression with a calculator: every operation is a call of the tool, the last action is the answer.

    ( 1 2 + 7 ) * 3 =       the question
    calc 1 2 + 7            an action        result 1 9      what it shows
    calc 1 9 * 3                             result 5 7
    answer 5 7                               right

Numbers are told digit by digit; in an action spaces do not matter. Only numbers that the question or the calculator
has shown can be used, in a call or as the answer: guessing and mental arithmetic do not help. So the state is the set
of numbers that were shown. The reward is 1 for the right answer, and an answer ends the episode. The seed of `reset`
plays no part.

With the option `tools` the same is played with calls of tools, for models whose chat template shows them: the question
has its numbers as they are, `calculate(left, operator, right)` and `answer(number)` are offered, and results come back
as tool messages.
"""

import operator
import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

from headrace.envs.task_generation import draw_tasks
from headrace.envs.tool_env import arguments_of, describe_tool, tool_message, write_call
from headrace.errors import ConfigError, DataError
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall

Numbers = frozenset[int]  # that the question or the calculator has shown
Call = tuple[int, str, int]

OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_OPERATIONS = 2  # the solver looks at every order of calls
MAX_NUMBER = 99  # of the question
MAX_RESULT = 10**6  # larger results are not shown: a number has at most six digits
_TERM = re.compile(r"(-?[0-9]{1,6})([-+*])(-?[0-9]{1,6})")
_NUMBER = re.compile(r"-?[0-9]{1,6}")


_INTEGER = {"type": "integer"}
TOOLS = (
    describe_tool(
        "calculate",
        "Work out one operation. Both numbers must have been shown before.",
        {"left": _INTEGER, "operator": {"type": "string", "enum": list(OPERATORS)}, "right": _INTEGER},
    ),
    describe_tool("answer", "Give the answer, which ends the task.", {"number": _INTEGER}),
)


# --- the rules, as pure functions ------------------------------------------------------------------------------------


def spell(number: int) -> str:
    """Write a number sign by sign: "- 1 2"."""
    return " ".join(str(number))


def read_call(action: str) -> Call | None:
    """Parse the operation of "calc 1 2 + 7"; return None if the action is no call."""
    word, _, rest = " ".join(action.split()).partition(" ")
    term = _TERM.fullmatch("".join(rest.split())) if word == "calc" else None
    return (int(term[1]), term[2], int(term[3])) if term else None


def read_answer(action: str) -> int | None:
    """Parse the number of "answer 5 7"; return None if the action is no answer."""
    word, _, rest = " ".join(action.split()).partition(" ")
    number = "".join(rest.split())
    return int(number) if word == "answer" and _NUMBER.fullmatch(number) else None


def read_tool_call(call: ToolCall) -> Call | int | None:
    """Parse the operation or the answer of a tool call; return None if its arguments are not those of the tool."""
    arguments = arguments_of(call)
    if call.name == "answer" and arguments.keys() == {"number"} and type(arguments["number"]) is int:
        return int(arguments["number"])
    if call.name != "calculate" or arguments.keys() != {"left", "operator", "right"}:
        return None
    left, sign, right = arguments["left"], arguments["operator"], arguments["right"]
    return (left, sign, right) if type(left) is type(right) is int and sign in OPERATORS else None


def spell_call(call: Call) -> str:
    """Write a call as an action in words."""
    return f"calc {spell(call[0])} {call[1]} {spell(call[2])}"


def calculate(numbers: Numbers, call: Call) -> int | None:
    """Return what the calculator shows, or None if one of the numbers was not shown or the result is too large."""
    left, sign, right = call
    if left not in numbers or right not in numbers:
        return None
    result = OPERATORS[sign](left, right)
    return result if abs(result) < MAX_RESULT else None


def calls(numbers: Numbers) -> Iterable[Call]:
    """List every possible call."""
    return ((left, sign, right) for left in sorted(numbers) for sign in OPERATORS for right in sorted(numbers))


def read_question(question: str) -> tuple[Numbers, int]:
    """Parse a question such as "( 12 + 7 ) * 3" into its numbers and its value; raises DataError on anything else."""
    text = "".join(question.split())
    number, sign = r"([0-9]{1,2})", r"([-+*])"
    if match := re.fullmatch(number + sign + number, text):
        a, first, b = match.groups()
        return frozenset({int(a), int(b)}), OPERATORS[first](int(a), int(b))
    if match := re.fullmatch(rf"\({number}{sign}{number}\){sign}{number}", text):
        a, first, b, second, c = match.groups()
        value = OPERATORS[second](OPERATORS[first](int(a), int(b)), int(c))
        return frozenset({int(a), int(b), int(c)}), value
    if match := re.fullmatch(rf"{number}{sign}\({number}{sign}{number}\)", text):
        a, first, b, second, c = match.groups()
        value = OPERATORS[first](int(a), OPERATORS[second](int(b), int(c)))
        return frozenset({int(a), int(b), int(c)}), value
    raise DataError(f'the question is {question!r}: write it like "12 + 7", "( 12 + 7 ) * 3" or "3 * ( 12 + 7 )"')


def solve(shown_numbers: Numbers, value: int) -> list[str] | None:
    """Find the fewest actions that end with the right answer, by trying all calls; return None if they are too many.

    >>> solve(frozenset({12, 7, 3}), 57)
    ['calc 7 + 1 2', 'calc 3 * 1 9', 'answer 5 7']
    """
    if value in shown_numbers:
        return [f"answer {spell(value)}"]
    open_ways: list[tuple[Numbers, list[str]]] = [(shown_numbers, [])]
    for _ in range(MAX_OPERATIONS):
        longer: list[tuple[Numbers, list[str]]] = []
        for numbers, way in open_ways:
            for call in calls(numbers):
                result = calculate(numbers, call)
                if result == value:
                    return [*way, spell_call(call), f"answer {spell(value)}"]
                if result is not None and result not in numbers:
                    longer.append((numbers | {result}, [*way, spell_call(call)]))
        open_ways = longer
    return None


def vocabulary() -> tuple[str, ...]:
    """Return every word that the environment says or understands."""
    return ("calc", "answer", "result", "unknown", "what", "right", "wrong", *OPERATORS, "=", "(", ")", *"0123456789")


# --- the environment -------------------------------------------------------------------------------------------------


class CalculatorEnv:
    """Plays the calculator. `valid` means a call or an answer; one with an unknown number changes nothing.

    Every turn counts. Several calls in one turn are made one after another, up to an answer; if one is malformed, none
    is made.
    """

    deterministic = True

    def __init__(self) -> None:
        self._with_tools = False
        self._numbers: Numbers = frozenset()
        self._value = 0
        self._answered: int | None = None
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; raises DataError when the task is not one of this environment."""
        if not {"question", "max_turns"} <= task.data.keys():
            raise DataError(
                f"task {task.id} is not of the environment calculator: its data need `question` and `max_turns`"
            )
        question = str(task.data["question"])
        self._numbers, self._value = read_question(question)
        self._answered = None
        self._turns_left = int(task.data["max_turns"])
        self._with_tools = bool(task.data.get("tools", False))
        return self._observe(_user(f"{question} =" if self._with_tools else f"{_spread(question)} ="))

    def step(self, action: str) -> StepResult:
        call, answer = read_call(action), read_answer(action)
        if call is not None:
            reply = self._call(call)
        elif answer is not None:
            reply = self._answer(answer)
        else:
            reply = "what"
        return self._result(_user(reply), valid=call is not None or answer is not None)

    def call(self, action: Action) -> StepResult:
        if not action.calls:
            return self._result(_user(action.problem or "call a tool"), valid=False)
        requests = [read_tool_call(call) for call in action.calls]
        if None in requests:  # all or none: half of a turn is not what the model intended
            replies = ["not made" if each is not None else "these are no arguments of the tool" for each in requests]
        else:
            replies = [self._make_call(request) for request in requests if request is not None]
        messages = [tool_message(call, reply) for call, reply in zip(action.calls, replies, strict=True)]
        return self._result(*messages, valid=None not in requests)

    def _make_call(self, request: Call | int) -> str:
        """Make a call and return the reply of a tool, with numbers as they are."""
        if self._answered is not None:
            return "answered already"
        reply = self._answer(request) if isinstance(request, int) else self._call(request)
        if reply == "unknown":
            return "a number that was not shown, or too large a result"
        return "".join(reply.removeprefix("result").split())

    def _result(self, *messages: Message, valid: bool) -> StepResult:
        assert self._turns_left > 0, "the episode is over"
        done = self._answered is not None
        success = self._answered == self._value
        self._turns_left = 0 if done else self._turns_left - 1
        return StepResult(
            observation=self._observe(*messages),
            reward=float(success),
            done=done,
            truncated=not done and self._turns_left == 0,
            valid=valid,
            success=success,
        )

    def _call(self, call: Call) -> str:
        result = calculate(self._numbers, call)
        if result is None:
            return "unknown"
        self._numbers |= {result}
        return f"result {spell(result)}"

    def _answer(self, answer: int) -> str:
        if answer not in self._numbers:
            return "unknown"
        self._answered = answer
        return "right" if answer == self._value else "wrong"

    def best_action(self) -> str | None:
        """Return the next action of a shortest solution, or None if there is none."""
        way = solve(self._numbers, self._value)
        return self._in_words_or_call(way[0]) if way else None

    def _observe(self, *messages: Message) -> Observation:
        answered = "" if self._answered is None else f" answered {self._answered}"
        numbers = sorted(self._numbers)
        actions = (*map(spell_call, calls(self._numbers)), *(f"answer {spell(number)}" for number in numbers))
        return Observation(
            messages=messages,
            state=f"known {' '.join(str(number) for number in numbers)}{answered}",
            actions=tuple(map(self._in_words_or_call, actions)),
            tools=TOOLS if self._with_tools else (),
        )

    def _in_words_or_call(self, action: str) -> str:
        """Return an action in words, or, with tools, the tool call that does the same."""
        if not self._with_tools:
            return action
        call, answer = read_call(action), read_answer(action)
        if call is not None:
            return write_call("calculate", left=call[0], operator=call[1], right=call[2])
        return write_call("answer", number=answer)

    def close(self) -> None:
        self._turns_left = 0


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _spread(question: str) -> str:
    return " ".join("".join(question.split()))


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    operations: int = 2,
    max_number: int = 19,
    max_turns: int = 5,
    tools: bool = False,
) -> list[Task]:
    """Draw `size` different questions of `operations` operations, whose shortest solution takes one call for each.

    Numbers and results are never negative, and the value is at most 999. With `tools`, actions are calls of tools.
    """
    if not 1 <= operations <= MAX_OPERATIONS:
        raise ConfigError(f"operations is {operations}: write a number from 1 to {MAX_OPERATIONS}")
    if not 1 <= max_number <= MAX_NUMBER:
        raise ConfigError(f"max_number is {max_number}: write a number from 1 to {MAX_NUMBER}")
    if max_turns <= operations:
        raise ConfigError(f"max_turns is {max_turns}: {operations} calls and an answer take {operations + 1}")
    return draw_tasks(
        "calculator",
        size,
        seed,
        split=split,
        draw=partial(_random_question, operations=operations, max_number=max_number),
        data_of=partial(_data_of, operations=operations, max_turns=max_turns, tools=tools),
        what="questions",
        remedy="ask for fewer, or raise max_number",
    )


def _random_question(rng: random.Random, *, operations: int, max_number: int) -> str:
    signs = tuple(OPERATORS)
    term = f"{rng.randint(0, max_number)} {rng.choice(signs)} {rng.randint(0, max_number)}"
    if operations == 1:
        return term
    number, sign = rng.randint(0, max_number), rng.choice(signs)
    return f"( {term} ) {sign} {number}" if rng.random() < 0.5 else f"{number} {sign} ( {term} )"


def _data_of(text: str, *, operations: int, max_turns: int, tools: bool) -> dict[str, Any] | None:
    numbers, value = read_question(text)
    inner = re.search(r"[0-9]+ [-+*] [0-9]+", text)
    assert inner is not None
    if not 0 <= value <= 999 or read_question(inner[0])[1] < 0:
        return None
    way = solve(numbers, value)
    if way is None or len(way) != operations + 1:
        return None
    data = {"question": text, "value": value, "max_turns": max_turns, "optimal": len(way)}
    return {**data, "tools": True} if tools else data
