r"""Find the answer in a text that a model or a person wrote, and the expected answer in a row.

An answer is marked by `\boxed{...}`, by `####` (GSM8K), by `<answer>...</answer>`, or by "the answer is"; of several
marks the last one counts. A text that marks one answer and then another has given the other.
"""

import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import RewardError

MOST_TEXT = 50_000  # characters that are read, from the end
MOST_ANSWER = 1_000  # characters of an answer; what is longer is none
_SIGNS = str.maketrans(
    {"\u2212": "-", "\u2012": "-", "\u2013": "-", "\uff0d": "-", "\uff0b": "+", "\u00a0": " ", "\u202f": " "}
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_PHRASE = re.compile(r"\b(?:final\s+answer|answer)\b(?:\s+is)?\s*(?::|=|\bis\b|\bis:)?[ \t]*", re.IGNORECASE)
_STATED = re.compile(r"(?:is|[:=])\s*$", re.IGNORECASE)


def plain_signs(text: str) -> str:
    """Replace the minus signs, dashes and hard spaces that people write for "-" and " "."""
    return text.translate(_SIGNS)


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last complete `\boxed{...}`, braces balanced; None if there is none.

    >>> last_boxed(r"not \boxed{1}, but \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    return _boxed_before(text[-MOST_TEXT:])[1]


def marked_answer(text: str) -> str | None:
    """Return the answer that the last mark of a text gives, or None if nothing marks one.

    >>> marked_answer("Not #### 3. The answer is 4."), marked_answer("It may be 4.")
    ('4', None)
    """
    text = text[-MOST_TEXT:]
    marks = [_boxed_before(text), _hashes(text), _tagged(text), _phrase(text)]
    place, answer = max(marks, key=lambda mark: mark[0])
    if place < 0 or answer is None:
        return None
    if (inner := last_boxed(answer)) is not None:
        answer = inner
    answer = answer.strip()
    return answer if 0 < len(answer) <= MOST_ANSWER else None


def expected(task_data: Mapping[str, Any], column: str | None) -> Any:
    """Return the value of the column that holds the expected answer: `column`, else `ground_truth` or `answer`.

    Raises RewardError if the task has none.
    """
    value = find_expected(task_data, column)
    if value is None:
        raise RewardError(f"the task has no {column or 'answer'}: map a column to it, or name one with kwargs.column")
    return value


def find_expected(task_data: Mapping[str, Any], column: str | None) -> Any:
    """Return the expected answer, or None. verl's rows have it in `reward_model`."""
    if column is not None:
        return task_data.get(column)
    of_model = task_data.get("reward_model")
    verl = of_model.get("ground_truth") if isinstance(of_model, Mapping) else None
    return next((task_data[name] for name in ("ground_truth", "answer") if task_data.get(name) is not None), verl)


def expected_text(value: Any) -> str:
    r"""Return the answer that a row's column gives: marked in a worked solution, else the whole text.

    >>> expected_text("6 * 7 = <<6*7=42>>42\n#### 42"), expected_text(0.5)
    ('42', '0.5')
    """
    text = str(value).strip()
    _, boxed = _boxed_before(text)
    if boxed is not None:
        return boxed.strip()
    hashes = _hashes(text)[1]
    return text if hashes is None else hashes.strip()


def _boxed_before(text: str) -> tuple[int, str | None]:
    """Return the place and the content of the last complete box; (-1, None) if there is none."""
    for mark in reversed(list(_BOX.finditer(text))):
        if (content := _braced(text, mark.end())) is not None:
            return mark.start(), content
    return -1, None


def _braced(text: str, start: int) -> str | None:
    """Return what the braces at `start` enclose; a box may also hold one word without braces."""
    if start >= len(text) or text[start] != "{":
        word = re.match(r"[^\s{}$]+", text[start : start + MOST_ANSWER])
        return None if word is None else word[0].rstrip(".,;")
    depth = 0
    for place in range(start, min(len(text), start + MOST_ANSWER + 2)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        if depth == 0:
            return text[start + 1 : place]
    return None


def _hashes(text: str) -> tuple[int, str | None]:
    found = list(_HASHES.finditer(text))
    return (found[-1].start(), found[-1][1]) if found else (-1, None)


def _tagged(text: str) -> tuple[int, str | None]:
    """Return the last complete <answer>...</answer>."""
    ends = list(_TAG_END.finditer(text))
    starts = [mark for mark in _TAG.finditer(text) if ends and mark.end() <= ends[-1].start()]
    return (starts[-1].start(), text[starts[-1].end() : ends[-1].start()]) if starts else (-1, None)


def _phrase(text: str) -> tuple[int, str | None]:
    """Return what follows the last "answer is" or "answer:", to the end of the sentence or line."""
    for mark in reversed(list(_PHRASE.finditer(text))):
        if _STATED.search(mark[0]):
            line = text[mark.end() :].lstrip("*_ \t").partition("\n")[0]
            return mark.start(), re.split(r"[.!?](?:\s|$)|;\s", line, maxsplit=1)[0].strip().strip("*_").strip()
    return -1, None
