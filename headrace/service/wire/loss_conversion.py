"""Convert the wire's losses and data into losses of `algo` and data of the package. All losses are plain sums.

Wire names and defaults are here and nowhere else: `logprobs` are the sampler's, clip thresholds are bounds on the
ratio itself, positions whose advantage is 0 are not trained. Every other name of `headrace.algo.losses` (and a sum of
names) is served as it is: inputs go to the loss by name, numbers by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.algo.loss_signature import LossFn, check_inputs, loss_inputs
from headrace.algo.losses import LOSSES, find_loss
from headrace.algo.name_lookup import nearest_name_hint
from headrace.errors import ConfigError, RequestError
from headrace.service.wire.messages import Array, WireDatum, WireForward
from headrace.service.wire.server_inputs import NO_SERVER_INPUTS, ServerInputs, check_server_inputs
from headrace.types import Datum, LossSpec, float_array, int_array

TARGETS, WEIGHTS, ADVANTAGES, UNIT, UNITS = "target_tokens", "weights", "advantages", "unit", "units"
TEMPERATURE = "temperature"  # one number: logits are divided by it before log-probs are taken
OWN = "headrace:"  # before the name of a loss: as this package defines it, also where the wire has the same name
RENAMED = {"logprobs": "sampler_logprobs"}
CLIPS = ("clip_low_threshold", "clip_high_threshold")
# losses as other services call them, also with _loss behind -> what they are here
ELSEWHERE = {
    "enhanced_ppo": "ppo + shared_value + entropy_bonus + reference_kl_k3",
    "grpo": "importance_sampling",  # or ppo, with its clip
    "reward_modeling": "bradley_terry",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLoss:
    """A loss as the wire defines it."""

    name: str  # in `headrace.algo.losses`
    inputs: tuple[str, ...]
    params: tuple[str, ...] = ()  # the wire's names of its numbers
    numbers: Callable[[dict[str, float]], dict[str, float]] = dict  # converts the wire's parameters into ours


def _clipped(numbers: dict[str, float], *, low: float, high: float) -> dict[str, float]:
    """Convert bounds on the ratio into distances from 1."""
    bounds = {"clip_low": 1.0 - numbers.pop(CLIPS[0], low), "clip_high": numbers.pop(CLIPS[1], high) - 1.0}
    return {**bounds, **numbers}


def _bounded(numbers: dict[str, float]) -> dict[str, float]:
    return {"ratio_low": numbers.pop(CLIPS[0], 0.0), "ratio_high": numbers.pop(CLIPS[1], 4.0), **numbers}


POLICY = (TARGETS, "logprobs", ADVANTAGES)
WIRE_LOSSES: Mapping[str, WireLoss] = {
    "cross_entropy": WireLoss(name="cross_entropy", inputs=(TARGETS, WEIGHTS)),
    "importance_sampling": WireLoss(name="importance_sampling", inputs=POLICY),
    "ppo": WireLoss(
        name="ppo", inputs=POLICY, params=CLIPS, numbers=lambda numbers: _clipped(numbers, low=0.8, high=1.2)
    ),
    "cispo": WireLoss(name="cispo", inputs=POLICY, params=CLIPS, numbers=_bounded),
    "dro": WireLoss(name="dro", inputs=POLICY, params=("beta",)),
    "gspo": WireLoss(
        name="gspo_token",
        inputs=(*POLICY, "sequence_ratio_mask"),
        params=CLIPS,
        numbers=lambda numbers: _clipped(numbers, low=1.0 - 3e-4, high=1.0 + 4e-4),
    ),
}
REFUSED = {
    "stable_reinforce": "its formula is not published; importance_sampling, ppo and cispo are near to it",
    "custom": "uploaded loss graphs are not run here; forward_backward_custom runs your function on the client",
}


def to_loss_and_data(
    request: WireForward, server_inputs: ServerInputs = NO_SERVER_INPUTS, *, own_numbers: bool = False
) -> tuple[LossSpec, tuple[Datum, ...]]:
    """Convert a request, but for the arrays that the server computes (`server_inputs`).

    With `own_numbers` the wire's losses take this package's names of numbers too, as older servers allowed. Raises
    RequestError when the loss is unknown, or an input is missing or malformed.
    """
    if request.loss in REFUSED:
        raise RequestError(f"loss '{request.loss}' is not served: {REFUSED[request.loss]}")
    if not request.data:
        raise RequestError("there is nothing to train on: the request has no data")
    wire = WIRE_LOSSES.get(request.loss)
    numbers = _numbers(request)
    if wire is not None and not own_numbers:
        _check_names(numbers, wire, request.loss)
    spec = LossSpec(
        fn=request.loss.removeprefix(OWN) if wire is None else wire.name,
        params=numbers if wire is None else wire.numbers(numbers),
    )
    fn = _find(str(spec.fn), request.loss)
    data = tuple(_datum(index, datum, request.loss, wire, server_inputs) for index, datum in enumerate(request.data))
    if UNITS in loss_inputs(fn).required:
        data = tuple(_with_units(datum) for datum in data)
    check_server_inputs(server_inputs, fn, request.loss, data)
    for index, datum in enumerate(data):
        _check(fn, {*datum.arrays, *server_inputs.provides}, spec, request, index)
    return spec, data


def _numbers(request: WireForward) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in request.config.items():
        if isinstance(value, str):
            raise RequestError(f"'{name}' of loss '{request.loss}' must be a number, not the text {value!r}")
        numbers[name] = float(value)
    return numbers


def _check_names(numbers: Mapping[str, float], wire: WireLoss, loss: str) -> None:
    """Refuse names that the wire does not define: ours may mean another thing, such as a distance for a bound."""
    for name in numbers:
        if name not in wire.params:
            ours = f"; '{OWN}{wire.name}' takes this package's names"
            raise RequestError(
                f"loss '{loss}' takes no parameter '{name}': "
                + (nearest_name_hint(name, wire.params) if wire.params else "it has none")
                + (ours if name in loss_inputs(find_loss(wire.name)).params else "")
            )


def _find(name: str, wire_name: str) -> LossFn:
    try:
        return find_loss(name)
    except ConfigError as exc:
        same = ELSEWHERE.get(wire_name.removesuffix("_loss"))
        near = nearest_name_hint(wire_name, {*WIRE_LOSSES, *LOSSES}) if same is None else f"write '{same}'"
        raise RequestError(f"unknown loss '{wire_name}': {near}") from exc


def _check(fn: LossFn, available: Iterable[str], spec: LossSpec, request: WireForward, index: int) -> None:
    try:
        check_inputs(fn, available, spec.params)
    except ConfigError as exc:
        raise RequestError(f"datum {index}, loss '{request.loss}': {exc}") from exc


def _datum(index: int, datum: WireDatum, loss: str, wire: WireLoss | None, server_inputs: ServerInputs) -> Datum:
    tensors = dict(datum.tensors)
    for name in wire.inputs if wire else (TARGETS,):
        if name not in tensors and name not in server_inputs.provides:
            near = f" (it has {', '.join(sorted(tensors)) or 'none'})"
            raise RequestError(f"datum {index}: loss '{loss}' needs the input '{name}'{near}")
    if wire is not None:
        if any(name in tensors for name in CLIPS):
            raise RequestError(f"datum {index}: clip thresholds are numbers of loss_fn_config here, not inputs")
        tensors = {name: tensors[name] for name in (*wire.inputs, *server_inputs.reads) if name in tensors}
    unit = _unit(tensors.pop(UNIT, None), index)
    temperature = _temperature(tensors.pop(TEMPERATURE, None), index)
    targets = _targets(tensors.pop(TARGETS), len(datum.inputs), index)
    arrays = {RENAMED.get(name, name): _floats(tensor, targets.shape, name, index) for name, tensor in tensors.items()}
    if WEIGHTS not in arrays and WEIGHTS not in server_inputs.reads:
        trained = arrays.get(ADVANTAGES)
        arrays[WEIGHTS] = np.ones(targets.shape) if trained is None else (trained != 0).astype(np.float32)
    return Datum(
        inputs=datum.inputs,
        targets=int_array(targets),
        arrays={name: float_array(array) for name, array in arrays.items()},
        unit=unit,
        temperature=temperature,
        images=datum.images,
    )


def _with_units(datum: Datum) -> Datum:
    """Give every position the number of its pair or group, if the datum has one and no such array."""
    if datum.unit is None or UNITS in datum.arrays:
        return datum
    units = float_array(np.full(datum.targets.shape, float(datum.unit)))
    return replace(datum, arrays={**datum.arrays, UNITS: units})


def _targets(tensor: Array, length: int, index: int) -> Array:
    if not length:
        raise RequestError(f"datum {index} has no tokens")
    if tensor.dtype.kind != "i":
        raise RequestError(f"datum {index}: target_tokens must be integers")
    if tensor.ndim not in (1, 2) or len(tensor) != length or 0 in tensor.shape:
        raise RequestError(
            f"datum {index}: target_tokens has shape {list(tensor.shape)}, but model_input has {length} tokens"
        )
    if tensor.min() < 0 or tensor.max() > np.iinfo(np.int32).max:
        raise RequestError(f"datum {index}: target_tokens holds a number that is no token")
    return tensor


def _floats(tensor: Array, shape: Sequence[int], name: str, index: int) -> Array:
    if tensor.shape != tuple(shape):
        raise RequestError(
            f"datum {index}: {name} has shape {list(tensor.shape)}, which must be that of target_tokens, {list(shape)}"
        )
    floats = tensor.astype(np.float32)
    if not np.isfinite(floats).all():
        raise RequestError(f"datum {index}: NonFiniteInTensor: {name} holds a value that is not finite")
    return floats


def _unit(tensor: Array | None, index: int) -> int | None:
    """Read the number of a pair or group: data of the same number are compared with each other."""
    if tensor is None:
        return None
    if not tensor.size or tensor.dtype.kind != "i":
        raise RequestError(f"datum {index}: unit must be an integer")
    return int(tensor.reshape(-1)[0])


def _temperature(tensor: Array | None, index: int) -> float:
    value = 1.0 if tensor is None or tensor.size != 1 else float(tensor.reshape(-1)[0])
    if tensor is not None and (tensor.size != 1 or not 0.0 < value < float("inf")):
        raise RequestError(f"datum {index}: temperature must be one number above 0")
    return value
