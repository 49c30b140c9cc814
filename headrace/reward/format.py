"""The reward "format": score turns by a regular expression.

It runs in the sandbox, as users' functions do, because a pattern may take for ever on a text that a model wrote. So it
is a module of its own, which imports the standard library only.
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
    """Score 1 if the last turn matches as a whole, white space at its ends aside; with turns = "all", the share of
    turns that do. "." matches line ends too."""
    form = re.compile(pattern, re.DOTALL)
    if turns not in ("last", "all"):
        raise ValueError(f'turns is {turns!r}: write "last" or "all"')
    scores = []
    for messages, before in zip(rollouts_messages, prompt, strict=True):
        texts = [str(item["content"] or "").strip() for item in messages[len(before) :] if item["role"] == "assistant"]
        scored = texts[-1:] if turns == "last" else texts
        scores.append(sum(form.fullmatch(text) is not None for text in scored) / max(len(scored), 1))
    return scores
