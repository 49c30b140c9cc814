"""Build the loss, the correction of stale tokens, and Adam's settings for every step."""

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from headrace.algo.advantages.keys import KEYS, KeysFn, keys_by
from headrace.algo.correction import Behaviour, Bound, Level, Missing
from headrace.algo.loss import LossFn, LossOut
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.losses.compose import added
from headrace.config import Optimizer, Rl
from headrace.config.paths import split_sum
from headrace.errors import ConfigError
from headrace.loops.arrays import Correction, available_arrays, check_objective, takes_behaviour_weights
from headrace.train.schedule import make_schedule
from headrace.types import Adam, LossSpec
from headrace.user_code import load_function

VALUE_TERM = "shared_value"


def make_loss(c: Rl) -> LossSpec:
    """Build the loss of [rl] from built-in terms and users' functions, with the value term of a shared trunk.

    Raises ConfigError when it needs arrays that cannot be provided.
    """
    terms = split_sum(c.loss)
    known = all(term in LOSSES for term in terms)
    fn = added([LOSSES[term] if term in LOSSES else own_loss(term) for term in terms])
    check_objective(fn, c.loss_params, available=available_arrays(fn, teacher=c.teacher is not None))
    if c.critic is None or c.critic.trunk == "own":
        return LossSpec(fn=c.loss if known else fn, params=c.loss_params)
    params = {"value_coef": c.critic.value_coef, "value_clip": c.critic.value_clip}
    return LossSpec(
        fn=f"{c.loss} + {VALUE_TERM}" if known else added([fn, LOSSES[VALUE_TERM]]), params={**c.loss_params, **params}
    )


def own_loss(spec: str) -> LossFn:
    """Load a user's function as a loss; it raises ConfigError when it returns anything but a LossOut."""
    fn = load_function(spec)

    @wraps(fn)
    def checked(*tensors: Tensor | None, **numbers: float) -> LossOut:
        out = fn(*tensors, **numbers)
        if not isinstance(out, LossOut):
            problem = f"'rl.loss': {spec} returned a {type(out).__name__}"
            raise ConfigError(f"{problem}: return LossOut(loss=..., metrics={{}}) of headrace.algo.loss")
        return out

    return checked


def make_keys(c: Rl) -> KeysFn:
    """Return the function that keys anchor states; a user's function is called as anchor(step, episode)."""
    return KEYS[c.anchor] if c.anchor in KEYS else keys_by(load_function(c.anchor))


def make_correction(c: Rl, loss: LossSpec) -> Correction | None:
    """Build [rl.correction], or the weights of stale tokens that [rl.async] names; None if the loss takes neither.

    The full weight replaces one whose next-version log-prob was not recorded: it is exact, with a larger variance, and
    `correction/missing_next` counts it.
    """
    if c.correction is not None:
        return Correction(
            behaviour=Behaviour(c.correction.behaviour),
            bound=Bound(c.correction.bound),
            level=Level(c.correction.level),
            floor=c.correction.floor,
            cap=c.correction.cap,
            normalise=c.correction.normalise,
            m2_threshold=c.correction.m2_threshold,
        )
    weights = c.asynchronous
    if not takes_behaviour_weights(find_loss(loss.fn)):
        if weights.behaviour_weight not in (None, "none"):
            raise ConfigError(
                f"'rl.async.behaviour_weight' is \"{weights.behaviour_weight}\", but loss {loss.name!r} takes no "
                "behaviour_weights_T: add that parameter, or leave 'rl.async.behaviour_weight' out"
            )
        return None
    return Correction(
        behaviour=Behaviour(weights.behaviour_weight or Behaviour.FULL),
        missing=Missing.FULL,
        bound=Bound(weights.cap_action),
        floor=weights.weight_floor,
        cap=weights.weight_cap,
    )


def make_adam(c: Optimizer, steps: int, *, reversible: bool = False) -> Callable[[int], Adam]:
    """Return the settings of Adam as a function of the training step."""
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
