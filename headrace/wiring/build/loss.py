"""Build the loss, the correction of stale tokens, and Adam's settings for every step."""

from collections.abc import Callable
from functools import wraps

import numpy as np
from torch import Tensor

from headrace.algo.advantages.anchor_keys import KEYS, KeysFn, keys_by
from headrace.algo.advantages.credit import METHODS, CreditMethod, own_method, step_advantages
from headrace.algo.advantages.step_table import StepTable
from headrace.algo.correction import BehaviourCorrection, BoundRule, MissingRule, WeightLevel
from headrace.algo.loss_signature import LossFn, LossOut, loss_inputs
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.losses.compose import sum_losses
from headrace.config import DpoConfig, OptimizerConfig, RlConfig
from headrace.config.paths import split_sum
from headrace.errors import ConfigError
from headrace.loops.step_batch import CorrectionSettings, available_arrays, check_objective, takes_behaviour_weights
from headrace.train.schedule import make_schedule
from headrace.types import Adam, LossSpec
from headrace.user_code import load_function

VALUE_TERM = "shared_value"


def make_loss(c: RlConfig) -> LossSpec:
    """Build the loss of [rl] from built-in terms and users' functions, with the value term of a shared trunk.

    Raises ConfigError when it needs arrays that cannot be provided.
    """
    terms = split_sum(c.loss)
    all_named = all(term in LOSSES for term in terms)
    fn = sum_losses([LOSSES[term] if term in LOSSES else own_loss(term) for term in terms])
    check_objective(fn, c.loss_params, available=available_arrays(fn, teacher=c.teacher is not None))
    if c.critic is None or c.critic.trunk == "own":
        return LossSpec(fn=c.loss if all_named else fn, params=c.loss_params)
    params = {"value_coef": c.critic.value_coef, "value_clip": c.critic.value_clip}
    return LossSpec(
        fn=f"{c.loss} + {VALUE_TERM}" if all_named else sum_losses([fn, LOSSES[VALUE_TERM]]),
        params={**c.loss_params, **params},
    )


def make_preference_loss(c: DpoConfig) -> LossSpec:
    """Build the loss of [dpo] with the numbers that it takes."""
    given = {
        "beta": c.beta,
        "label_smoothing": c.label_smoothing,
        "gamma": c.gamma,
        "desirable_weight": c.desirable_weight,
        "undesirable_weight": c.undesirable_weight,
    }
    takes = loss_inputs(LOSSES[c.loss]).params
    return LossSpec(
        fn=c.loss, params={name: value for name, value in given.items() if name in takes and value is not None}
    )


def own_loss(spec: str) -> LossFn:
    """Load a user's function as a loss; it raises ConfigError when it returns anything but a LossOut."""
    fn = load_function(spec)

    @wraps(fn)
    def checked(*tensors: Tensor | None, **numbers: float) -> LossOut:
        out = fn(*tensors, **numbers)
        if not isinstance(out, LossOut):
            problem = f"'rl.loss': {spec} returned a {type(out).__name__}"
            raise ConfigError(f"{problem}: return LossOut(loss=..., metrics={{}}) of headrace.algo.loss_signature")
        return out

    return checked


def make_credit(c: RlConfig) -> CreditMethod:
    """Return the credit method of [rl]: a name, or a user's function with its parameters checked.

    Raises ConfigError if the function cannot be called as one, or fails on two small groups.
    """
    if c.critic is not None or c.credit in METHODS:
        return c.credit
    method = own_method(load_function(c.credit), c.credit)
    probe = StepTable(
        group_E=np.array([0, 0, 1, 1]),
        length_E=np.array([1, 2, 2, 1]),
        tokens_E=np.array([2, 4, 4, 2]),
        total_E=np.array([0.0, 1.0, 1.0, 0.5]),
        success_E=np.array([False, True, True, False]),
        reward_S=np.array([0.0, 0.5, 0.5, 0.0, 1.0, 0.5]),
        state_S=np.array([0, 0, 1, 2, 3, 2]),
        valid_S=np.ones(6, dtype=bool),
    )
    step_advantages(probe, method=method, params=c.credit_params)
    return method


def make_keys(c: RlConfig) -> KeysFn:
    """Return the function that keys anchor states; a user's function is called as anchor(step, episode)."""
    return KEYS[c.anchor] if c.anchor in KEYS else keys_by(load_function(c.anchor))


def make_correction(c: RlConfig, loss: LossSpec) -> CorrectionSettings | None:
    """Build [rl.correction], or the weights of stale tokens that [rl.async] names; None if the loss takes neither.

    The full weight replaces one whose next-version log-prob was not recorded: it is exact, with a larger variance, and
    `correction/missing_next` counts it.
    """
    if c.correction is not None:
        return CorrectionSettings(
            behaviour=BehaviourCorrection(c.correction.behaviour),
            bound=BoundRule(c.correction.bound),
            level=WeightLevel(c.correction.level),
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
    return CorrectionSettings(
        behaviour=BehaviourCorrection(weights.behaviour_weight or BehaviourCorrection.FULL),
        missing=MissingRule.FULL,
        bound=BoundRule(weights.cap_action),
        floor=weights.weight_floor,
        cap=weights.weight_cap,
    )


def make_adam(c: OptimizerConfig, steps: int, *, reversible: bool = False) -> Callable[[int], Adam]:
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
