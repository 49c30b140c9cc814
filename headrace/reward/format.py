"""The reward "format": whether turns have the form that a regular expression asks for.

It runs where users' functions do, because a pattern may take for ever on a text that a model wrote. Standard library
only.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SPEC = f"{__name__}:matches"


def matches(
    rollouts_messages: Sequence[Sequence[Mapping[str, Any]]],
    prompt: Sequence[Sequence[Mapping[str, Any]]],
    *,
    pattern: str,
    turns: str = "last",
) -> list[float]:
    """1 for an episode whose last turn matches as a whole, white space at its ends aside; with turns = "all" the share
    of its turns that do. "." matches line ends too."""
    wanted = re.compile(pattern, re.DOTALL)
    if turns not in ("last", "all"):
        raise ValueError(f'turns is {turns!r}: write "last" or "all"')
    scores = []
    for messages, before in zip(rollouts_messages, prompt, strict=True):
        said = [str(item["content"] or "").strip() for item in messages[len(before) :] if item["role"] == "assistant"]
        looked_at = said[-1:] if turns == "last" else said
        scores.append(sum(wanted.fullmatch(text) is not None for text in looked_at) / max(len(looked_at), 1))
    return scores
