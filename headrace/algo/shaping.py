"""Shape rewards and filter groups before any advantage is computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.name_lookup import lookup
from headrace.algo.statistics import Floats, k1, k2, k3

KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def overlong_penalty(num_tokens: int, *, max_tokens: int, margin: int, factor: float = 1.0) -> float:
    """Compute DAPO's soft punishment: 0 up to max - margin, then linear down to -factor at max (arXiv 2503.14476).

    >>> [overlong_penalty(n, max_tokens=100, margin=20) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    assert 0 < margin <= max_tokens
    excess = num_tokens - (max_tokens - margin)
    return -factor * min(excess / margin, 1.0) if excess > 0 else 0.0


def has_signal(rewards: Sequence[float], *, low: float = -np.inf, high: float = np.inf) -> bool:
    """Apply DAPO's group filter: rewards differ and their mean lies in [low, high].

    Step-level methods can learn from equal returns of unequal length; filter their groups by advantage instead.
    """
    return bool(rewards) and min(rewards) != max(rewards) and low <= float(np.mean(rewards)) <= high


def kl_rewards(
    rewards_T: npt.NDArray[Any],
    policy_logprobs_T: npt.NDArray[Any],
    reference_logprobs_T: npt.NDArray[Any],
    *,
    coef: float,
    estimator: str = "k1",
) -> Floats:
    """Compute r_t - coef * kl_t on the policy's own samples; k1 is the form whose policy gradient is that of the KL.

    Raises ConfigError on an estimator other than k1, k2 and k3.
    """
    kl_T = lookup(KL_ESTIMATORS, estimator, "KL estimator")(policy_logprobs_T, reference_logprobs_T)
    return np.asarray(rewards_T, dtype=np.float64) - coef * kl_T
