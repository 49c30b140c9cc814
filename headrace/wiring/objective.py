"""[rl] and [optimizer] to the loss, the correction of stale tokens and the settings of Adam, step by step."""

from collections.abc import Callable

from headrace.algo.correction import Behaviour, Bound, Level
from headrace.algo.losses import LOSSES
from headrace.algo.losses.compose import added
from headrace.config import Optimizer, Rl
from headrace.config.paths import split_sum
from headrace.loops.arrays import Correction, available_arrays, check_objective
from headrace.rollout.load_function import load_function
from headrace.train.schedule import make_schedule
from headrace.types import Adam, LossSpec


def make_loss(c: Rl) -> LossSpec:
    """The loss of [rl], its own functions loaded. Raises ConfigError when it needs what cannot be provided."""
    terms = split_sum(c.loss)
    known = all(term in LOSSES for term in terms)
    fn = added([LOSSES[term] if term in LOSSES else load_function(term) for term in terms])
    check_objective(fn, c.loss_params, available=available_arrays(fn, teacher=c.teacher is not None))
    return LossSpec(fn=c.loss if known else fn, params=c.loss_params)


def make_correction(c: Rl) -> Correction | None:
    if c.correction is None:
        return None
    return Correction(
        behaviour=Behaviour(c.correction.behaviour),
        bound=Bound(c.correction.bound),
        level=Level(c.correction.level),
        floor=c.correction.floor,
        cap=c.correction.cap,
        normalise=c.correction.normalise,
        m2_threshold=c.correction.m2_threshold,
    )


def make_adam(c: Optimizer, steps: int, *, reversible: bool = False) -> Callable[[int], Adam]:
    schedule = make_schedule(
        steps,
        peak=c.learning_rate,
        type=c.schedule.type,
        warmup_steps=c.schedule.warmup_steps,
        final=c.schedule.final,
    )

    def adam(step: int) -> Adam:
        return Adam(
            learning_rate=schedule(step),
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            weight_decay=c.weight_decay,
            clip_norm=c.clip_norm,
            max_norm=c.max_norm,
            reversible=reversible,
        )

    return adam
