"""Diversity of sequences: numbers worked out by hand, and nltk's."""

import math
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.evaluation.diversity import bleu, distinct_n, self_bleu


def test_distinct_counts_different_runs() -> None:
    sequences = [[1, 2, 3], [1, 2, 4]]
    assert distinct_n(sequences, 1) == pytest.approx(4 / 6)
    assert distinct_n(sequences, 2) == pytest.approx(3 / 4)
    assert distinct_n(sequences, 3) == 1.0
    assert math.isnan(distinct_n(sequences, 4))  # no run is so long


def test_bleu_by_hand() -> None:
    # 1: 1 2 3 5 share 1 2 3 -> 3/4; 2: 12 23 of 12 23 35 -> 2/3; 3: 123 of 123 235 -> 1/2; 4: none of 1 -> 0.1 / 1
    expected = exp((log(3 / 4) + log(2 / 3) + log(1 / 2) + log(0.1)) / 4)
    assert bleu([1, 2, 3, 5], [[1, 2, 3, 4]]) == pytest.approx(expected)
    # a token that is there once counts once: 1/3, nothing longer; two tokens too short: exp(1 - 5 / 3)
    shorter = exp((log(1 / 3) + log(0.1 / 2) + log(0.1 / 1) + log(0.1)) / 4 + 1 - 5 / 3)
    assert bleu([7, 7, 7], [[7, 1, 2, 3, 4]]) == pytest.approx(shorter)
    assert bleu([1, 2], [[3, 4]]) == 0.0
    assert bleu([1, 2, 3, 4, 5], [[9] * 9, [1, 2, 3, 4, 5]]) == pytest.approx(1.0)


def test_self_bleu_is_one_of_copies_and_nothing_of_strangers() -> None:
    assert self_bleu([[1, 2, 3, 4, 5]] * 3) == pytest.approx(1.0)
    assert self_bleu([[1, 2, 3, 4], [5, 6, 7, 8]]) == 0.0
    assert math.isnan(self_bleu([[1, 2], []]))
    # a sequence is no reference of its own: of 1 1 2 3 against 1 4 5 6 one of the two 1s counts
    first = exp((log(1 / 4) + log(0.1 / 3) + log(0.1 / 2) + log(0.1)) / 4)
    assert self_bleu([[1, 1, 2, 3], [1, 4, 5, 6]]) == pytest.approx(first)


sequences_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=2, max_size=5)


@pytest.mark.slow  # nltk takes long to import
@given(sequences_of)
def test_bleu_is_nltks(sequences: list[list[int]]) -> None:
    scores = pytest.importorskip("nltk.translate.bleu_score", reason="pip install nltk")
    smooth = scores.SmoothingFunction().method1

    def theirs(index: int) -> float:
        others = sequences[:index] + sequences[index + 1 :]
        return float(scores.sentence_bleu(others, sequences[index], smoothing_function=smooth))

    assert bleu(sequences[0], sequences[1:]) == pytest.approx(theirs(0), abs=1e-12)
    assert self_bleu(sequences) == pytest.approx(sum(map(theirs, range(len(sequences)))) / len(sequences), abs=1e-12)
