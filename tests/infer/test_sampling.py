"""From logits to tokens: the inverse CDF by exact arithmetic, frequencies, cuts, temperature, records."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.random import uniforms
from headrace.infer.sampling import inverse_cdf, sample_rows, truncate_distribution
from headrace.types import SamplingParams

NEXT_TO_ONE = math.nextafter(1.0, 0.0)
numbers = st.one_of(st.floats(0.0, NEXT_TO_ONE), st.sampled_from([0.0, 2.0**-54, 0.5, NEXT_TO_ONE, 1.0]))


def drawn_by_hand(weights: list[int], number: float) -> int:
    """The first token whose cumulative weight exceeds number * total, in rational arithmetic."""
    target = Fraction(number) * sum(weights)
    passed = Fraction(0)
    for token, weight in enumerate(weights):
        passed += weight
        if passed > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight)  # only for number = 1


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 400).flatmap(
        lambda size: st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 64, 1000]), min_size=size, max_size=size)
    ),
    st.lists(numbers, min_size=1, max_size=5),
)
def test_the_inverse_cdf_is_exact(weights: list[int], chosen: list[float]) -> None:
    # sums of these weights are exact in float32; number * total may round, so numbers get few bits
    weights[len(weights) // 2] = weights[len(weights) // 2] or 1
    coarse = [math.floor(number * 2**20) / 2**20 if number < NEXT_TO_ONE else number for number in chosen]
    rows = torch.tensor([weights] * len(coarse), dtype=torch.float32)
    found = inverse_cdf(rows, torch.tensor(coarse, dtype=torch.float64))
    last = max(token for token, weight in enumerate(weights) if weight)
    expected = [drawn_by_hand(weights, number) if number < NEXT_TO_ONE else last for number in coarse]
    assert found.tolist() == expected


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300).flatmap(
        lambda size: st.lists(
            st.one_of(st.just(0.0), st.floats(1e-38, 1e-30), st.floats(1e-8, 1.0)), min_size=size, max_size=size
        )
    ),
    numbers,
)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], number: float) -> None:
    weights = weights if any(weights) else [*weights, 0.5]
    row = torch.tensor([weights], dtype=torch.float32)
    [token] = inverse_cdf(row, torch.tensor([number], dtype=torch.float64)).tolist()
    assert token < len(weights)
    assert row[0, token] > 0


@pytest.mark.parametrize("size", [777, 50_000])  # one pass over all rows, and a few rows at a time
def test_rows_do_not_depend_on_each_other(size: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(24, size)).astype(np.float32)) * 3
    params = [
        SamplingParams(max_tokens=1, temperature=[1.0, 0.5, 0.0][row % 3], top_k=[None, 5][row % 2])
        for row in range(24)
    ]
    numbers_B = torch.from_numpy(uniforms(list(range(24)), [3] * 24))
    together = sample_rows(logits, params, numbers_B)
    for row in range(24):
        one = sample_rows(logits[row : row + 1].clone(), params[row : row + 1], numbers_B[row : row + 1])
        assert one.tokens_B[0] == together.tokens_B[row]
        assert one.logprobs_B[0] == together.logprobs_B[row]
        assert one.raw_logprobs_B[0] == together.raw_logprobs_B[row]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0)])
def test_spending_the_logits_changes_no_bit(temperatures: tuple[float, float]) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 50_000)).astype(np.float32)) * 3
    before = logits.clone()
    params = [SamplingParams(max_tokens=1, temperature=temperatures[row % 2]) for row in range(8)]
    numbers_B = torch.from_numpy(uniforms(list(range(8)), [3] * 8))
    kept, spent = sample_rows(logits, params, numbers_B), sample_rows(before.clone(), params, numbers_B, spend=True)
    assert torch.equal(logits, before)
    assert torch.equal(kept.tokens_B, spent.tokens_B)
    assert torch.equal(kept.logprobs_B, spent.logprobs_B)
    assert torch.equal(kept.raw_logprobs_B, spent.raw_logprobs_B)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_over_seeds_are_the_softmax(temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=40).astype(np.float32)) * 1.5
    expected = torch.softmax(logits.double() / temperature, dim=0).numpy()
    draws = 40_000
    params = [SamplingParams(max_tokens=1, temperature=temperature)] * draws
    numbers_B = torch.from_numpy(uniforms(list(range(draws)), [7] * draws))
    tokens = sample_rows(logits.expand(draws, -1), params, numbers_B).tokens_B.numpy()
    counts = np.bincount(tokens, minlength=40)
    chi_square = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    # 39 degrees of freedom: the 0.1 % point above is 72.1, the 0.1 % point below is 16.3
    assert 16.3 < chi_square < 72.1


def test_frequencies_over_positions_are_the_softmax_too() -> None:
    draws = 40_000
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    numbers_B = torch.from_numpy(uniforms([11] * draws, list(range(draws))))
    params = [SamplingParams(max_tokens=1)] * draws
    counts = np.bincount(sample_rows(probs.log().expand(draws, -1), params, numbers_B).tokens_B.numpy(), minlength=4)
    expected = draws * probs.numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # the 0.1 % point at 3 degrees of freedom


# --- cuts ------------------------------------------------------------------------------------------------------------

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [1]),  # 0.4 is reached by the first
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),  # 0.4 + 0.25 = 0.65 is below it, 0.85 is not
        ({"top_p": 0.86}, [0, 1, 3, 4]),
        ({"top_p": 1e-9}, [1]),  # the most likely token always stays
        ({"min_p": 0.5}, [1, 3, 4]),  # at least 0.5 * 0.4 = 0.2
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.7}, [1, 3]),  # of 0.65 that are left, 0.7 * 0.65 = 0.455 need both
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.6 * 0.65 = 0.39
        ({"top_k": 4, "min_p": 0.6}, [1, 3]),
    ],
)
def test_what_a_cut_keeps(params: dict[str, float], kept: list[int]) -> None:
    left = truncate_distribution(PROBS, SamplingParams(max_tokens=1, **params))  # type: ignore[arg-type]
    assert torch.nonzero(left)[:, 0].tolist() == kept
    assert torch.equal(left[kept], PROBS[kept])


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=200),
    number=numbers,
    temperature=st.sampled_from([1.0, 0.3, 2.5, 1e-4]),
    top_k=st.one_of(st.none(), st.integers(1, 20)),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_what_is_cut_is_never_drawn(
    logits: list[float], number: float, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor([logits], dtype=torch.float32)
    drawn = sample_rows(row, [params], torch.tensor([number], dtype=torch.float64))
    [token] = drawn.tokens_B.tolist()
    probs = torch.softmax(row[0] / temperature, dim=0)
    assert truncate_distribution(probs, params)[token] > 0
    assert math.isfinite(float(drawn.logprobs_B[0]))
    if top_k is not None:
        assert (probs > probs[token]).sum() < top_k


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_tempered_and_raw_log_probs() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    # at temperature 1: 1/4 and 3/4; at 1/2 logits double: 1/10 and 9/10
    drawn = sample_rows(logits, [SamplingParams(max_tokens=1, temperature=0.5)], torch.tensor([0.05]).double())
    assert drawn.tokens_B.tolist() == [0]
    assert float(drawn.logprobs_B[0]) == pytest.approx(math.log(0.1), rel=1e-6)
    assert float(drawn.raw_logprobs_B[0]) == pytest.approx(math.log(0.25), rel=1e-6)
    drawn = sample_rows(logits, [SamplingParams(max_tokens=1, temperature=0.5)], torch.tensor([0.11]).double())
    assert drawn.tokens_B.tolist() == [1]
    assert float(drawn.logprobs_B[0]) == pytest.approx(math.log(0.9), rel=1e-6)


def test_a_cut_does_not_change_the_recorded_log_prob() -> None:
    params = SamplingParams(max_tokens=1, top_k=2)
    drawn = sample_rows(PROBS.log()[None], [params], torch.tensor([0.7]).double())
    assert drawn.tokens_B.tolist() == [3]  # 0.4 of 0.65 is 0.615
    assert float(drawn.logprobs_B[0]) == pytest.approx(math.log(0.25), rel=1e-6)


def test_temperature_zero_takes_the_most_likely_token_whatever_the_number() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0]] * 3 + [[1.0, 5.0, 2.0, 5.0]])
    greedy, warm = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=2.0)
    drawn = sample_rows(logits, [greedy, greedy, greedy, warm], torch.tensor([0.0, 0.5, 1.0, 0.0]).double())
    assert drawn.tokens_B.tolist() == [1, 1, 1, 0]
    raw = math.log(math.exp(5) / (math.exp(1) + 2 * math.exp(5) + math.exp(2)))
    assert drawn.raw_logprobs_B[:3].tolist() == pytest.approx([raw] * 3, rel=1e-6)
    assert drawn.logprobs_B[:3].tolist() == drawn.raw_logprobs_B[:3].tolist()
