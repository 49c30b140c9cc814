"""Rules for a policy that must not move further than a limit in one training step."""

import math


def adapt_kl_coef(coef: float, *, kl: float, target: float) -> float:
    """Twice the coefficient when a step moved further than 1.5 x target, half of it below target / 1.5.

    >>> adaptive_coef(1.0, kl=0.05, target=0.02), adaptive_coef(1.0, kl=0.01, target=0.02)
    (2.0, 0.5)
    """
    assert target > 0
    if kl > 1.5 * target:
        return 2.0 * coef
    return 0.5 * coef if kl < target / 1.5 else coef


def kl_scale(kl: float, *, limit: float) -> float:
    """How much of an update to keep so that its KL falls to the limit: KL grows with the square of a small step.

    1 within the limit; 0 when the KL is not a number or infinite, because nothing is known about such an update.

    >>> kept_share(0.08, limit=0.02)
    0.5
    """
    assert limit > 0
    if not math.isfinite(kl):
        return 0.0
    return 1.0 if kl <= limit else math.sqrt(limit / kl)
