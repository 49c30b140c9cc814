"""Compute off-policy corrections of a whole training step, before it is split. T tokens of a datum.

The behaviour weight b takes the loss from the policy that sampled a token to the one at the start of the step. It
depends on recorded log-probs only, never on the policy being trained, so it is computed here once, in float64, and
written into the array `behaviour_weights` (0 = rejected) that `decoupled_ppo` asks for. The array `weights` does not
change: denominators count tokens before rejection.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.algo.staleness_metrics import MAX_LOG_WEIGHT, by_lag
from headrace.errors import ConfigError, DataError
from headrace.metrics import Max, Mean, Metric, Metrics, merge_metrics
from headrace.types import Datum, float_array

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class BehaviourCorrection(StrEnum):
    """The policy in the numerator of the weight. Segment-wise decoupled PPO is ONE_STEP."""

    FULL = "full"  # proximal / sampler
    ONE_STEP = "one_step"  # next version / sampler; proximal where the lag is at most 1
    LOGLINEAR = "loglinear"  # as ONE_STEP, the next version interpolated at 1 / lag from sampler to proximal, in logs
    NONE = "none"  # 1


class MissingRule(StrEnum):
    """The replacement for a next-version log-prob that was not recorded (NaN) at lag 2 or more."""

    FULL = "full"
    LOGLINEAR = "loglinear"
    MASK = "mask"  # none: the token is rejected


class BoundRule(StrEnum):
    """The treatment of a weight outside [floor, cap]."""

    MASK = "mask"  # the token is rejected
    CLAMP = "clamp"


class WeightLevel(StrEnum):
    """The span over which a weight is taken and bounded."""

    TOKEN = "token"
    SEQUENCE = "sequence"  # product over the trained tokens of a datum, on each of them
    GEOMETRIC = "geometric"  # tokens keep their own weight; the geometric mean of a datum is bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedBatch:
    """Data with the arrays that a correction wrote, and metrics of it."""

    data: tuple[Datum, ...]
    health: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Log-weights of a datum before bounds."""

    trained_T: Bools
    known_T: Bools  # trained tokens that have a log-weight
    missing_T: Bools  # trained tokens whose next-version log-prob was not recorded
    lags_T: Floats
    log_T: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded:
    """Weights of a datum after bounds."""

    before: _Weights
    weights_T: Floats
    low_T: Bools  # below the floor
    high_T: Bools  # above the cap


def behaviour_weights(
    data: Sequence[Datum],
    *,
    version: int,
    behaviour: BehaviourCorrection = BehaviourCorrection.FULL,
    missing: MissingRule = MissingRule.MASK,
    bound: BoundRule = BoundRule.MASK,
    level: WeightLevel = WeightLevel.TOKEN,
    floor: float = 0.0,
    cap: float = 5.0,
) -> CorrectedBatch:
    """Write b = exp(log target - sampler) for every trained token, bounded to [floor, cap].

    `version` is the trainer's; a token's lag is version - `versions`. Token TIS is BoundRule.CLAMP, MIS is
    BoundRule.MASK, IcePop is MASK with floor 0.5, the geometric mask is WeightLevel.GEOMETRIC with bounds near 1.
    Raises DataError naming arrays that the data lack, ConfigError when floor > cap.
    """
    if floor > cap:
        raise ConfigError(f"the floor of behaviour weights ({floor}) must not be above their cap ({cap})")
    bounded = []
    for datum in data:
        log_weights_T, missing_T = _log_weights(datum, version, behaviour, missing)
        weights = _Weights(
            trained_T=_trained(datum),
            known_T=_trained(datum) & ~missing_T if missing is MissingRule.MASK else _trained(datum),
            missing_T=_trained(datum) & missing_T,
            lags_T=_lags(datum, version) if "versions" in datum.arrays else np.zeros(len(datum.targets)),
            log_T=log_weights_T,
        )
        bounded.append(_apply_bounds(weights, bound=bound, level=level, floor=floor, cap=cap))
    return CorrectedBatch(
        data=tuple(
            _with_array(datum, "behaviour_weights", weights.weights_T)
            for datum, weights in zip(data, bounded, strict=True)
        ),
        health=_health(bounded),
    )


def normalize_weights(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Scale `behaviour_weights` to mean 1 over the tokens of the step that are not rejected, after truncation."""
    _require(data, ("behaviour_weights",))
    weights_N = np.concatenate(
        [datum.arrays["behaviour_weights"][_not_rejected(datum)].astype(np.float64) for datum in data]
    )
    scale = 1.0 / weights_N.mean() if len(weights_N) else 1.0
    return tuple(
        _with_array(datum, "behaviour_weights", datum.arrays["behaviour_weights"].astype(np.float64) * scale)
        for datum in data
    )


def fold_into_weights(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Multiply `behaviour_weights` into `weights`, for losses that do not ask for them."""
    _require(data, ("behaviour_weights", "weights"))
    return tuple(
        _with_array(datum, "weights", datum.arrays["weights"].astype(np.float64) * datum.arrays["behaviour_weights"])
        for datum in data
    )


def m2_mask(data: Sequence[Datum], *, threshold: float = 0.04) -> CorrectedBatch:
    """Write `m2_mask`: 0 on tokens of largest M2 = (proximal - sampler)^2, so that the mean of the rest < threshold.

    It drops as few tokens as possible, those of equal M2 together, so that their order plays no part. The tokens of the
    smallest M2 always stay (arXiv 2510.01161).
    """
    _require(data, ("proximal_logprobs", "sampler_logprobs", "weights"))
    moments = [
        (datum.arrays["proximal_logprobs"].astype(np.float64) - datum.arrays["sampler_logprobs"]) ** 2 for datum in data
    ]
    trained = [datum.arrays["weights"] != 0 for datum in data]
    sorted_N = np.sort(np.concatenate([m_T[t_T] for m_T, t_T in zip(moments, trained, strict=True)] or [np.zeros(0)]))
    limit = np.inf
    if len(sorted_N):
        means_N = np.cumsum(sorted_N) / np.arange(1, len(sorted_N) + 1)  # of the n smallest: grows with n
        num_kept = int(np.searchsorted(means_N, threshold, side="left"))
        if num_kept < len(sorted_N):
            limit = max(float(sorted_N[num_kept]), float(np.nextafter(sorted_N[0], np.inf)))
    masks = [t_T & (m_T < limit) for m_T, t_T in zip(moments, trained, strict=True)]
    num_trained = sum(int(t_T.sum()) for t_T in trained)
    return CorrectedBatch(
        data=tuple(_with_array(datum, "m2_mask", k_T) for datum, k_T in zip(data, masks, strict=True)),
        health={"correction/dropped_m2": Mean(num_trained - sum(int(k_T.sum()) for k_T in masks), num_trained)},
    )


def with_lags(data: Sequence[Datum], *, version: int) -> tuple[Datum, ...]:
    """Write `lags` = version - `versions` on trained tokens, 0 elsewhere."""
    _require(data, ("versions", "weights"))
    return tuple(_with_array(datum, "lags", np.where(_trained(datum), _lags(datum, version), 0)) for datum in data)


# --- one datum -------------------------------------------------------------------------------------------------------


def _log_weights(
    datum: Datum, version: int, behaviour: BehaviourCorrection, missing: MissingRule
) -> tuple[Floats, Bools]:
    """Return log b, and the tokens whose next-version log-prob is needed and was not recorded."""
    nowhere_T = np.zeros(len(datum.targets), dtype=bool)
    if behaviour is BehaviourCorrection.NONE:
        _require([datum], ("weights",))
        return np.zeros(len(datum.targets)), nowhere_T
    _require([datum], ("proximal_logprobs", "sampler_logprobs", "weights"))
    sampler_T = datum.arrays["sampler_logprobs"].astype(np.float64)
    full_T = datum.arrays["proximal_logprobs"] - sampler_T
    if behaviour is BehaviourCorrection.FULL:
        return full_T, nowhere_T
    _require([datum], ("versions",))
    lags_T = _lags(datum, version)
    if behaviour is BehaviourCorrection.LOGLINEAR:
        return full_T / np.maximum(lags_T, 1), nowhere_T
    _require([datum], ("next_logprobs",))
    next_T = datum.arrays["next_logprobs"].astype(np.float64) - sampler_T
    unknown_T = np.isnan(next_T) & (lags_T >= 2)
    stand_in_T = full_T / np.maximum(lags_T, 1) if missing is MissingRule.LOGLINEAR else full_T
    one_step_T = np.where(lags_T <= 1, full_T, np.where(unknown_T, stand_in_T, next_T))
    return one_step_T, unknown_T


def _apply_bounds(before: _Weights, *, bound: BoundRule, level: WeightLevel, floor: float, cap: float) -> _Bounded:
    known_T = before.known_T
    log_T = np.where(known_T, before.log_T, 0.0)
    if level is WeightLevel.SEQUENCE:
        log_T = np.where(known_T, log_T.sum(), 0.0)
    weights_T = np.exp(np.clip(log_T, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
    judged_T = weights_T
    if level is WeightLevel.GEOMETRIC:
        judged_T = np.full(len(log_T), np.exp(log_T.sum() / max(int(known_T.sum()), 1)))
    low_T, high_T = known_T & (judged_T < floor), known_T & (judged_T > cap)
    if bound is BoundRule.CLAMP:
        bounded_T = weights_T * (np.clip(judged_T, floor, cap) / judged_T)
    else:
        bounded_T = np.where(low_T | high_T, 0.0, weights_T)
    return _Bounded(before=before, weights_T=np.where(known_T, bounded_T, 0.0), low_T=low_T, high_T=high_T)


def _health(bounded: Sequence[_Bounded]) -> Metrics:
    """Measure over trained tokens the weights as used, and the deviation of their logs before bounds, also by lag."""
    weights_N = np.concatenate([datum.weights_T[datum.before.trained_T] for datum in bounded] or [np.zeros(0)])
    num_trained = len(weights_N)
    metrics: dict[str, Metric] = {
        "correction/weight_mean": Mean(float(weights_N.sum()), num_trained),
        "correction/weight_max": Max(float(weights_N.max(initial=0.0))),
        "correction/bounded_low": Mean(sum(int(datum.low_T.sum()) for datum in bounded), num_trained),
        "correction/bounded_high": Mean(sum(int(datum.high_T.sum()) for datum in bounded), num_trained),
        "correction/missing_next": Mean(sum(int(datum.before.missing_T.sum()) for datum in bounded), num_trained),
    }
    for datum in bounded:
        log_T = np.where(datum.before.known_T, datum.before.log_T, np.nan)
        trained_T = datum.before.trained_T
        figures = by_lag("correction", log_T[trained_T], datum.before.lags_T[trained_T], datum.weights_T[trained_T])
        metrics = merge_metrics(metrics, figures)
    return metrics


def _trained(datum: Datum) -> Bools:
    return np.asarray(datum.arrays["weights"] != 0)


def _not_rejected(datum: Datum) -> Bools:
    return np.asarray(datum.arrays["behaviour_weights"] != 0)


def _lags(datum: Datum, version: int) -> Floats:
    lags_T = version - datum.arrays["versions"].astype(np.float64)
    assert (lags_T[_trained(datum)] >= 0).all(), "a token was sampled by a version that does not exist yet"
    return np.asarray(lags_T)


def _require(data: Sequence[Datum], names: Sequence[str]) -> None:
    for datum in data:
        lacking = [name for name in names if name not in datum.arrays]
        if lacking:
            raise DataError(f"this correction needs arrays that the data do not have: {', '.join(lacking)}")


def _with_array(datum: Datum, name: str, values_T: npt.NDArray[np.generic]) -> Datum:
    return replace(datum, arrays={**datum.arrays, name: float_array(values_T)})
