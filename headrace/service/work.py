"""What a model is asked to do, read from the body of a request; the same whether it came just now or from the journal.

A body that makes no sense is work too (`Broken`): it takes its turn, so that the requests behind it are not held up by
a number that never comes, and then fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headrace.errors import RequestError
from headrace.service import bodies
from headrace.service.losses import to_loss_and_data
from headrace.service.preparation import GaeSettings, parse_server_inputs
from headrace.service.records import CheckpointKind, check_name, split_path
from headrace.service.wire import parse_forward, read_forward
from headrace.types import Adam, Datum, Discard, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateOp:
    """The model as its record says; `source`: with the weights of a checkpoint, and its optimiser if asked for."""

    source: str | None = None
    optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp:
    """`reference`: whose log-probs the data lack still; `gae`: how their advantages are to be made."""

    loss: LossSpec
    data: tuple[Datum, ...]
    backward: bool
    reference: str | None = None
    gae: GaeSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOp:
    update: Adam | Discard


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOp:
    kind: CheckpointKind
    name: str
    ttl_s: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOp:
    """Weights as they are now, under the sampling session of this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOp:
    path: str
    optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidOp:
    """`ours`: not by what was asked for."""

    message: str
    ours: bool = False


Operation = CreateOp | ForwardOp | OptimStepOp | SaveOp | SnapshotOp | LoadOp | InvalidOp


def parse_operation(kind: str, body: bytes) -> Operation:
    """Never raises: what is wrong with a body is `Broken`."""
    try:
        return READERS[kind](body)
    except RequestError as exc:
        return InvalidOp(message=str(exc))
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        return InvalidOp(message=f"{kind}: {where}: {first['msg']}")


def _create(body: bytes) -> Operation:
    return CreateOp()


def _create_from(body: bytes) -> Operation:
    asked = bodies.LoadWeights.model_validate_json(body)
    return CreateOp(source=asked.path, optimizer=asked.optimizer)


def _forward(body: bytes) -> Operation:
    return forward_operation(parse_forward(body))


def forward_operation(message: Any) -> Operation:
    """From a message that is parsed already."""
    try:
        asked, server_inputs = parse_server_inputs(read_forward(message))
        loss, data = to_loss_and_data(asked, server_inputs)
    except RequestError as exc:
        return InvalidOp(message=str(exc))
    backward = not asked.forward_only
    return ForwardOp(loss=loss, data=data, backward=backward, reference=server_inputs.reference, gae=server_inputs.gae)


def _step(body: bytes) -> Operation:
    asked = bodies.OptimStep.model_validate_json(body)
    if asked.discard:
        return OptimStepOp(update=Discard())
    if asked.optimizer_params is not None or asked.adam_params is None:
        raise RequestError("only adam_params are served: this model's optimiser is AdamW")
    adam = asked.adam_params
    numbers = {name: getattr(adam, name) for name in type(adam).model_fields}
    for name, value in numbers.items():
        if not 0.0 <= value < float("inf"):
            raise RequestError(f"{name} must be a number from 0 on, not {value}")
    if adam.beta1 >= 1.0 or adam.beta2 >= 1.0:
        raise RequestError(f"beta1 and beta2 must be below 1, not {adam.beta1} and {adam.beta2}")
    return OptimStepOp(
        update=Adam(
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            clip_norm=adam.grad_clip_norm,
            max_norm=adam.max_grad_norm,
        )
    )


def _save(body: bytes, kind: CheckpointKind) -> Operation:
    asked = bodies.SaveWeights.model_validate_json(body)
    if asked.age_encryption_recipients:
        raise RequestError("encrypted weights are not served: leave age_encryption_recipients out")
    if asked.ttl_seconds is not None and asked.ttl_seconds <= 0:
        raise RequestError(f"ttl_seconds must be above 0, not {asked.ttl_seconds}")
    if kind is CheckpointKind.SAMPLER and asked.path is None:
        if asked.sampling_session_seq_id is None:
            raise RequestError("save_weights_for_sampler needs a path, or a sampling_session_seq_id for a snapshot")
        return SnapshotOp(number=asked.sampling_session_seq_id)
    return SaveOp(
        kind=kind,
        name=check_name(asked.path if asked.path is not None else f"{asked.seq_id:06d}"),
        ttl_s=asked.ttl_seconds,
        overwrite=asked.overwrite,
        user_metadata=asked.user_metadata or {},
    )


def _load(body: bytes) -> Operation:
    asked = bodies.LoadWeights.model_validate_json(body)
    split_path(asked.path)
    return LoadOp(path=asked.path, optimizer=asked.optimizer)


READERS = {
    "create_model": _create,
    "create_model_from": _create_from,
    "forward_backward": _forward,
    "forward": _forward,
    "optim_step": _step,
    "save_weights": lambda body: _save(body, CheckpointKind.TRAINING),
    "save_weights_for_sampler": lambda body: _save(body, CheckpointKind.SAMPLER),
    "save_weights_external": lambda body: _save(body, CheckpointKind.EXTERNAL),
    "load_weights": _load,
}
