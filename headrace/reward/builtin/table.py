"""The rewards of this package that read the last answer, by name: what they read, and the checks before a run.

Modules that need another package are named and imported in the sandbox, or when their options are checked.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import names
from headrace.errors import ConfigError, HeadraceError, RewardError, boundary
from headrace.reward.builtin import choice, code_tests, final_number
from headrace.reward.builtin.answers import expected_text, find_expected
from headrace.types import Task

Options = Mapping[str, Any]


def _nothing(options: Options) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReward:
    """A reward of the last answer."""

    module: str  # of this package; its function `score` takes the text, the task's data and the options
    fn: Callable[..., Any] | None = None  # the function itself, if it runs in the training process
    check_options: Callable[[Options], None] = _nothing  # raises HeadraceError
    check_row: Callable[[Options, Mapping[str, Any]], None]  # raises HeadraceError

    @property
    def spec(self) -> str:
        """The name by which the sandbox loads it: its time or memory depends on the text."""
        return f"{__package__}.{self.module}:score"


def _expected(options: Options, row: Mapping[str, Any]) -> Any:
    value = find_expected(row, options.get("column"))
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RewardError("it is not there, or empty")
    return value


def _check_number(options: Options, row: Mapping[str, Any]) -> None:
    if final_number.number_of(expected_text(_expected(options, row))) is None:
        raise RewardError(f"it has no number: {str(_expected(options, row))[:80]!r}")


def _check_tolerance(options: Options) -> None:
    _check_type(options, "tolerance", (int, float), "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _check_choice_row(options: Options, row: Mapping[str, Any]) -> None:
    value = _expected(options, row)
    choice.expected_letter(
        value, choice.option_texts(row, options.get("choices")), options.get("letters", choice.LETTERS)
    )


def _check_choice(options: Options) -> None:
    _check_type(options, "choices", str, "the name of a column")
    letters = "letters that differ, as many as there may be options"
    _check_type(options, "letters", str, letters, lambda text: text.isalnum() and len(set(text)) == len(text) > 1)


def _check_code(options: Options) -> None:
    _check_type(options, "partial", bool, "true or false")
    _check_type(options, "timeout_s", (int, float), "a number of seconds above 0", lambda value: value > 0)
    for key in ("memory_mb", "max_cases"):
        _check_type(options, key, int, "a whole number above 0", lambda value: value > 0)


def _check_code_row(options: Options, row: Mapping[str, Any]) -> None:
    code_tests.find_cases(row, options.get("column"))


def _check_schema(options: Options) -> None:
    if ("schema" in options) == ("column" in options):
        raise ConfigError("give either schema, a table with the JSON schema, or column, the column that has it")
    _check_type(options, "schema", Mapping, "a table")
    _check_type(options, "parses", (int, float), "a number from 0 to 1", lambda value: 0 <= value <= 1)
    _json_schema().validator(options.get("schema", {}))


def _check_schema_row(options: Options, row: Mapping[str, Any]) -> None:
    if "column" in options:
        _json_schema().validator(_json_schema().row_schema(row, options["column"]))


def _json_schema() -> Any:
    return importlib.import_module(f"{__package__}.json_schema")


def _check_pattern(options: Options) -> None:
    if "pattern" not in options:
        raise ConfigError("give pattern, a regular expression")
    _check_type(options, "pattern", str, "a regular expression")
    _check_type(options, "ignore_case", bool, "true or false")
    try:
        re.compile(options["pattern"])
    except re.error as exc:
        raise ConfigError(f"pattern is no regular expression ({exc}): write one that Python's re takes") from exc


def _check_pattern_row(options: Options, row: Mapping[str, Any]) -> None:
    if "column" in options:
        _expected(options, row)


def _check_math(options: Options) -> None:
    _check_type(options, "boxed", bool, "true or false")


def _check_math_row(options: Options, row: Mapping[str, Any]) -> None:
    _expected(options, row)


ANSWER_REWARDS: Mapping[str, AnswerReward] = {
    "math": AnswerReward(module="math_answer", check_options=_check_math, check_row=_check_math_row),
    "final_number": AnswerReward(
        module="final_number", fn=final_number.score, check_options=_check_tolerance, check_row=_check_number
    ),
    "choice": AnswerReward(module="choice", fn=choice.score, check_options=_check_choice, check_row=_check_choice_row),
    "code": AnswerReward(module="code_tests", check_options=_check_code, check_row=_check_code_row),
    "json_schema": AnswerReward(module="json_schema", check_options=_check_schema, check_row=_check_schema_row),
    "regex": AnswerReward(module="pattern", check_options=_check_pattern, check_row=_check_pattern_row),
}
assert tuple(ANSWER_REWARDS) == names.ANSWER_REWARDS


def check_options(name: str, options: Options) -> None:
    """Raise ConfigError, in one sentence, for wrong kwargs of the reward `name`."""
    known = names.REWARD_OPTIONS[name]
    package, extra = names.REWARD_PACKAGES.get(name, ("headrace", ""))
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"the reward \"{name}\" needs a package: run  pip install 'headrace[{extra}]'")
    for key in options:
        if key not in known:
            raise ConfigError(f'a reward with fn = "{name}" has no option {key}: its kwargs are {", ".join(known)}')
    try:
        _check_type(options, "column", str, "the name of a column")
        with boundary(ConfigError, "they cannot be read"):
            ANSWER_REWARDS[name].check_options(options)
    except HeadraceError as exc:
        raise ConfigError(f'the kwargs of the reward "{name}" are wrong: {exc}') from exc


def check_rows(name: str, options: Options, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if tasks lack what the reward reads, with how many they are and the columns that there are."""
    check_row = ANSWER_REWARDS[name].check_row
    failed = [(task, problem) for task in tasks if (problem := _problem(check_row, options, task))]
    if not failed:
        return
    task, problem = failed[0]
    column = options.get("column") or ("ground_truth or answer" if name != "code" else "tests")
    raise ConfigError(
        f'the reward "{name}" reads the column {column}, and in {len(failed)} of {len(tasks)} tasks that does not '
        f"work; task {task.id}: {problem}. Its columns are {', '.join(map(str, task.data)) or 'none'}: "
        'write kwargs = { column = "NAME" }'
    )


def _problem(check_row: Callable[[Options, Mapping[str, Any]], None], options: Options, task: Task) -> str:
    try:
        with boundary(RewardError, "it cannot be read"):
            check_row(options, task.data)
    except HeadraceError as exc:
        return str(exc)
    return ""


def _check_type(
    options: Options, key: str, kinds: Any, wanted: str, fits: Callable[[Any], bool] = lambda value: True
) -> None:
    """Raise ConfigError if an option that is given is of another type, or does not fit."""
    if key not in options:
        return
    value = options[key]
    is_bool = isinstance(value, bool) and kinds is not bool
    if is_bool or not isinstance(value, kinds) or not fits(value):
        raise ConfigError(f"{key} is {value!r}: write {wanted}")
