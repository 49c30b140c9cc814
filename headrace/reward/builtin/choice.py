"""The reward "choice": the option that an answer chooses, by its letter or its text.

A letter counts where it is marked as the answer, or stands alone on the last line: "A man" chooses nothing. An answer
that names two options chooses none.
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RewardError
from headrace.reward.builtin.answers import MOST_TEXT, expected, expected_text, marked_answer

LETTERS = "ABCDEFGHIJ"
_TRIM = " \t\n*_`'\"$.,:;!?"


def score(
    text: str,
    task_data: Mapping[str, Any],
    *,
    column: str | None = None,
    choices: str | None = None,
    letters: str = LETTERS,
) -> bool:
    """Return whether the chosen option is the expected one; `choices` names the column with the options' texts."""
    options = option_texts(task_data, choices)
    truth = expected_letter(expected(task_data, column), options, letters)
    return chosen_letter(text, options, letters) == truth


def option_texts(task_data: Mapping[str, Any], choices: str | None) -> tuple[str, ...]:
    """Return the options' texts, in order: a list, or an object with "text" (ARC) or with a key for each letter."""
    value = None if choices is None else task_data.get(choices)
    if choices is not None and value is None:
        raise RewardError(f"the task has no column {choices}, which kwargs.choices names")
    if isinstance(value, str):
        raise RewardError(f"the column {choices}, which kwargs.choices names, has a text: it must be a list of options")
    if isinstance(value, Mapping):
        value = value.get("text", [value[key] for key in sorted(value)])
    return tuple(str(option).strip() for option in value) if isinstance(value, Sequence) else ()


def expected_letter(value: Any, options: Sequence[str], letters: str = LETTERS) -> str:
    """Return the letter of the expected option, which a row gives as a letter, a position from 0, or a text.

    Raises RewardError if it is none of them.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < (len(options) or len(letters)):
            return letters[value]
    else:
        text = expected_text(value).strip()
        same = [letter for letter, option in zip(letters, options, strict=False) if _same(option, text)]
        if len(same) == 1:
            return same[0]
        if (letter := _only_letter(text, letters)) is not None:
            return letter
    raise RewardError(
        f"the expected answer {str(value)[:80]!r} is no letter of {letters}, no position and no option: name its "
        "column with kwargs.column, and the column of the options with kwargs.choices"
    )


def chosen_letter(text: str, options: Sequence[str] = (), letters: str = LETTERS) -> str | None:
    """Return the letter that an answer chooses, or None.

    >>> chosen_letter("A man said A. The answer is (B)."), chosen_letter("A man"), chosen_letter("A or B")
    ('B', None, None)
    """
    text = text[-MOST_TEXT:].strip()
    marked = marked_answer(text)
    lines = text.splitlines()
    candidates = [marked] if marked is not None else [text, *lines[-1:]]
    for candidate in candidates:
        if (letter := _read(candidate, options, letters)) is not None:
            return letter
    return None


def _read(answer: str, options: Sequence[str], letters: str) -> str | None:
    same = [letter for letter, option in zip(letters, options, strict=False) if _same(option, answer)]
    if len(same) == 1:
        return same[0]
    if (letter := _only_letter(answer, letters)) is not None:
        return letter
    lead = re.match(
        rf"[\s(\[*_]*([{re.escape(letters)}])[)\].:*_]+\s*(.*)", answer, re.DOTALL
    )  # "B) Paris", "(B) Paris"
    if lead is None or re.search(rf"(?<!\w)\(?(?!{lead[1]})[{re.escape(letters)}](?:[).:]|$)", lead[2]):
        return None
    told = lead[2].strip(_TRIM)
    if (
        options
        and told
        and not _same(options[letters.index(lead[1])] if letters.index(lead[1]) < len(options) else "", told)
    ):
        others = [option for option in options if _same(option, told)]
        return None if others else lead[1]
    return lead[1]


def _only_letter(answer: str, letters: str) -> str | None:
    r"""Return the letter if the answer is nothing else: "B", "(b)", "**B**.", "\text{B}", "option B"."""
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", answer)
    bare = re.sub(r"^(?:option|choice|answer)\s+", "", bare.strip(_TRIM), flags=re.IGNORECASE)
    bare = bare.strip(_TRIM + "()[]{}")
    return bare.upper() if len(bare) == 1 and bare.upper() in letters else None


def _same(option: str, text: str) -> bool:
    return bool(option) and _fold(option) == _fold(text)


def _fold(text: str) -> str:
    return " ".join(text.strip(_TRIM + string.whitespace).casefold().split())
