"""Micro-batches: every datum exactly once, units whole, the budget kept."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import binary, composite, integers, lists, none, one_of

from headrace.algo.packing import build_prefix_tree, pack
from headrace.types import IntArray, int_array


@composite
def requests(draw):  # type: ignore[no-untyped-def]
    lengths = draw(lists(integers(1, 12), min_size=1, max_size=20))
    units = draw(lists(one_of(none(), integers(0, 4)), min_size=len(lengths), max_size=len(lengths)))
    beginnings = draw(one_of(none(), lists(binary(max_size=1), min_size=len(lengths), max_size=len(lengths))))
    return lengths, units, draw(integers(1, 30)), beginnings


@given(requests())
def test_every_datum_is_packed_once_units_stay_whole_and_the_budget_holds(request) -> None:  # type: ignore[no-untyped-def]
    lengths, units, budget, beginnings = request
    batches = pack(lengths, units, budget=budget, beginnings=beginnings)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for unit in {unit for unit in units if unit is not None}:
        assert len([batch for batch in batches if any(units[index] == unit for index in batch)]) == 1
    for batch in batches:
        whole = {units[index] if units[index] is not None else ("own", index) for index in batch}
        assert sum(lengths[index] for index in batch) <= budget or len(whole) == 1
        assert list(batch) == sorted(batch)


@given(requests())
def test_no_two_micro_batches_would_fit_into_one(request) -> None:  # type: ignore[no-untyped-def]
    lengths, units, budget, beginnings = request
    batches = pack(lengths, units, budget=budget, beginnings=beginnings)
    sizes = [sum(lengths[index] for index in batch) for batch in batches]
    assert all(a + b > budget for position, a in enumerate(sizes) for b in sizes[:position])


def test_the_longest_go_first_and_the_rest_fill_the_gaps() -> None:
    # budget 10: 7 opens a batch, 6 another, 3 fills the first (7 + 3), 2 and 2 the second (6 + 2 + 2)
    assert pack([2, 7, 3, 6, 2], [None] * 5, budget=10) == ((0, 3, 4), (1, 2))


def test_a_pair_counts_as_one() -> None:
    # unit 8 is 4 + 5 = 9 tokens: nothing of length 2 or more fits beside it in 10
    assert pack([4, 2, 5, 3], [8, None, 8, None], budget=10) == ((0, 2), (1, 3))


def test_what_exceeds_the_budget_is_alone() -> None:
    assert pack([25, 1, 1], [None, None, None], budget=10) == ((0,), (1, 2))


def test_unit_numbers_and_positions_are_not_confused() -> None:
    # datum 0 has no unit; datum 1 is alone in unit 0
    assert pack([6, 6], [None, 0], budget=8) == ((0,), (1,))


def test_what_begins_alike_stays_together() -> None:
    # by length alone: 6 + 4 and 5 + 5, which tears both groups; a and b have 10 and 10 tokens
    lengths, beginnings = [6, 5, 4, 5], [b"a", b"b", b"a", b"b"]
    assert pack(lengths, [None] * 4, budget=10, beginnings=beginnings) == ((0, 2), (1, 3))
    # 4 + 3 of group a fill 8 as far as they go; its third is cut off and goes beside b
    assert pack([4, 3, 2, 5], [None] * 4, budget=8, beginnings=[b"a", b"a", b"a", b"b"]) == ((0, 1), (2, 3))


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
