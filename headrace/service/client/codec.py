"""Convert values of the package to bytes of the wire and back, on the client's side."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import find_loss
from headrace.errors import BackendError, ConfigError, SamplerError
from headrace.metrics import Max, Mean, Metric, Min, Sum
from headrace.service.wire import proto
from headrace.service.wire.loss_conversion import OWN, TARGETS, TEMPERATURE, UNIT, WEIGHTS
from headrace.service.wire.server_inputs import NO_SERVER_INPUTS, ServerInputs, to_config
from headrace.types import (
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    SamplingParams,
    ScaleUpdate,
    StopReason,
    UpdateOut,
    float_array,
    int_array,
)

METRICS: Mapping[str, Any] = {"sum": Sum, "max": Max, "min": Min, "mean": lambda value: Mean(value, 1)}


def write_forward(
    data: Sequence[Datum], loss: LossSpec, *, backward: bool, prepare: ServerInputs = NO_SERVER_INPUTS
) -> Any:
    """Write a request without its number; raises BackendError for what the wire cannot carry."""
    if not isinstance(loss.fn, str):
        raise BackendError(f"the loss '{loss.name}' is a function, which stays on this machine: give a loss by name")
    if not data:
        raise BackendError("there is nothing to train on: the batch is empty")
    read = _arrays_of_loss(loss.fn)
    message = proto.ForwardBackwardRequest(loss_fn=f"{OWN}{loss.fn}", forward_only=not backward)
    for name, value in {**loss.params, **to_config(prepare)}.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = float(value)
    for index, datum in enumerate(data):
        if WEIGHTS not in datum.arrays:
            raise BackendError(f"datum {index} has no array named 'weights'")
        if datum.images:
            raise BackendError(f"datum {index} has pictures, which are not sent to a service: train on this machine")
        sent = {
            name: array
            for name, array in datum.arrays.items()
            if (read is None or name in read or name in prepare.reads) and name not in prepare.provides
        }
        _write_datum(message.data.add(), datum, sent)
    return message


def _arrays_of_loss(loss: str) -> frozenset[str] | None:
    """Return the arrays that a loss reads; others may hold NaN. Returns None if only the server knows this loss."""
    try:
        inputs = loss_inputs(find_loss(loss))
    except ConfigError:
        return None
    return frozenset({*inputs.required, *inputs.optional, WEIGHTS})


def _write_datum(message: Any, datum: Datum, arrays: Mapping[str, FloatArray]) -> None:
    message.model_input.add().encoded_text.tokens = datum.inputs.astype("<i4").tobytes()
    untrained = datum.arrays[WEIGHTS] == 0
    _write_tensor(message.loss_fn_inputs[TARGETS], datum.targets, "<i8", proto.INT64)
    for name, array in arrays.items():
        finite = np.where(untrained & np.isnan(array), 0.0, array)  # the loss ignores untrained positions
        _write_tensor(message.loss_fn_inputs[name], finite, "<f4", proto.FLOAT32)
    if datum.unit is not None:
        _write_tensor(message.loss_fn_inputs[UNIT], np.array([datum.unit]), "<i8", proto.INT64)
    if datum.temperature != 1.0:
        _write_tensor(message.loss_fn_inputs[TEMPERATURE], np.array([datum.temperature]), "<f4", proto.FLOAT32)


def _write_tensor(message: Any, array: Any, dtype: str, code: int) -> None:
    message.dense, message.dtype = array.astype(dtype).tobytes(), code
    message.shape.extend(array.shape)


def read_forward(body: bytes) -> ForwardOut:
    message = proto.ForwardBackwardOutput()
    message.ParseFromString(body)
    logprobs: list[FloatArray] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        for start, end in pairwise(offsets):
            logprobs.append(float_array(np.frombuffer(field.data[start:end], "<f4").reshape(-1, *field.trailing_shape)))
    metrics = dict(message.metrics)
    loss = float(metrics.pop("loss:sum"))
    return ForwardOut(
        loss=loss, logprobs=tuple(logprobs), metrics={"loss/total": Sum(loss), **_read_metrics(metrics.items())}
    )


def _read_metrics(named: Iterable[tuple[str, float]]) -> dict[str, Metric]:
    """Read metrics whose names end in their reduction; the counts behind means are unknown, so each counts as one."""
    metrics: dict[str, Metric] = {}
    for name, value in named:
        plain, _, reduction = name.rpartition(":")
        if reduction in METRICS:
            metrics[plain] = METRICS[reduction](value)
    return metrics


def write_step(update: Adam | DiscardGradient | ScaleUpdate) -> dict[str, object]:
    match update:
        case DiscardGradient():
            return {"discard": True}
        case ScaleUpdate():
            raise BackendError("an update at a service cannot be scaled back: it makes no reversible ones")
        case Adam():
            if update.reversible:
                raise BackendError("the service makes no reversible updates: leave reversible out")
            return {
                "adam_params": {
                    "learning_rate": update.learning_rate,
                    "beta1": update.beta1,
                    "beta2": update.beta2,
                    "eps": update.eps,
                    "weight_decay": update.weight_decay,
                    "grad_clip_norm": update.clip_norm,
                    "max_grad_norm": update.max_norm,
                }
            }


def read_step(answer: Mapping[str, Any]) -> UpdateOut:
    metrics = dict(answer["metrics"])
    return UpdateOut(
        grad_norm=float(metrics.pop("unclipped_grad_l2:mean")),
        updated=bool(metrics.pop("updated:mean")),
        num_updates=int(metrics.pop("num_updates:max")),
        metrics=_read_metrics(metrics.items()),
    )


def write_sample(prompt: IntArray, params: SamplingParams, *, num_samples: int, score: bool) -> dict[str, object]:
    """Write a sampling request; raises SamplerError for what the wire cannot carry."""
    if params.min_p:
        raise SamplerError("the service samples without min_p: leave it out")
    stop: list[int] | list[str] | None = None if params.stop_tokens is None else list(params.stop_tokens)
    if params.stop_strings:
        if stop is not None:
            raise SamplerError("the service stops at tokens or at texts, not at both: choose one of them")
        stop = list(params.stop_strings)
    return {
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt.tolist()}]},
        "prompt_logprobs": score,
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "seed": params.seed,
            "stop": stop,
            "temperature": params.temperature,
            "top_k": -1 if params.top_k is None else params.top_k,
            "top_p": params.top_p,
        },
    }


def read_samples(body: bytes, *, version: int) -> tuple[Completion, ...]:
    """Read completions; at temperature 1 the server's log-probs are those of both distributions."""
    completions = []
    for sequence in _parse_samples(body).sequences:
        tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), float_array(np.frombuffer(sequence.logprobs, "<f4"))
        completions.append(
            Completion(
                tokens=int_array(tokens),
                sampler_logprobs=logprobs,
                raw_logprobs=logprobs,
                versions=int_array([version] * len(tokens)),
                stop=StopReason.STOP if sequence.stop_reason == 0 else StopReason.LENGTH,
            )
        )
    return tuple(completions)


def read_scores(body: bytes) -> FloatArray:
    return float_array(np.frombuffer(_parse_samples(body).prompt_logprobs, "<f4"))


def _parse_samples(body: bytes) -> Any:
    message = proto.SampleResponse()
    message.ParseFromString(body)
    return message
