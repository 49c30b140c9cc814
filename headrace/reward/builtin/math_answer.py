r"""The reward "math": mathematical equality with the expected answer, by math-verify.

The answer is the marked one (`\boxed{}`, `####`, "the answer is"), else the last formula or number of the text. One
answer counts: math-verify itself would take any of several boxes. Its own time limits need signals, so they are turned
off; the deadline is that of the call in the sandbox, and an answer that cannot be compared within it is wrong.
"""

import importlib
import logging
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from headrace.errors import RewardError
from headrace.reward.builtin.answers import (
    MOST_ANSWER,
    MOST_TEXT,
    expected,
    expected_text,
    last_boxed,
    marked_answer,
    plain_signs,
)
from headrace.reward.builtin.final_number import last_number

math_verify: Any = importlib.import_module("math_verify")  # an extra; before calls are forked
SCALES = "hundred|thousand|million|billion|trillion|dozen|percent"
_FORMULA = re.compile(r"\$\$([^$]{1,1000})\$\$|\$([^$]{1,1000})\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
_PLAIN = re.compile(rf"(?:\\?[$€£¥]\s?)?([-+]?\s?[\d.,/]+)(?:\s+(?!(?:{SCALES}|or|and)\b)[a-zA-Z° ]{{1,40}})?\.?")
_LONG = re.compile(r"\d{1000}|\^\s*\{?\s*\d{5}|!\s*!")  # numbers of more digits than there is time
_TOWER = re.compile(r"\d\s*\^\s*\{?\s*(\d{1,9})\s*\^\s*\{?\s*(\d{1,9})")


def score(text: str, task_data: Mapping[str, Any], *, column: str | None = None, boxed: bool = False) -> bool:
    r"""Return whether the text's answer equals the expected one; with `boxed`, only what is in `\boxed{}` counts."""
    truth = expected_text(expected(task_data, column))
    if not truth:
        raise RewardError("the expected answer is empty: name another column with kwargs.column")
    given = last_boxed(text) if boxed else find_answer(text)
    return given is not None and equal(given, truth)


def find_answer(text: str) -> str | None:
    """Return the marked answer, else the last formula or number, whichever comes later; None if there is neither."""
    if (marked := marked_answer(text)) is not None:
        return marked
    text = text[-MOST_TEXT:]
    formulas = list(_FORMULA.finditer(text))
    rest = text[formulas[-1].end() :] if formulas else text
    number = last_number(rest)
    if number is not None or not formulas:
        return None if number is None else str(number)
    return next(part for part in formulas[-1].groups() if part is not None)


def equal(given: str, truth: str) -> bool:
    """Compare two answers: as texts, as plain numbers (a unit in words may follow), else by math-verify."""
    given, truth = _tidy(given), _tidy(truth)
    if not given or len(given) > MOST_ANSWER:
        return False
    if given == truth:
        return True
    numbers = _plain_number(given), _plain_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return not _is_endless(given) and _verify(given, truth)


def _is_endless(answer: str) -> bool:
    """Tell whether an answer writes a number of very many digits, such as 10^{10^{10}}, with which nothing is equal."""
    return _LONG.search(answer) is not None or any(
        int(power[2]) * math.log10(max(int(power[1]), 1)) > 4 for power in _TOWER.finditer(answer)
    )


def _tidy(answer: str) -> str:
    text = plain_signs(answer).replace("{,}", ",").replace("\\!", "").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text.rstrip(".") if not text.endswith("...") else text


def _plain_number(answer: str) -> Fraction | None:
    return last_number(answer) if _PLAIN.fullmatch(answer) and answer.count("/") < 2 else None


def _verify(given: str, truth: str) -> bool:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    parsed_truth, parsed_given = _parse(truth), _parse(given)
    if not parsed_truth:
        raise RewardError(
            f"the expected answer {truth[:80]!r} is no mathematics: name another column with kwargs.column"
        )
    return bool(parsed_given) and bool(math_verify.verify(parsed_truth, parsed_given, timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    parsed: list[Any] = math_verify.parse(f"\\boxed{{{answer}}}", extraction_config=[config], parsing_timeout=None)
    return parsed
