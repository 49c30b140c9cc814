"""Seeds by hashing and uniforms by counter: fixed for ever, independent of order, and uniform."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, one_of, text

from headrace.algo.random import derive_seed, uniforms

PARTS = lists(one_of(integers(-(2**70), 2**70), text(alphabet="ab;:%str25B3int1", max_size=8)), max_size=4)


@given(PARTS, PARTS)
def test_different_parts_give_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [((1,), ("1",)), ((1, 2), (12,)), (("a", "b"), ("a;str:b",)), (("%3B",), (";",)), ((), ("",)), ((1, 2), (2, 1))],
)
def test_parts_that_spell_alike_give_different_seeds(left: tuple[int | str, ...], right: tuple[int | str, ...]) -> None:
    assert derive_seed(*left) != derive_seed(*right)


@given(PARTS)
def test_a_seed_is_a_63_bit_number(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


def test_seeds_and_uniforms_never_change() -> None:
    """A resumed run and a repeated one draw the same numbers, on every machine and with every numpy."""
    assert derive_seed(0, "episode", 3, 1) == 7558660075575096182
    assert uniforms([0, 1, 2**63 - 1], [0, 5, 2**40]).tolist() == [
        0.3426402490327874,
        0.9307376531551788,
        0.3944549200795287,
    ]


@given(lists(integers(0, 2**64 - 1), min_size=1, max_size=5), integers(0, 2**64 - 1))
def test_a_uniform_depends_on_its_own_seed_and_position_only(seeds: list[int], position: int) -> None:
    together = uniforms(seeds, [position] * len(seeds))
    assert together.tolist() == [float(uniforms([seed], [position])[0]) for seed in seeds]
    assert ((together > 0) & (together < 1)).all()


def test_the_ends_are_never_drawn() -> None:
    """Seeds found by undoing the mixing: for the first all 64 mixed bits are 1, for the second all are 0."""
    top, bottom = uniforms([8478263317712624795, 7448028450539979566], [1, 2]).tolist()
    assert top == 1.0 - 2.0**-53  # (2^53 - 1 + 1/2) / 2^53 would round to 1
    assert bottom == 2.0**-54


@pytest.mark.parametrize("along", ["positions", "seeds", "derived seeds"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    size = 20_000
    numbers = list(range(size))
    drawn = {
        "positions": lambda: uniforms([7] * size, numbers),
        "seeds": lambda: uniforms(numbers, [0] * size),
        "derived seeds": lambda: uniforms([derive_seed(1, number) for number in numbers], [3] * size),
    }[along]()
    # Kolmogorov-Smirnov: sqrt(n) D exceeds 1.95 with probability 0.001; the numbers are fixed, so it never flickers
    distance = np.abs(np.sort(drawn) - (np.arange(size) + 0.5) / size).max()
    assert distance * size**0.5 < 1.95
    for lag in (1, 2, 8):  # the correlation of independent numbers is 0 +- 1 / sqrt(n)
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 4 / size**0.5


def test_equal_positions_of_neighbouring_seeds_are_uncorrelated() -> None:
    positions = list(range(20_000))
    left, right = uniforms([10] * 20_000, positions), uniforms([11] * 20_000, positions)
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / 20_000**0.5
    # no shift of one stream is the other, as it would be if seed and position were only added
    assert not np.isin(left[:1000], right).any()
