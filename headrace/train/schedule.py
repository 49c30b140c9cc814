"""The learning rate as a pure function of the training step; loops pass it to every `optim_step`.

Nothing here holds state, so a resumed run continues its schedule from the step number alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

ScheduleType = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, total: int, *, peak: float, type: ScheduleType = "constant", warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Compute the learning rate of training step `step`, counted from 0, out of `total`.

    Warm-up: lr = peak * (step + 1) / (warmup_steps + 1) for step < warmup_steps, so no step has rate 0 and the
    peak is reached at step = warmup_steps. Then, with p = (step - warmup_steps) / (total - 1 - warmup_steps),
    which is 1 at the last step (and 1 beyond it):
    constant  lr = peak
    linear    lr = peak * (1 - (1 - final) * p)
    cosine    lr = peak * (final + (1 - final) * (1 + cos(pi * p)) / 2)
    """
    assert step >= 0
    assert total > 0
    assert peak >= 0.0
    assert warmup_steps >= 0
    assert 0.0 <= final <= 1.0
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    span = max(total - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / span, 1.0)
    match type:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - (1.0 - final) * progress)
        case "cosine":
            return peak * (final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0)
        case _:
            assert_never(type)


def make_schedule(
    total: int, *, peak: float, type: ScheduleType = "constant", warmup_steps: int = 0, final: float = 0.0
) -> Callable[[int], float]:
    """Make a function of the step: `learning_rate` with everything else fixed.

    >>> schedule = make_schedule(5, peak=1.0, type="linear")
    >>> [schedule(step) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return partial(learning_rate, total=total, peak=peak, type=type, warmup_steps=warmup_steps, final=final)
