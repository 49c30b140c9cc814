"""Pydantic models of the wire's JSON bodies. Clients grow fields weekly, so unknown ones are ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Header
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt
from pydantic_core import PydanticCustomError

M = TypeVar("M", bound=Mapping[str, object])
METADATA_ENTRIES, METADATA_BYTES = 64, 16 * 2**10


def check_metadata(metadata: M) -> M:
    """Bound the entries of user_metadata and their size together. Raises PydanticCustomError, a ValueError."""
    size = sum(len(name.encode("utf-8", "replace")) + _text_bytes(value) for name, value in metadata.items())
    if len(metadata) > METADATA_ENTRIES or size > METADATA_BYTES:
        raise PydanticCustomError(
            "metadata",
            "user_metadata has {entries} entries of {size} bytes: send at most {most} entries of {most_bytes} bytes",
            {"entries": len(metadata), "size": size, "most": METADATA_ENTRIES, "most_bytes": METADATA_BYTES},
        )
    return metadata


def _text_bytes(value: object) -> int:
    return len(value.encode("utf-8", "replace")) if isinstance(value, str) else 0  # only texts are kept


Id = Annotated[str, Field(max_length=400, pattern=r"^[\x21-\x7e]+$")]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Metadata = Annotated[dict[str, str], AfterValidator(check_metadata)]
IdempotencyKey = Annotated[str | None, Header(max_length=400)]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class CreateSession(RequestBody):
    tags: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64)] = []
    user_metadata: Annotated[dict[str, object], AfterValidator(check_metadata)] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: Annotated[str, Field(max_length=256)] | None = None


class Heartbeat(RequestBody):
    session_id: Id


class Reason(RequestBody):
    type: Annotated[str, Field(max_length=256)] = "success"


class FinishSession(RequestBody):
    reason: Reason = Reason()
    detail: str | None = None


class LoraConfigBody(RequestBody):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(RequestBody):
    type: str = "adamw"


class CreateModel(RequestBody):
    session_id: Id
    model_seq_id: Number
    base_model: Annotated[str, Field(max_length=400)]
    user_metadata: Metadata | None = None
    lora_config: LoraConfigBody | None = None
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()


class GetInfo(RequestBody):
    model_id: Id


class AdamParams(RequestBody):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    max_grad_norm: float = 0.0  # our own: above it the update is skipped


class Numbered(RequestBody):
    """The part of a training request that gives it a place in the model's queue; what else is wrong fails it there."""

    model_id: Id
    seq_id: Number


class OptimStep(RequestBody):
    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None
    discard: bool = False  # our own: forget the gradient, no update
    optimizer_params: dict[str, object] | None = None


class SaveWeights(RequestBody):
    model_id: Id
    seq_id: Number
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    sampling_session_seq_id: Number | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(RequestBody):
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None  # checked where it is kept: journalled bodies are parsed again
    path: Annotated[str, Field(max_length=1000)]
    optimizer: bool = False


class CopyWeights(RequestBody):
    source_path: Annotated[str, Field(max_length=1000)]
    session_id: Id | None = None
    model_seq_id: Number | None = None
    ttl_seconds: int | None = None
    destination_project_id: str | None = None  # there are no projects here: everything is its owner's


class WeightsInfo(RequestBody):
    tinker_path: Annotated[str, Field(max_length=1000)]


class CreateSamplingSession(RequestBody):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: Annotated[str, Field(max_length=1000)] | None = None


class JoinSamplingSession(RequestBody):
    sampling_session_id: Id


class Chunk(RequestBody):
    type: str = "encoded_text"
    tokens: list[StrictInt] = []
    data: str = ""  # of an image, in base64
    format: str = ""
    expected_tokens: int | None = None


class Prompt(RequestBody):
    chunks: list[Chunk]


class SamplingParamsIn(RequestBody):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[StrictInt] | list[str] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class TensorIn(RequestBody):
    data: list[Annotated[StrictInt, Field(ge=-1, lt=2**31)]]
    dtype: Literal["int64"]
    shape: list[Number] | None = None
    sparse_crow_indices: list[Number] | None = None
    sparse_col_indices: list[Number] | None = None


class Sample(RequestBody):
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: Prompt
    sampling_params: SamplingParamsIn = SamplingParamsIn()
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: TensorIn | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


class RetrieveFuture(RequestBody):
    request_id: Id
    allow_metadata_only: bool = False


class Target(RequestBody):
    sampling_session_id: Id
    cloned_sampler_id: int = 0


class RetrieveFutures(RequestBody):
    target: Target
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class CancelFuture(RequestBody):
    request_id: Id


class Ttl(RequestBody):
    ttl_seconds: int | None = None


# --- answers ---------------------------------------------------------------------------------------------------------


class AnswerBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AcceptedResponse(AnswerBody):
    """A request was accepted; `retrieve_future` with its id waits for the result."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"request_id": "RUN:1", "model_id": "RUN"}]})

    request_id: str
    model_id: str


class RequestStatusResponse(AnswerBody):
    """The state of one request of a model."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "request_id": "RUN:7",
                    "kind": "forward_backward",
                    "state": "queued",
                    "running": False,
                    "waited_s": 0.4,
                    "position": 2,
                },
                {"request_id": "RUN:6", "kind": "optim_step", "state": "done"},
            ]
        }
    )

    request_id: str
    kind: Annotated[str, Field(description="forward_backward, forward, optim_step, save_weights, ...")]
    state: Annotated[Literal["queued", "done", "failed"], Field(description="queued: waits or runs")]
    running: Annotated[bool | None, Field(description="of a queued request: the host computes it now")] = None
    waited_s: Annotated[float | None, Field(description="of a queued request: seconds since it came")] = None
    position: Annotated[int | None, Field(description="of a queued request: requests of its model before it")] = None


class QueueStatsResponse(AnswerBody):
    """The work that waits, of one model and of the server."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"waiting_or_running": 3, "saved_seq": 41, "all_models": 9, "sampling": 0}]}
    )

    waiting_or_running: Annotated[int, Field(description="training requests of this model")]
    saved_seq: Annotated[int, Field(description="the last request whose update is saved to disk")]
    all_models: Annotated[int, Field(description="training requests of all models of the server")]
    sampling: Annotated[int, Field(description="sampling requests of the server")]


def openapi_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe the body of a route that parses it itself for OpenAPI, without references to other places."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inline(definitions[value["$ref"].rsplit("/", 1)[1]])
        return {key: inline(item) for key, item in value.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}
