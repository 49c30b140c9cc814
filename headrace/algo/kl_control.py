"""Keep the KL of a training step near a target (coefficient) or below a limit (scaling an update back)."""

import math


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
