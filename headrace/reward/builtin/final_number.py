"""The reward "final_number": the number that an answer ends with, and the numbers in a text.

Numbers are exact fractions: no float is rounded, and 10^400 is not infinite.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from headrace.errors import RewardError
from headrace.reward.builtin.answers import MOST_TEXT, expected, expected_text, marked_answer, plain_signs

_MOST_DIGITS = 2_000  # of a number; longer ones are no answers
_GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:\\,\d{3})+(?!\d)"
_UNSIGNED = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+])?[ ]?(?:\\?[$€£¥][ ]?)?(?P<sign2>[-+])?(?P<value>{_UNSIGNED})"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\w))?"
    r"(?:(?:\^|\*\*)\{?(?P<power>-?\d{1,4})\}?)?"
    rf"(?:[ ]?/[ ]?(?P<below>{_UNSIGNED}))?"
)
_SPACED = re.compile(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3}(?!\d))")  # thousands apart by a hard or thin space
_FRACTION = re.compile(r"(?P<sign>[-+])?\s*\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}")


def score(text: str, task_data: Mapping[str, Any], *, column: str | None = None, tolerance: float = 0.0) -> bool:
    """Compare the number of the marked answer, else the last number of the text, with that of the expected answer.

    `tolerance` is the largest difference, as a share of the expected number.
    """
    truth = number_of(expected_text(expected(task_data, column)))
    if truth is None:
        raise RewardError("the expected answer has no number: name another column with kwargs.column")
    given = number_of(text)
    return given is not None and abs(given - truth) <= Fraction(tolerance) * abs(truth)


def number_of(text: str) -> Fraction | None:
    """Return the last number of the marked answer, or of the text if nothing is marked.

    >>> number_of("3 + 4 is 7. #### 1,007"), number_of("no idea")
    (Fraction(1007, 1), None)
    """
    marked = marked_answer(text)
    return last_number(text if marked is None else marked)


def last_number(text: str) -> Fraction | None:
    r"""Return the last number of a text: 1,000, -3.5, 1e3, 10^400, 1/2 or \frac{1}{2}, without unit and currency.

    >>> last_number("between 5 and \u22123.50 dollars"), last_number(r"\frac{1}{2}"), last_number("H2O")
    (Fraction(-7, 2), Fraction(1, 2), None)
    """
    text = _SPACED.sub("", text[-MOST_TEXT:]).replace("{,}", ",")
    text = plain_signs(text)
    places = [(found.start(), _fraction(found)) for found in _FRACTION.finditer(text)]
    inside = [range(found.start(), found.end()) for found in _FRACTION.finditer(text)]
    for found in _NUMBER.finditer(text):
        if not any(found.start("value") in span for span in inside[-64:]):
            places.append((found.start(), _value(found, text)))
    return max(places, key=lambda place: place[0])[1] if places else None


def _fraction(found: "re.Match[str]") -> Fraction | None:
    if max(len(found[2]), len(found[3])) > _MOST_DIGITS or not int(found[3]):
        return None
    value = Fraction(int(found[2]), int(found[3]))
    return -value if found["sign"] == "-" else value


def _value(found: "re.Match[str]", text: str) -> Fraction | None:
    """Return the number of a match; None if it is too long to be one, or divides by zero."""
    value, below = _exact(found["value"]), _exact(found["below"]) if found["below"] else Fraction(1)
    too_large = not found["exponent"] and re.match(r"[eE][-+]?\d", text[found.end("value") :][:3]) is not None
    if value is None or not below or too_large:
        return None
    if found["exponent"]:
        value *= Fraction(10) ** int(found["exponent"][1:])
    if found["power"]:
        power = int(found["power"])
        size = value.numerator.bit_length() + value.denominator.bit_length()
        if abs(power) * size > 4 * _MOST_DIGITS or (not value and power < 0):
            return None
        value = value**power
    is_range = (
        found["sign"] == "-" and re.search(r"\w\s?$", text[max(0, found.start() - 2) : found.start()]) is not None
    )
    negative = (found["sign"] == "-" and not is_range) != (found["sign2"] == "-")
    return (-value if negative else value) / below


def _exact(digits: str) -> Fraction | None:
    plain = re.sub(r"\\?[, ]", "", digits)
    return Fraction(plain) if len(plain) <= _MOST_DIGITS else None
