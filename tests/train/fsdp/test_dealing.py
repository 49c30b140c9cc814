"""Data are dealt by tokens; units stay whole; every rank computes equally many micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.train.fsdp.dealing import deal
from headrace.types import Datum, float_array, int_array


def datum(length: int, unit: int | None = None, first: int = 3) -> Datum:
    tokens = int_array(np.full(length + 1, first))
    weights = float_array(np.ones(length))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights}, unit=unit)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    units=st.lists(st.integers(0, 5) | st.none(), min_size=30, max_size=30),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 100),
)
def test_every_datum_is_dealt_once_and_units_stay_whole(
    lengths: list[int], units: list[int | None], ranks: int, budget: int
) -> None:
    data = [datum(length, unit, first=index) for index, (length, unit) in enumerate(zip(lengths, units, strict=False))]
    shares = deal(data, ranks, budget=budget)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share.indices) == list(range(len(data)))
    place = {index: rank for rank, share in enumerate(shares) for index in share.indices}
    for unit in {one.unit for one in data} - {None}:
        assert len({place[index] for index, one in enumerate(data) if one.unit == unit}) == 1
    for share in shares:
        assert [data[index] for index in share.indices] == list(share.data)
        assert sorted(index for batch in share.micro_batches for index in batch) == list(range(len(share.data)))
        assert len(share.micro_batches) <= share.num_micro_batches
    assert len({share.num_micro_batches for share in shares}) == 1
    assert max(len(share.micro_batches) for share in shares) == shares[0].num_micro_batches
    assert shares == deal(data, ranks, budget=budget)


def test_ranks_get_equally_many_tokens() -> None:
    data = [datum(length, first=index) for index, length in enumerate([40, 10, 10, 10, 10, 20, 20])]
    shares = deal(data, 2, budget=64)
    assert [sum(one.num_tokens for one in share.data) for share in shares] == [60, 60]


def test_a_shared_prompt_stays_on_one_rank_unless_the_others_would_wait() -> None:
    alike = [datum(20, first=1) for _ in range(2)] + [datum(20, first=2) for _ in range(2)]
    for share in deal(alike, 2, budget=100):
        assert len({one.inputs.tobytes() for one in share.data}) == 1
    shares = deal([datum(20, first=1) for _ in range(8)], 4, budget=1000)
    assert [len(share.data) for share in shares] == [2, 2, 2, 2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_may_get_nothing(ranks: int) -> None:
    shares = deal([datum(5)], ranks, budget=8)
    assert [len(share.data) for share in shares] == [1] + [0] * (ranks - 1)
    assert all(share.num_micro_batches == 1 for share in shares)
