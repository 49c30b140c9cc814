"""The operations of a model, parsed from the bodies of requests; the same whether a body came just now or from the
journal.

A body that makes no sense is an operation too (`InvalidOp`): it takes its turn, so that the requests behind it are not
held up by a number that never comes, and then fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headrace.errors import RequestError
from headrace.service.host.kl_bound import KlBound
from headrace.service.http import schemas
from headrace.service.store.entities import CheckpointKind, check_name, split_path
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import parse_forward, read_forward
from headrace.service.wire.server_inputs import GaeSettings, parse_server_inputs
from headrace.types import Adam, Datum, DiscardGradient, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateOp:
    """Create the model as its record says."""

    source: str | None = None  # a checkpoint whose weights the model starts with
    optimizer: bool = False  # take the checkpoint's optimiser as well


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp:
    """Compute a loss, and its gradient if `backward`."""

    loss: LossSpec
    data: tuple[Datum, ...]
    backward: bool
    reference: str | None = None  # the model whose log-probs the data still lack
    gae: GaeSettings | None = None  # compute advantages from the model's values first
    bound: KlBound | None = None  # of the update that the gradient goes into


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOp:
    update: Adam | DiscardGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOp:
    kind: CheckpointKind
    name: str
    ttl_s: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOp:
    """Copy the weights as they are now for the sampling session of this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOp:
    path: str
    optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidOp:
    """Fail with a message when the turn comes."""

    message: str
    server_fault: bool = False  # the request was right


Operation = CreateOp | ForwardOp | OptimStepOp | SaveOp | SnapshotOp | LoadOp | InvalidOp


def parse_operation(kind: str, body: bytes, *, ran_before: bool = False, images: ImageChunks = TEXT_ONLY) -> Operation:
    """Parse the body of a training request. Never raises: a wrong body gives an `InvalidOp`.

    `ran_before`: a server has run it already, so names that only an older server took are taken again.
    """
    try:
        if kind in FORWARDS:
            return forward_operation(parse_forward(body), own_numbers=ran_before, images=images)
        return PARSERS[kind](body)
    except RequestError as exc:
        return InvalidOp(message=str(exc))
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        return InvalidOp(message=f"{kind}: {where}: {first['msg']}")


def _parse_create(body: bytes) -> Operation:
    return CreateOp()


def _parse_create_from(body: bytes) -> Operation:
    request = schemas.LoadWeights.model_validate_json(body)
    return CreateOp(source=request.path, optimizer=request.optimizer)


def forward_operation(message: Any, *, own_numbers: bool = False, images: ImageChunks = TEXT_ONLY) -> Operation:
    """Convert a parsed ForwardBackwardRequest. Never raises."""
    try:
        request, server_inputs = parse_server_inputs(read_forward(message, images))
        loss, data = to_loss_and_data(request, server_inputs, own_numbers=own_numbers)
    except RequestError as exc:
        return InvalidOp(message=str(exc))
    return ForwardOp(
        loss=loss,
        data=data,
        backward=not request.forward_only,
        reference=server_inputs.reference,
        gae=server_inputs.gae,
        bound=server_inputs.bound,
    )


def _parse_optim_step(body: bytes) -> Operation:
    request = schemas.OptimStep.model_validate_json(body)
    if request.discard:
        return OptimStepOp(update=DiscardGradient())
    if request.optimizer_params is not None or request.adam_params is None:
        raise RequestError("only adam_params are served: this model's optimiser is AdamW")
    adam = request.adam_params
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


def _parse_save(body: bytes, kind: CheckpointKind) -> Operation:
    request = schemas.SaveWeights.model_validate_json(body)
    if request.age_encryption_recipients:
        raise RequestError("encrypted weights are not served: leave age_encryption_recipients out")
    if request.ttl_seconds is not None and request.ttl_seconds <= 0:
        raise RequestError(f"ttl_seconds must be above 0, not {request.ttl_seconds}")
    if kind is CheckpointKind.SAMPLER and request.path is None:
        if request.sampling_session_seq_id is None:
            raise RequestError("save_weights_for_sampler needs a path, or a sampling_session_seq_id for a snapshot")
        return SnapshotOp(number=request.sampling_session_seq_id)
    return SaveOp(
        kind=kind,
        name=check_name(request.path if request.path is not None else f"{request.seq_id:06d}"),
        ttl_s=request.ttl_seconds,
        overwrite=request.overwrite,
        user_metadata=request.user_metadata or {},
    )


def _parse_load(body: bytes) -> Operation:
    request = schemas.LoadWeights.model_validate_json(body)
    split_path(request.path)
    return LoadOp(path=request.path, optimizer=request.optimizer)


FORWARDS = ("forward_backward", "forward")
PARSERS = {
    "create_model": _parse_create,
    "create_model_from": _parse_create_from,
    "optim_step": _parse_optim_step,
    "save_weights": lambda body: _parse_save(body, CheckpointKind.TRAINING),
    "save_weights_for_sampler": lambda body: _parse_save(body, CheckpointKind.SAMPLER),
    "save_weights_external": lambda body: _parse_save(body, CheckpointKind.EXTERNAL),
    "load_weights": _parse_load,
}
