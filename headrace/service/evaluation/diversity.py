"""How alike sampled sequences are: distinct n-grams, and BLEU of each against the others. Tokens may be any integers.

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
    """Every run of n tokens, with how often it is there.

    >>> grams([1, 2, 1, 2], 2)
    Counter({(1, 2): 2, (2, 1): 1})
    """
    assert n >= 1
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def distinct_n(sequences: Sequence[Tokens], n: int) -> float:
    """The share of different n-grams among all n-grams of all sequences (Li et al. 2016); NaN where there are none.

    >>> distinct_n([[1, 2, 3], [1, 2, 4]], 2)  # 12 23 12 24
    0.75
    """
    counts: Grams = Counter()
    for tokens in sequences:
        counts.update(grams(tokens, n))
    return len(counts) / counts.total() if counts else math.nan


def bleu(candidate: Tokens, references: Sequence[Tokens], *, max_n: int = 4) -> float:
    """exp(sum_n log p_n / N) times the brevity penalty; 0 where not even a single token is shared."""
    clips = [_clip([grams(reference, n) for reference in references]) for n in range(1, max_n + 1)]
    return _bleu(candidate, clips, [len(reference) for reference in references], owner=None)


def self_bleu(sequences: Sequence[Tokens], *, max_n: int = 4) -> float:
    """The mean over sequences of their BLEU against all others (Zhu et al. 2018): 1 where all are the same, near 0
    where they share nothing. Sequences without a token are left out; NaN where fewer than two are left."""
    spoken = [tokens for tokens in sequences if len(tokens)]
    if len(spoken) < 2:
        return math.nan
    clips = [_clip([grams(tokens, n) for tokens in spoken]) for n in range(1, max_n + 1)]
    lengths = Counter(len(tokens) for tokens in spoken)
    scores = [
        _bleu(tokens, clips, [each for each in lengths if each != len(tokens) or lengths[each] > 1], owner=index)
        for index, tokens in enumerate(spoken)
    ]
    return sum(scores) / len(scores)


Clip = dict[tuple[int, ...], tuple[int, int, int]]


def _clip(counts: Sequence[Grams]) -> Clip:
    """Of each n-gram: whose count is largest, that count, and the largest of the others."""
    best: Clip = {}
    for owner, own in enumerate(counts):
        for gram, count in own.items():
            leader, first, second = best.get(gram, (-1, 0, 0))
            best[gram] = (owner, count, first) if count > first else (leader, first, max(second, count))
    return best


def _bleu(candidate: Tokens, clips: Sequence[Clip], lengths: Sequence[int], *, owner: int | None) -> float:
    logs = 0.0
    for n, clip in enumerate(clips, start=1):
        own = grams(candidate, n)
        matches = sum(min(count, _allowed(clip, gram, owner)) for gram, count in own.items())
        if n == 1 and not matches:
            return 0.0
        logs += math.log((matches or NEARLY_NONE) / max(own.total(), 1)) / len(clips)
    nearest = min(lengths, key=lambda length: (abs(length - len(candidate)), length))
    penalty = min(0.0, 1.0 - nearest / len(candidate))
    return math.exp(logs + penalty)


def _allowed(clip: Clip, gram: tuple[int, ...], owner: int | None) -> int:
    leader, first, second = clip.get(gram, (-1, 0, 0))
    return second if leader == owner else first
