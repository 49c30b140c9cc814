"""Normalise a loss by scaling the weights of a whole training step before it is split.

The loss is a plain sum; dividing here by counts of the whole step makes it a mean, so that micro-batches, packing and
ranks cannot change a gradient. Data without a trained token are not counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace import names
from headrace.algo.name_lookup import lookup
from headrace.errors import ConfigError, DataError
from headrace.types import Datum, float_array

Scales = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of a training step that scales are computed from. D data."""

    tokens_D: npt.NDArray[np.int64]  # trained tokens
    groups_D: npt.NDArray[np.int64] | None  # None if the weighting does not use groups
    constant: float

    @property
    def num_sequences(self) -> int:
        """Count the data with a trained token; at least 1, so that it can divide."""
        return max(int((self.tokens_D > 0).sum()), 1)


def reweight(
    data: Sequence[Datum], *, weighting: str = "token_mean", constant: float = 0.0, groups: Sequence[int] | None = None
) -> tuple[Datum, ...]:
    """Multiply each datum's weights by its scale under `weighting`; n = its trained tokens, S = data that have any.

    token_sum 1; token_mean 1 / sum n; sequence_mean 1 / (n S); seq_mean_token_sum 1 / S;
    constant (also seq_mean_token_sum_norm, Dr. GRPO) 1 / (constant S);
    prompt_mean 1 / (n of its group x number of groups); unit_mean 1 / number of groups, for losses of pairs and groups.
    `groups` (default: `Datum.unit`) gives the group of each datum.
    Raises ConfigError on an unknown weighting or a missing constant.
    """
    scale = lookup(WEIGHTINGS, weighting, "weighting")
    if scale is _constant and not constant > 0:
        raise ConfigError(f"weighting {weighting!r} needs a positive constant, such as the longest completion length")
    step = StepCounts(
        tokens_D=np.array([num_trained(datum) for datum in data], dtype=np.int64),
        groups_D=_groups(data, groups) if scale in (_prompt_mean, _unit_mean) else None,
        constant=constant,
    )
    return tuple(_scaled(datum, float(factor)) for datum, factor in zip(data, scale(step), strict=True))


def num_trained(datum: Datum) -> int:
    """Count the positions with a weight; a position with K alternatives counts once."""
    if "weights" not in datum.arrays:
        raise DataError("a datum has no array named 'weights': every loss needs one")
    trained = datum.arrays["weights"] != 0
    return int((trained.any(axis=1) if trained.ndim == 2 else trained).sum())


def _scaled(datum: Datum, factor: float) -> Datum:
    weights = datum.arrays["weights"].astype(np.float64) * factor
    return replace(datum, arrays={**datum.arrays, "weights": float_array(weights)})


def _groups(data: Sequence[Datum], groups: Sequence[int] | None) -> npt.NDArray[np.int64]:
    units = [datum.unit for datum in data] if groups is None else list(groups)
    if len(units) != len(data) or any(unit is None for unit in units):
        raise ConfigError("this weighting needs the group of every datum: pass `groups` or set `Datum.unit`")
    return np.array(units, dtype=np.int64)


def _token_sum(step: StepCounts) -> Scales:
    return np.ones(len(step.tokens_D))


def _token_mean(step: StepCounts) -> Scales:
    return np.full(len(step.tokens_D), 1.0 / max(int(step.tokens_D.sum()), 1))


def _sequence_mean(step: StepCounts) -> Scales:
    return np.asarray(1.0 / (np.maximum(step.tokens_D, 1) * step.num_sequences))


def _seq_mean_token_sum(step: StepCounts) -> Scales:
    return np.full(len(step.tokens_D), 1.0 / step.num_sequences)


def _constant(step: StepCounts) -> Scales:
    return np.full(len(step.tokens_D), 1.0 / (step.constant * step.num_sequences))


def _unit_mean(step: StepCounts) -> Scales:
    assert step.groups_D is not None
    return np.full(len(step.tokens_D), 1.0 / max(len(np.unique(step.groups_D[step.tokens_D > 0])), 1))


def _prompt_mean(step: StepCounts) -> Scales:
    assert step.groups_D is not None
    _, index_D = np.unique(step.groups_D, return_inverse=True)
    tokens_G = np.bincount(index_D, weights=step.tokens_D)
    return np.asarray(1.0 / (np.maximum(tokens_G, 1)[index_D] * max(int((tokens_G > 0).sum()), 1)))


WEIGHTINGS: Mapping[str, Callable[[StepCounts], Scales]] = {
    "token_sum": _token_sum,
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "seq_mean_token_mean": _sequence_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "seq_mean_token_sum_norm": _constant,
    "constant": _constant,
    "prompt_mean": _prompt_mean,
    "unit_mean": _unit_mean,
}
assert tuple(WEIGHTINGS) == names.WEIGHTINGS
