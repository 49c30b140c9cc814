"""Generalised advantages: what a masked token, a limit and an end do to the recursion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, composite, floats, integers

from headrace.algo.advantages import adaptive_lam, reinforce_pp_tokens, token_gae, turn_gae
from headrace.algo.advantages.step_table import discount


def test_by_hand() -> None:
    # gamma = 0.5, lam = 0.5. tokens: r = 0, 0, 1; V = 1, 2, 4; the episode ended by itself
    # deltas: 0 + 1 - 1 = 0; 0 + 2 - 2 = 0; 1 + 0 - 4 = -3.  A: -3/16, -3/4, -3
    out = token_gae([0, 0, 1], [1, 2, 4], [1, 1, 1], [3], [0.0], gamma=0.5, lam=0.5)  # type: ignore[arg-type]
    assert out.advantages.tolist() == [-0.1875, -0.75, -3.0]
    assert out.returns.tolist() == [0.8125, 1.25, 1.0]
    cut = token_gae([0, 0, 1], [1, 2, 4], [1, 1, 1], [3], [6.0], gamma=0.5, lam=0.5)  # type: ignore[arg-type]
    assert cut.advantages.tolist() == [0.0, 0.0, 0.0]  # 1 + 0.5 * 6 - 4: a limit is no end


def test_tool_tokens_and_padding_consume_no_step() -> None:
    # the same episode with a prompt, a tool's answer in the middle and padding: nothing changes, rubbish values or not
    plain = token_gae([0, 0, 1], [1, 2, 4], [1, 1, 1], [3], [0.0], gamma=0.5, lam=0.5)  # type: ignore[arg-type]
    padded = token_gae(
        np.array([0, 0, 9, 9, 0, 1, 9]),
        np.array([7.0, 1, 50, 50, 2, 4, 50]),
        np.array([0, 1, 0, 0, 1, 1, 0]),
        np.array([7]),
        np.array([0.0]),
        gamma=0.5,
        lam=0.5,
    )
    assert padded.advantages[[1, 4, 5]].tolist() == plain.advantages.tolist()
    assert padded.returns[[1, 4, 5]].tolist() == plain.returns.tolist()
    assert padded.advantages[[0, 2, 3, 6]].tolist() == [0.0] * 4


@composite
def ragged(draw):  # type: ignore[no-untyped-def]
    lengths = [draw(integers(0, 5)) for _ in range(draw(integers(1, 4)))]
    total = sum(lengths)
    rewards = [draw(floats(-2, 2)) for _ in range(total)]
    values = [draw(floats(-2, 2)) for _ in range(total)]
    sampled = [draw(booleans()) for _ in range(total)]
    bootstrap = [draw(floats(-2, 2)) for _ in lengths]
    return lengths, rewards, values, sampled, bootstrap


@given(ragged())
def test_against_the_recursion_of_the_literature(case) -> None:  # type: ignore[no-untyped-def]
    lengths, rewards, values, sampled, bootstrap = case
    out = token_gae(*(np.array(row) for row in (rewards, values, sampled, lengths, bootstrap)), gamma=0.9, lam=0.8)
    start = 0
    for length, last in zip(lengths, bootstrap, strict=True):
        following, running = last, 0.0
        for t in range(start + length - 1, start - 1, -1):
            if sampled[t]:
                running = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * running
                following = values[t]
                assert out.advantages[t] == pytest.approx(running, abs=1e-9)
            else:
                assert out.advantages[t] == 0.0
        start += length


def test_without_a_critic_it_is_the_sum_of_later_rewards() -> None:
    rewards = np.array([1.0, 0.0, 2.0, 5.0])
    out = token_gae(rewards, np.zeros(4), np.ones(4), np.array([3, 1]), np.zeros(2), gamma=1.0, lam=1.0)
    assert out.advantages.tolist() == [3.0, 2.0, 2.0, 5.0]


def test_lambda_by_length() -> None:
    # VAPO: max(0, 1 - 1 / (alpha L)); alpha = 0.5, L = 2 and 4: 0 and 0.5
    lam = np.array([adaptive_lam(length, alpha=0.5) for length in (2, 4)])
    assert lam.tolist() == [0.0, 0.5]
    rewards = np.array([0, 1, 0, 0, 0, 1.0])
    out = token_gae(rewards, np.zeros(6), np.ones(6), np.array([2, 4]), np.zeros(2), gamma=1.0, lam=lam)
    assert out.advantages.tolist() == [0.0, 1.0, 0.125, 0.25, 0.5, 1.0]


def test_turns_are_the_steps() -> None:
    # turn 0: tokens 1, 2 (value 1 at its first); turn 1: tokens 4, 5 (value 2), reward 3 on the last; gamma = lam = 0.5
    # deltas: 0 + 0.5 * 2 - 1 = 0; 3 - 2 = 1.  A: 0.25, 1
    out = turn_gae(
        np.array([0, 0, 0, 0, 0, 3.0]),
        np.array([9, 1, 9, 9, 2, 9.0]),
        np.array([-1, 0, 0, -1, 1, 1]),
        np.array([6]),
        np.array([0.0]),
        np.array([9, 0, -0.1, 9, 0, 0]),
        gamma=0.5,
        lam=0.5,
    )
    assert out.advantages.tolist() == pytest.approx([0, 0.25, 0.15, 0, 1.0, 1.0])
    assert out.returns.tolist() == [0, 1.25, 0, 0, 3.0, 0]
    assert out.critic.tolist() == [0, 1, 0, 0, 1, 0]


def test_one_token_turns_are_tokens() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=8), rng.normal(size=8)
    sampled = np.array([0, 1, 1, 0, 1, 1, 1, 0])
    turns = np.where(sampled, np.cumsum(sampled) - 1, -1)
    lengths, bootstrap = np.array([3, 5]), np.array([0.5, 0.0])
    by_token = token_gae(rewards, values, sampled, lengths, bootstrap, gamma=0.9, lam=0.7)
    by_turn = turn_gae(rewards, values, turns, lengths, bootstrap, gamma=0.9, lam=0.7)
    np.testing.assert_allclose(by_turn.advantages, by_token.advantages)


def test_reinforce_pp_whitens_over_all_sampled_tokens() -> None:
    # returns to go 2, 2 | 0 (the middle token is a tool's): mean 4/3, sample std 2/sqrt 3
    out = reinforce_pp_tokens(np.array([0, 9, 2, 0.0]), np.array([1, 0, 1, 1]), np.array([3, 1]), std_eps=0.0)
    root = np.sqrt(3)
    np.testing.assert_allclose(out, [1 / root, 0, 1 / root, -2 / root])


def test_discounted_keeps_episodes_apart() -> None:
    values = np.array([1.0, 1.0, 1.0, 1.0, 1.0])
    assert discount(values, np.array([2, 0, 3]), 0.5).tolist() == [1.5, 1.0, 1.75, 1.5, 1.0]
    assert discount(np.zeros(0), np.zeros(0, dtype=np.int64), 0.5).tolist() == []
