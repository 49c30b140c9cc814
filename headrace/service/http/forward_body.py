"""The body of `forward_backward` in JSON: what OpenAPI shows of the protobuf message, and a second way to send it.

The shape is that of the SDK's `ForwardBackwardRequest`. A JSON body becomes the protobuf message that the SDK would
have sent before anything else sees it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from headrace.errors import RequestError
from headrace.service.http.schemas import Id, Number, openapi_body
from headrace.service.wire import proto
from headrace.service.wire.messages import PROTOBUF

Finite = Annotated[float, Field(allow_inf_nan=False)]
INTEGERS = ("target_tokens", "unit")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TensorBody(_Body):
    """An array: its numbers in row order; without a shape it is flat."""

    data: list[Finite]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[Number] | None = None

    @model_validator(mode="after")
    def _whole(self) -> "TensorBody":
        if self.dtype == "int64" and any(value != int(value) or abs(value) >= 2**53 for value in self.data):
            raise ValueError("int64 takes whole numbers only")
        return self


Tensor = TensorBody | list[Finite]


class LossFnInputs(BaseModel):
    """Arrays of one sequence, one number per token of `model_input` unless said otherwise; a loss reads those that it
    needs (docs/objectives.md), and any other name is passed on to it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Tensor] = Field(init=False)

    target_tokens: Annotated[Tensor, Field(description="the next tokens, as integers; [T, K] for soft targets")]
    weights: Annotated[Tensor | None, Field(description="0 where a token is not trained")] = None
    logprobs: Annotated[
        Tensor | None, Field(description="old log-probs: of the policy that sampled the tokens (`sampler_logprobs`)")
    ] = None
    advantages: Annotated[Tensor | None, Field(description="how much better the token was than expected")] = None
    rewards: Annotated[Tensor | None, Field(description="per token, for `gae_gamma` and `gae_lambda`")] = None
    dones: Annotated[Tensor | None, Field(description="1 at an episode's last token, for GAE")] = None
    values: Annotated[Tensor | None, Field(description="values of before, for `shared_value` and `value_clipped`")] = (
        None
    )
    returns: Annotated[Tensor | None, Field(description="targets of a value head")] = None
    value_weights: Annotated[Tensor | None, Field(description="weights of the value's loss in `shared_value`")] = None
    reference_logprobs: Annotated[
        Tensor | None, Field(description="of a reference model; or ask the server for them with `reference_model`")
    ] = None
    proximal_logprobs: Annotated[
        Tensor | None, Field(description="of the policy at the start of the step, for `decoupled_ppo`")
    ] = None
    teacher_logprobs: Annotated[Tensor | None, Field(description="of a teacher, for distillation")] = None
    preferences: Annotated[Tensor | None, Field(description="+1 on the preferred side of a pair, -1 on the other")] = (
        None
    )
    unit: Annotated[Tensor | None, Field(description="one integer: the pair or group of this sequence")] = None
    temperature: Annotated[Tensor | None, Field(description="one number: logits are divided by it")] = None


class LossFnConfig(BaseModel):
    """Numbers of the loss by name, and what the server is asked to do besides."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Finite | str] = Field(init=False)

    clip_low_threshold: Annotated[Finite | None, Field(description="lower bound on the ratio (ppo, cispo, gspo)")] = (
        None
    )
    clip_high_threshold: Annotated[Finite | None, Field(description="upper bound on the ratio")] = None
    reference_model: Annotated[
        str | None, Field(description="base, a tinker:// path, a sampling session or a name of [[references]]")
    ] = None
    gae_gamma: Annotated[Finite | None, Field(description="discount: the server computes advantages by GAE")] = None
    gae_lambda: Annotated[Finite | None, Field(description="lambda of GAE")] = None
    gae_whiten: Annotated[Finite | None, Field(description="1: advantages get mean 0 and deviation 1")] = None
    kl_limit: Annotated[Finite | None, Field(description="largest KL per token that the update may reach")] = None
    kl_action: Annotated[str | None, Field(description="discard or scale_back: an update beyond the limit")] = None


class TextChunk(_Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]


class ModelInputBody(_Body):
    """The tokens of a sequence but for its last."""

    chunks: list[TextChunk] = Field(min_length=1)


class DatumBody(_Body):
    model_input: ModelInputBody
    loss_fn_inputs: LossFnInputs


class ForwardInput(_Body):
    data: list[DatumBody] = Field(min_length=1)
    loss_fn: Annotated[str, Field(max_length=400, description="a loss or a sum of losses of docs/objectives.md")]
    loss_fn_config: LossFnConfig | None = None


class ForwardBackwardBody(_Body):
    """Compute a loss and accumulate its gradient; the result is fetched with `retrieve_future`."""

    model_id: Id
    seq_id: Annotated[int, Field(ge=1, lt=2**31, description="1, 2, 3, ... over all requests of the model")]
    forward_only: Annotated[bool, Field(description="compute the loss without a gradient")] = False
    forward_backward_input: ForwardInput


def to_protobuf(body: ForwardBackwardBody) -> bytes:
    """Write the message that the SDK would have sent."""
    asked = body.forward_backward_input
    message = proto.ForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=asked.loss_fn, forward_only=body.forward_only
    )
    config = asked.loss_fn_config.model_dump(exclude_none=True) if asked.loss_fn_config else {}
    for name, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = float(_packed(name, [value], "<f8")[0])
    for datum in asked.data:
        written = message.data.add()
        for chunk in datum.model_input.chunks:
            written.model_input.add().encoded_text.tokens = _packed("tokens", chunk.tokens, "<i4").tobytes()
        inputs = datum.loss_fn_inputs
        for name in (*type(inputs).model_fields, *(inputs.model_extra or {})):
            tensor = getattr(inputs, name)
            if tensor is not None:
                _write_tensor(written.loss_fn_inputs[name], name, tensor)
    return bytes(message.SerializeToString())


def _write_tensor(message: Any, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, list):
        try:
            tensor = TensorBody(data=tensor, dtype="int64" if name in INTEGERS else "float32")
        except ValidationError as exc:
            raise RequestError(f"'{name}' takes whole numbers only") from exc
    integers = tensor.dtype == "int64"
    message.dense = _packed(name, tensor.data, "<i8" if integers else "<f4").tobytes()
    message.dtype = proto.INT64 if integers else proto.FLOAT32
    message.shape.extend(tensor.shape or [len(tensor.data)])


def _packed(name: str, numbers: Sequence[float], dtype: str) -> npt.NDArray[Any]:
    """Convert numbers to the type of the wire. A float beyond it becomes infinite, which is refused with the datum."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(numbers, dtype)
    except OverflowError as exc:
        raise RequestError(f"'{name}' holds a number that is too large") from exc


# --- OpenAPI ---------------------------------------------------------------------------------------------------------


def _example(summary: str, loss: str, config: dict[str, object], **inputs: list[float]) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [3, 1, 4]}]},
        "loss_fn_inputs": {"target_tokens": [1, 4, 1], **inputs},
    }
    asked = {"data": [datum], "loss_fn": loss, "loss_fn_config": config}
    return {"summary": summary, "value": {"model_id": "RUN", "seq_id": 1, "forward_backward_input": asked}}


def _pair() -> dict[str, Any]:
    """Give an example of a pair: the better sequence, then the worse one."""
    example = _example("a pair for a reward model (Bradley-Terry)", "bradley_terry", {})
    asked = example["value"]["forward_backward_input"]
    asked["data"] = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "loss_fn_inputs": {
                "target_tokens": tokens,
                "weights": [0.0, 0.0, 1.0],
                "preferences": [side] * 3,
                "unit": [0],
            },
        }
        for tokens, side in (([3, 1, 4], 1.0), ([3, 1, 5], -1.0))
    ]
    return example


OLD, SAMPLED = [-1.2, -0.7, -2.1], [0.0, 1.0, 1.0]
EXAMPLES: dict[str, dict[str, Any]] = {
    "cross_entropy": _example("supervised", "cross_entropy", {}, weights=SAMPLED),
    "importance_sampling": _example(
        "policy gradient on old log-probs", "importance_sampling", {}, logprobs=OLD, advantages=[0.0, 0.5, -0.5]
    ),
    "ppo": _example(
        "PPO with advantages of the client",
        "ppo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        logprobs=OLD,
        advantages=[0.0, 0.5, -0.5],
    ),
    "ppo_with_gae": _example(
        "PPO, value and entropy; the server computes advantages from rewards and its own values",
        "ppo + shared_value + entropy_bonus",
        {"gae_gamma": 1.0, "gae_lambda": 0.95, "gae_whiten": 1.0},
        logprobs=OLD,
        weights=SAMPLED,
        rewards=[0.0, 0.0, 1.0],
        dones=[0.0, 0.0, 1.0],
    ),
    "ppo_with_values": _example(
        "PPO with values and returns of the client",
        "ppo + shared_value",
        {"value_coef": 0.5},
        logprobs=OLD,
        weights=SAMPLED,
        advantages=[0.0, 0.5, -0.5],
        values=[0.0, 0.4, 0.6],
        returns=[0.0, 1.0, 1.0],
        value_weights=SAMPLED,
    ),
    "reference_model": _example(
        "a penalty on the KL to a reference model that the server scores",
        "ppo + reference_kl_k3",
        {"reference_model": "base", "kl_coef": 0.05},
        logprobs=OLD,
        advantages=[0.0, 0.5, -0.5],
    ),
    "reference_logprobs": _example(
        "the same with log-probs of the client",
        "ppo + reference_kl_k3",
        {"kl_coef": 0.05},
        logprobs=OLD,
        advantages=[0.0, 0.5, -0.5],
        reference_logprobs=OLD,
    ),
    "conservative_ppo": _example(
        "PPO with a hard limit of the KL",
        "conservative_ppo",
        {"kl_limit": 0.02, "kl_action": "scale_back"},
        logprobs=OLD,
        advantages=[0.0, 0.5, -0.5],
    ),
    "decoupled_ppo": _example(
        "tokens of several policy versions",
        "decoupled_ppo",
        {},
        logprobs=OLD,
        proximal_logprobs=OLD,
        behaviour_weights=[1.0, 1.0, 1.0],
        advantages=[0.0, 0.5, -0.5],
    ),
    "bradley_terry": _pair(),
}


def forward_openapi() -> dict[str, Any]:
    """Describe the body for OpenAPI: JSON as it is, and protobuf by its equivalent in JSON."""
    described = openapi_body(ForwardBackwardBody)
    json = described["requestBody"]["content"]["application/json"]
    json["examples"] = EXAMPLES
    binary = {
        **json["schema"],
        "description": "The protobuf message ForwardBackwardRequest (headrace/service/wire/wire.proto), shown by its "
        "equivalent in JSON: tokens and arrays are little-endian bytes there. Content-Encoding may be zstd.",
    }
    described["requestBody"]["content"][PROTOBUF] = {"schema": binary, "examples": EXAMPLES}
    return described
