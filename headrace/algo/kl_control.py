"""Keep the KL of a training step near a target (coefficient) or below a limit (scaling an update back)."""

import math
from collections.abc import Sequence

from headrace.algo.statistics import k3
from headrace.types import Datum, FloatArray

MAX_TRIES = 4  # of a share that is not 0
SAFETY = 0.95  # share of the limit to aim at: a KL that grows a little faster than the square still meets the limit


def adapt_kl_coef(coef: float, *, kl: float, target: float) -> float:
    """Double the coefficient if a step's KL is above 1.5 x target, halve it if the KL is below target / 1.5.

    >>> adapt_kl_coef(1.0, kl=0.05, target=0.02), adapt_kl_coef(1.0, kl=0.01, target=0.02)
    (2.0, 0.5)
    """
    assert target > 0
    if kl > 1.5 * target:
        return 2.0 * coef
    return 0.5 * coef if kl < target / 1.5 else coef


def kl_scale(kl: float, *, limit: float) -> float:
    """Return the share of an update that brings its KL down to the limit: KL grows with the square of a small step.

    1 within the limit; 0 if the KL is NaN or infinite, because nothing is known about such an update.

    >>> kl_scale(0.08, limit=0.02)
    0.5
    """
    assert limit > 0
    if not math.isfinite(kl):
        return 0.0
    return 1.0 if kl <= limit else math.sqrt(limit / kl)


def mean_kl(data: Sequence[Datum], policy_logprobs: Sequence[FloatArray], *, other: str = "proximal_logprobs") -> float:
    """Average k3 between the array `other` and the policy's log-probs over the trained tokens; 0 if there are none."""
    total, count = 0.0, 0
    for datum, policy in zip(data, policy_logprobs, strict=True):
        trained = datum.arrays["weights"] != 0
        total += float(k3(datum.arrays[other][trained], policy[trained]).sum())
        count += int(trained.sum())
    return total / max(count, 1)
