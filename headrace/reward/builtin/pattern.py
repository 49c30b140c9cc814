"""The reward "regex": a pattern that is found in the last answer, or whose group is the expected text.

It runs in the sandbox, because a pattern may take for ever on a text that a model wrote.
"""

import re
from collections.abc import Mapping
from typing import Any

from headrace.reward.builtin.answers import expected


def score(
    text: str, task_data: Mapping[str, Any], *, pattern: str, column: str | None = None, ignore_case: bool = False
) -> bool:
    """Return whether the pattern is found; with `column`, whether group 1 of its last match is that column's text.

    "." matches line ends too. A pattern without a group is compared as a whole.
    """
    form = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    if column is None:
        return form.search(text) is not None
    matches = list(form.finditer(text))
    if not matches:
        return False
    last = matches[-1]
    found, truth = (last[1] if form.groups else last[0]) or "", str(expected(task_data, column))
    return _fold(found, ignore_case=ignore_case) == _fold(truth, ignore_case=ignore_case)


def _fold(text: str, *, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()
