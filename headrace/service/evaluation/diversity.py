"""Measure how alike sampled sequences are: distinct n-grams, and BLEU of each against the others. Tokens are integers.

BLEU is that of Papineni et al. 2002 with the reference length nearest to the candidate's (the shorter of two equally
near), uniform weights, and n-grams that are never found counted as 0.1 of one, as Chen and Cherry 2014 call method 1.
"""

import math
from collections import Counter
from collections.abc import Sequence

Tokens = Sequence[int]
Grams = Counter[tuple[int, ...]]
NEARLY_NONE = 0.1  # matches, where there are none


def grams(tokens: Tokens, n: int) -> Grams:
    """Count every run of n tokens.

    >>> grams([1, 2, 1, 2], 2)
    Counter({(1, 2): 2, (2, 1): 1})
    """
    assert n >= 1
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def distinct_n(sequences: Sequence[Tokens], n: int) -> float:
    """Return the share of different n-grams among all n-grams of all sequences (Li et al. 2016), or NaN without any.

    >>> distinct_n([[1, 2, 3], [1, 2, 4]], 2)  # 12 23 12 24
    0.75
    """
    counts: Grams = Counter()
    for tokens in sequences:
        counts.update(grams(tokens, n))
    return len(counts) / counts.total() if counts else math.nan


def bleu(candidate: Tokens, references: Sequence[Tokens], *, max_n: int = 4) -> float:
    """Return exp(sum_n log p_n / N) times the brevity penalty, or 0 if not a single token is shared."""
    clips = [_clip([grams(reference, n) for reference in references]) for n in range(1, max_n + 1)]
    return _bleu(candidate, clips, [len(reference) for reference in references], owner=None)


def self_bleu(sequences: Sequence[Tokens], *, max_n: int = 4) -> float:
    """Return the mean over sequences of their BLEU against all others (Zhu et al. 2018): 1 if all are the same, near 0
    if they share nothing. Empty sequences are left out; returns NaN if fewer than two are left."""
    nonempty = [tokens for tokens in sequences if len(tokens)]
    if len(nonempty) < 2:
        return math.nan
    clips = [_clip([grams(tokens, n) for tokens in nonempty]) for n in range(1, max_n + 1)]
    lengths = Counter(len(tokens) for tokens in nonempty)
    scores = [
        _bleu(
            tokens, clips, [length for length in lengths if length != len(tokens) or lengths[length] > 1], owner=index
        )
        for index, tokens in enumerate(nonempty)
    ]
    return sum(scores) / len(scores)


Clip = dict[tuple[int, ...], tuple[int, int, int]]


def _clip(counts: Sequence[Grams]) -> Clip:
    """Find for each n-gram which sequence has the largest count, that count, and the largest count of the others."""
    best: Clip = {}
    for owner, gram_counts in enumerate(counts):
        for gram, count in gram_counts.items():
            leader, first, second = best.get(gram, (-1, 0, 0))
            best[gram] = (owner, count, first) if count > first else (leader, first, max(second, count))
    return best


def _bleu(candidate: Tokens, clips: Sequence[Clip], lengths: Sequence[int], *, owner: int | None) -> float:
    logs = 0.0
    for n, clip in enumerate(clips, start=1):
        gram_counts = grams(candidate, n)
        matches = sum(min(count, _allowed(clip, gram, owner)) for gram, count in gram_counts.items())
        if n == 1 and not matches:
            return 0.0
        logs += math.log((matches or NEARLY_NONE) / max(gram_counts.total(), 1)) / len(clips)
    nearest = min(lengths, key=lambda length: (abs(length - len(candidate)), length))
    penalty = min(0.0, 1.0 - nearest / len(candidate))
    return math.exp(logs + penalty)


def _allowed(clip: Clip, gram: tuple[int, ...], owner: int | None) -> int:
    leader, first, second = clip.get(gram, (-1, 0, 0))
    return second if leader == owner else first
