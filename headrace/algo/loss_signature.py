"""Define the signature of a loss function, the unit it sums over, and its result. `algo.losses` holds the losses.

A loss is a plain function. Its positional parameters are token-aligned tensors whose names end in `_T` (or `_TK`):
first what the model computes (`policy_logprobs_T`; `predicted_values_T` or `scores_T` of a scalar head; both of the
first two where a policy has a value head on its own trunk), then arrays of the Datum by name (`sampler_logprobs_T`,
`advantages_T`, `weights_T`, ...), optional ones with default None. The trainer computes two names: `entropy_T`
(only if asked for) and `segments_T` (int64, index of the datum inside the micro-batch). Keyword-only
parameters are numbers with defaults, set from `LossSpec.params`.

    def my_loss(policy_logprobs_T, weights_T, advantages_T, *, scale: float = 1.0) -> LossOut: ...

The result is a plain sum over units: every normalisation is already in the weights, so no split of a step can change
the gradient. A token-unit loss may be evaluated on any sub-range of tokens and its metrics are merged; a loss of
another unit sees whole units only.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TypeVar

from torch import Tensor

from headrace.algo.name_lookup import check_numbers, nearest_name_hint
from headrace.errors import ConfigError
from headrace.metrics import Metric

LossFn = Callable[..., "LossOut"]
F = TypeVar("F", bound=LossFn)

MODEL_OUTPUTS = ("policy_logprobs", "predicted_values", "scores")
ENTROPY, SEGMENTS = "entropy", "segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOut:
    """The result of a loss function."""

    loss: Tensor  # the 0-d sum to differentiate
    metrics: Mapping[str, Metric]  # detached; they become floats when read


class Unit(StrEnum):
    """The unit that a loss must see whole: the trainer never splits one over two calls."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    PAIR = "pair"
    GROUP = "group"


def loss_unit(unit: Unit) -> Callable[[F], F]:
    """Mark a loss as a sum over `unit`; an unmarked loss is a sum over tokens."""

    def mark(fn: F) -> F:
        fn.unit = unit  # type: ignore[attr-defined]
        return fn

    return mark


def unit_of(fn: LossFn) -> Unit:
    """Return the unit that `loss_unit` marked a loss with.

    >>> unit_of(lambda policy_logprobs_T, weights_T: None)
    <Unit.TOKEN: 'token'>
    """
    return Unit(getattr(fn, "unit", Unit.TOKEN))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss, read from its signature. Array names have no shape suffix."""

    outputs: tuple[str, ...]  # of MODEL_OUTPUTS
    required: tuple[str, ...]  # arrays of the Datum
    optional: tuple[str, ...]
    params: Mapping[str, float]  # keyword-only numbers, with their defaults
    wants_entropy: bool
    wants_segments: bool


@cache
def loss_inputs(fn: LossFn) -> LossInputs:
    """Read the inputs of a loss from its signature. Raises ConfigError if the signature is not that of a loss."""
    name = getattr(fn, "__name__", "custom")
    parameters = list(inspect.signature(fn).parameters.values())
    kinds = inspect.Parameter
    for parameter in parameters:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise ConfigError(f"loss {name!r} must name every input instead of taking *{parameter.name}")
    tensors = [parameter for parameter in parameters if parameter.kind is not kinds.KEYWORD_ONLY]
    numbers = [parameter for parameter in parameters if parameter.kind is kinds.KEYWORD_ONLY]
    names = [_array_name(name, parameter.name) for parameter in tensors]
    if not names or names[0] not in MODEL_OUTPUTS:
        raise ConfigError(f"the first parameter of loss {name!r} must be one of {', '.join(_suffixed(MODEL_OUTPUTS))}")
    for parameter in numbers:
        if not isinstance(parameter.default, int | float):
            raise ConfigError(f"parameter {parameter.name!r} of loss {name!r} must have a number as its default")
    computed = (*MODEL_OUTPUTS, ENTROPY, SEGMENTS)
    arrays = [(array, p) for array, p in zip(names, tensors, strict=True) if array not in computed]
    return LossInputs(
        outputs=tuple(array for array in names if array in MODEL_OUTPUTS),
        required=tuple(array for array, parameter in arrays if parameter.default is kinds.empty),
        optional=tuple(array for array, parameter in arrays if parameter.default is not kinds.empty),
        params={parameter.name: parameter.default for parameter in numbers},
        wants_entropy=ENTROPY in names,
        wants_segments=SEGMENTS in names,
    )


def check_inputs(fn: LossFn, available: Iterable[str], params: Mapping[str, float]) -> None:
    """Raise ConfigError naming arrays that the data lack, or a number that the loss does not take."""
    name = getattr(fn, "__name__", "custom")
    inputs = loss_inputs(fn)
    arrays = set(available)
    missing = [array for array in inputs.required if array not in arrays]
    if missing:
        near = f" ({nearest_name_hint(missing[0], arrays)})" if arrays else ""
        raise ConfigError(f"loss {name!r} needs arrays that the data do not have: {', '.join(missing)}{near}")
    check_numbers(params, inputs.params, f"loss {name!r}")


def _array_name(loss: str, parameter: str) -> str:
    for suffix in ("_TK", "_T"):
        if parameter.endswith(suffix):
            return parameter.removesuffix(suffix)
    raise ConfigError(f"parameter {parameter!r} of loss {loss!r} must end in _T, or be keyword-only if it is a number")


def _suffixed(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}_T" for name in names)
