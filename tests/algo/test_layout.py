"""Layouts of a micro-batch: common beginnings once, every token accounted for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.packing import build_prefix_tree
from headrace.types import IntArray, int_array

PROMPT = list(range(100, 120))


def rows(*sequences: list[int]) -> list[IntArray]:
    return [int_array(sequence) for sequence in sequences]


def test_a_groups_prompt_is_there_once() -> None:
    layout = build_prefix_tree(rows([*PROMPT, 1, 2], [*PROMPT, 3], [*PROMPT, 1, 4, 5]))
    assert layout.tokens.tolist() == [*PROMPT, 1, 2, 3, 1, 4, 5]
    assert layout.lengths == (20, 2, 1, 3)
    assert layout.parents == (None, 0, 0, 0)
    assert layout.positions.tolist() == [*range(20), 20, 21, 20, 20, 21, 22]
    assert layout.place.tolist() == [*range(20), 20, 21, *range(20), 22, *range(20), 23, 24, 25]


def test_groups_behind_a_common_system_prompt_are_a_tree() -> None:
    first, second = list(range(200, 218)), list(range(300, 316))
    layout = build_prefix_tree(
        rows([*PROMPT, *first, 1], [*PROMPT, *first, 2], [*PROMPT, *second, 3], [*PROMPT, *second, 4])
    )
    assert layout.lengths == (20, 18, 1, 1, 16, 1, 1)
    assert layout.parents == (None, 0, 1, 1, 0, 4, 4)


def test_short_or_no_common_beginnings_are_left_alone() -> None:
    short = [7] * 15
    layout = build_prefix_tree(rows([*short, 1], [*short, 2], [9, 9]))
    assert layout.parents == (None, None, None)
    assert layout.lengths == (16, 16, 2)


def test_every_sequence_keeps_a_token_of_its_own() -> None:
    layout = build_prefix_tree(rows(PROMPT, PROMPT, [*PROMPT, 1]))
    assert layout.lengths == (19, 1, 1, 2)
    assert layout.parents == (None, 0, 0, 0)


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8)


@given(sequences, st.integers(1, 4))
def test_following_parents_gives_every_sequence_back(lists: list[list[int]], shortest: int) -> None:
    given_rows = rows(*lists)
    layout = build_prefix_tree(given_rows, shortest=shortest)
    starts = np.cumsum([0, *layout.lengths])
    chains = []  # the tokens of the layout that each segment sees, itself at the end
    for segment, parent in enumerate(layout.parents):
        before = [] if parent is None else chains[parent]
        chains.append([*before, *range(starts[segment], starts[segment + 1])])
    at = 0
    for row in given_rows:
        place = layout.place[at : at + len(row)].tolist()
        at += len(row)
        assert layout.tokens[place].tolist() == row.tolist()
        assert layout.positions[place].tolist() == list(range(len(row)))
        assert place in chains, "a sequence is exactly what its last segment sees"
    assert len(layout.tokens) <= sum(map(len, given_rows))
