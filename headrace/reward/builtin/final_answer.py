"""Find the final answer of an episode, for a vote among the samples of a task."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.reward.builtin.answers import MOST_ANSWER, expected_text, find_expected, marked_answer, plain_signs
from headrace.reward.builtin.final_number import number_of

_NUMBER = re.compile(r"[-+$€£¥\s]*[\d.,/]*\d[\d.,/]*\s*%?")


def final_answer(text: str, task_data: Mapping[str, Any]) -> str | None:
    r"""Return the answer that a text gives, spelt so that equal answers are equal texts; None if the task expects none.

    Where a number is expected it is the number of the marked answer, else the last one of the text; elsewhere the
    marked answer, else the whole text, in lower case. A text without an answer gives "".

    >>> final_answer("so #### 1,000.0", {"answer": "1000"}), final_answer("Paris ", {"answer": "Paris"})
    ('1000', 'paris')
    >>> final_answer("no idea", {"answer": "1000"}), final_answer("go north", {})
    ('', None)
    """
    expected = find_expected(task_data, None)
    if expected is None:
        return None
    if _NUMBER.fullmatch(plain_signs(expected_text(expected))):
        number = number_of(text)
        return "" if number is None else str(number)
    answer = marked_answer(text) or text
    return " ".join(answer.casefold().split()) if len(answer) <= MOST_ANSWER else ""
