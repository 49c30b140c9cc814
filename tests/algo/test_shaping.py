import numpy as np
import pytest

from headrace.algo.shaping import has_signal, kl_rewards, overlong_penalty
from headrace.errors import ConfigError


def test_overlong_penalty_is_linear_in_the_margin_and_bounded() -> None:
    lengths = (0, 80, 81, 95, 100, 140)
    found = [overlong_penalty(length, max_tokens=100, margin=20, factor=2.0) for length in lengths]
    assert found == pytest.approx([0.0, 0.0, -0.1, -1.5, -2.0, -2.0])


def test_a_group_teaches_when_its_rewards_differ() -> None:
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([])
    assert has_signal([0.0, 1.0])
    assert not has_signal([0.0] * 39 + [1.0], low=0.05, high=0.95)
    assert has_signal([0.0] * 9 + [1.0], low=0.05, high=0.95)


def test_kl_rewards_by_hand() -> None:
    # d = 0.5, -1: k1 = d, k2 = d^2 / 2
    arguments = (np.array([0.0, 1.0]), np.array([-1.0, -3.0]), np.array([-1.5, -2.0]))
    assert kl_rewards(*arguments, coef=0.1).tolist() == pytest.approx([-0.05, 1.1])
    assert kl_rewards(*arguments, coef=0.1, estimator="k2").tolist() == pytest.approx([-0.0125, 0.95])
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4'"):
        kl_rewards(*arguments, coef=0.1, estimator="k4")
