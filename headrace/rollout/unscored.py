"""Which sampled tokens lack their log-prob under the next version, and how it is filled in. Knows no sampler.

A token of version v is to be scored under v + 1, once; a later version never writes over it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.types import Completion, FloatArray, IntArray, float_array

Seen = tuple[IntArray, Completion]  # a prompt, and what was sampled after it


def lacking(completion: Completion, *, version: int) -> npt.NDArray[np.bool_]:
    """Tokens of version - 1 whose log-prob under `version` is not known."""
    known = completion.next_logprobs
    unknown = np.ones(len(completion.tokens), dtype=bool) if known is None else np.isnan(known)
    return np.asarray((completion.versions == version - 1) & unknown)


def filled(completion: Completion, logprobs: FloatArray, *, version: int) -> Completion:
    """The completion with `logprobs` (one for each of its tokens, under `version`) where they are lacking."""
    assert len(logprobs) == len(completion.tokens)
    where = lacking(completion, version=version)
    if not where.any():
        return completion
    before = np.full(len(logprobs), np.nan) if completion.next_logprobs is None else completion.next_logprobs
    return replace(completion, next_logprobs=float_array(np.where(where, logprobs, before)))


def begins_with(sequence: IntArray, seen: Seen) -> bool:
    """Whether what was seen is the beginning of a sequence."""
    prompt, completion = seen
    end = len(prompt) + len(completion.tokens)
    return np.array_equal(sequence[: len(prompt)], prompt) and np.array_equal(
        sequence[len(prompt) : end], completion.tokens
    )


def first_lacking(seen: Sequence[Seen], *, version: int) -> int | None:
    """Index of the first token that lacks its log-prob under `version`, in a sequence that begins with all of `seen`.

    >>> made = Completion(tokens=np.array([5, 6]), sampler_logprobs=np.zeros(2), raw_logprobs=np.zeros(2),
    ...                   versions=np.array([3, 4]), stop="stop")
    >>> first_lacking([(np.array([1, 2, 9]), made)], version=5), first_lacking([(np.array([1]), made)], version=6)
    (4, None)
    """
    wheres = [(len(prompt), lacking(completion, version=version)) for prompt, completion in seen]
    return min((start + int(where.argmax()) for start, where in wheres if where.any()), default=None)


def read_off(seen: Seen, logprobs: FloatArray, *, start: int, version: int) -> Completion:
    """What was seen, with the log-probs under `version` of the sequence it begins, known from its token `start` on."""
    prompt, completion = seen
    index = len(prompt) + np.arange(len(completion.tokens)) - start
    inside = (index >= 0) & (index < len(logprobs))
    own = np.where(inside, logprobs[np.where(inside, index, 0)] if len(logprobs) else np.nan, np.nan)
    return filled(completion, float_array(own), version=version)
