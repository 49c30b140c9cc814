"""The types of `reward_kit` and `eval_protocol` that reward functions take and return, with both packages' fields.

`reward_kit.py` makes them importable. This module imports pydantic, so it is loaded when a file imports a name.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

OPEN = ConfigDict(extra="allow")


class MappingModel(BaseModel):
    """A model whose fields can be read like the items of a mapping."""

    model_config = OPEN

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: str) -> bool:
        return key in type(self).model_fields

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def keys(self) -> Any:
        return type(self).model_fields.keys()

    def values(self) -> list[Any]:
        return [getattr(self, key) for key in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(key, getattr(self, key)) for key in self.keys()]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.keys())


# --- messages --------------------------------------------------------------------------------------------------------


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ChatCompletionMessageToolCall(BaseModel):
    id: str = ""
    type: str = "function"
    function: FunctionCall


class ChatCompletionContentPartTextParam(MappingModel):
    text: str
    type: str = "text"


class ChatCompletionContentPartImageParam(MappingModel):
    image_url: dict[str, Any]
    type: str = "image_url"


ChatCompletionContentPartParam = ChatCompletionContentPartTextParam | ChatCompletionContentPartImageParam


class CompatMessage(BaseModel):
    """A chat message. A tool call without an id gets one from its place."""

    model_config = OPEN
    role: str
    content: str | list[ChatCompletionContentPartParam | Any] | None = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    control_plane_step: dict[str, Any] | None = None
    weight: float | None = None
    logprobs: Any = None

    @model_validator(mode="after")
    def _with_ids(self) -> Self:
        for place, call in enumerate(self.tool_calls or ()):
            call.id = call.id or f"call_{place}"
        return self

    def dump_mdoel_for_chat_completion_request(self) -> dict[str, Any]:
        """Return the fields of a chat API. The spelling of the name is eval-protocol's."""
        hidden = {"control_plane_step", "reasoning_content", "weight", "logprobs"}
        return self.model_dump(exclude_none=True, exclude=hidden)


# --- results ---------------------------------------------------------------------------------------------------------


class MetricResult(MappingModel):
    """A named part of a result: its score is the metric reward/<term>/<name>.

    `reason` and `data` are kept beside the number: in the log, the rollout files and the viewer. `data` is a field, but
    not an item.
    """

    is_score_valid: bool = True  # False: the score is no metric, and only written down
    score: float
    reason: str  # why the score is what it is
    data: dict[str, Any] = Field(default_factory=dict)  # anything else, as JSON

    def items(self) -> list[tuple[str, Any]]:
        return [(key, getattr(self, key)) for key in self]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return (key for key in self.keys() if key != "data")


class StepOutput(MappingModel):
    """The reward of one step: an assistant's turn of the policy.

    A step without an output gets the term's `default_step_reward`. Base rewards are r_t of step-level credit (GiGPO's
    A_S, from discounted returns) and of a critic's GAE.
    """

    # place of the assistant's message in `messages`, or the ordinal of the assistant's turn (negative: from the end),
    # or an id of `step_ids`; where a number could be both of the first two, the term's `step_index` says which
    step_index: int | str
    base_reward: float  # any finite number
    terminated: bool = False  # of eval-protocol; not used: the episode has ended when it is judged
    control_plane_info: dict[str, Any] | None = None  # of eval-protocol; not used
    metrics: dict[str, Any] = Field(default_factory=dict)  # kept with the step, as JSON: log, rollout files, viewer
    reason: str | None = None  # why; kept with the step, and found by `headrace view --search`


class EvaluateResult(MappingModel):
    """The verdict of a reward function on one episode.

    A pointwise function is called as `f(messages, ground_truth=None, **kwargs)` and returns one of these; a batch
    function (`@reward_function(mode="batch")`) as `f(rollouts_messages, ground_truths=None, **kwargs)` with the
    episodes of a group, and returns a list, one for each. `score` is the episode's reward (GiGPO's A_E compares it
    within the group); `step_outputs` are the rewards of its steps. Without them the score is the reward of the last
    step; with them it is added there only if the term says `terminal_score = "add"`.
    """

    score: float  # the episode's reward, any finite number
    is_score_valid: bool = True  # False: the episode has no reward and is left out, unless the term says `keep_invalid`
    reason: str | None = None  # why; kept with the episode: log, rollout files, viewer, and `headrace view --search`
    metrics: dict[str, MetricResult] = Field(default_factory=dict)  # named parts; they do not change the score
    step_outputs: list[StepOutput] | None = None  # rewards of single steps; None: there are none
    error: str | None = None  # the function could not tell: the episode is left out, and this is the reason
    trajectory_info: dict[str, Any] | None = None  # of eval-protocol; not used
    final_control_plane_info: dict[str, Any] | None = None  # of eval-protocol; not used
    agg_score: float | None = None  # of eval-protocol, over several runs of a row; not used
    standard_error: float | None = None  # of eval-protocol, beside `agg_score`; not used


# --- rows of eval-protocol -------------------------------------------------------------------------------------------


class TerminationReason(StrEnum):
    MAX_STEPS = "max_steps"
    CONTROL_PLANE_SIGNAL = "control_plane_signal"
    USER_STOP = "user_stop"
    SKIPPABLE_ERROR = "skippable_error"
    NON_SKIPPABLE_ERROR = "non_skippable_error"
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class Code(IntEnum):
    """The status codes of gRPC, and those of rollouts."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16
    FINISHED = 100
    RUNNING = 101
    SCORE_INVALID = 102
    RESPONSE_QUALITY_ERROR = 103


class CompatStatus(BaseModel):
    """Why a rollout ended, in `details` as eval-protocol writes it."""

    code: Code
    message: str
    details: list[dict[str, Any]] = Field(default_factory=list)

    @classmethod
    def rollout_running(cls) -> Self:
        return cls(code=Code.RUNNING, message="Rollout is running")

    @classmethod
    def rollout_finished(
        cls, termination_reason: TerminationReason | str | None = None, extra_info: dict[str, Any] | None = None
    ) -> Self:
        details = []
        if termination_reason is not None:
            reason = {"termination_reason": str(TerminationReason(termination_reason))}
            details.append(_detail("TERMINATION_REASON", reason))
        if extra_info:
            details.append(_detail("EXTRA_INFO", extra_info))
        return cls(code=Code.FINISHED, message="Rollout finished", details=details)

    @classmethod
    def rollout_error(cls, error_message: str, extra_info: dict[str, Any] | None = None) -> Self:
        details = [_detail("EXTRA_INFO", extra_info)] if extra_info else []
        return cls(code=Code.INTERNAL, message=error_message, details=details)

    @classmethod
    def error(cls, error_message: str, details: list[dict[str, Any]] | None = None) -> Self:
        return cls(code=Code.INTERNAL, message=error_message, details=details or [])

    @classmethod
    def score_invalid(cls, message: str = "Score is invalid", details: list[dict[str, Any]] | None = None) -> Self:
        return cls(code=Code.SCORE_INVALID, message=message, details=details or [])

    def is_running(self) -> bool:
        return self.code == Code.RUNNING

    def is_finished(self) -> bool:
        return self.code == Code.FINISHED

    def is_error(self) -> bool:
        return self.code == Code.INTERNAL

    def is_stopped(self) -> bool:
        return self.code == Code.CANCELLED

    def is_score_invalid(self) -> bool:
        return self.code == Code.SCORE_INVALID

    def get_termination_reason(self) -> TerminationReason | None:
        metadata = self._metadata("TERMINATION_REASON")
        return None if metadata is None else TerminationReason(metadata["termination_reason"])

    def get_extra_info(self) -> dict[str, Any] | None:
        return self._metadata("EXTRA_INFO")

    def _metadata(self, reason: str) -> dict[str, Any] | None:
        return next((item.get("metadata", {}) for item in self.details if item.get("reason") == reason), None)


CompatStatus.Code = Code  # type: ignore[attr-defined]


def _detail(reason: str, metadata: dict[str, Any]) -> dict[str, Any]:
    kind = "type.googleapis.com/google.rpc.ErrorInfo"
    return {"@type": kind, "reason": reason, "domain": "evalprotocol.io", "metadata": metadata}


class InputMetadata(BaseModel):
    model_config = OPEN
    row_id: str | None = None
    completion_params: dict[str, Any] = Field(default_factory=dict)
    dataset_info: dict[str, Any] | None = None
    session_data: dict[str, Any] | None = None


class ExecutionMetadata(BaseModel):
    model_config = OPEN
    invocation_id: str | None = None
    experiment_id: str | None = None
    rollout_id: str | None = None
    run_id: str | None = None
    usage: Any = None
    cost_metrics: Any = None
    duration_seconds: float | None = None
    rollout_duration_seconds: float | None = None
    eval_duration_seconds: float | None = None
    experiment_duration_seconds: float | None = None
    extra: dict[str, Any] | None = None
    finish_reason: str | None = None
    tool_call_count: int | None = None
    raw_output: dict[str, Any] | None = None


class EvaluationRow(BaseModel):
    model_config = OPEN
    messages: list[CompatMessage] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    input_metadata: InputMetadata = Field(default_factory=InputMetadata)
    rollout_status: CompatStatus = Field(default_factory=CompatStatus.rollout_running)
    ground_truth: Any = None
    evaluation_result: EvaluateResult | None = None
    execution_metadata: ExecutionMetadata = Field(default_factory=ExecutionMetadata)
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    eval_metadata: Any = None
    pid: int | None = None

    def is_trajectory_evaluation(self) -> bool:
        return bool(self.evaluation_result is not None and self.evaluation_result.step_outputs)

    def get_conversation_length(self) -> int:
        return len(self.messages)

    def get_system_message(self) -> CompatMessage:
        return next(iter(self._messages_by("system")), CompatMessage(role="system", content=""))

    def get_assistant_messages(self) -> list[CompatMessage]:
        return self._messages_by("assistant")

    def get_user_messages(self) -> list[CompatMessage]:
        return self._messages_by("user")

    def last_assistant_message(self) -> CompatMessage | None:
        return next(reversed(self._messages_by("assistant")), None)

    def get_first_user_message(self) -> CompatMessage | None:
        return next(iter(self._messages_by("user")), None)

    def get_input_metadata(self, key: str, default: Any = None) -> Any:
        return getattr(self.input_metadata, key, default)

    def get_steps(self) -> int:
        return len(self._control_steps())

    def get_total_reward(self) -> float:
        return sum(float(step.get("reward", 0.0)) for step in self._control_steps())

    def get_terminated(self) -> bool:
        return any(step.get("terminated", False) for step in self._control_steps())

    def get_termination_reason(self) -> str:
        reasons = (
            step["termination_reason"] for step in reversed(self._control_steps()) if step.get("termination_reason")
        )
        return str(next(reasons, "unknown"))

    def _messages_by(self, role: str) -> list[CompatMessage]:
        return [message for message in self.messages if message.role == role]

    def _control_steps(self) -> Sequence[dict[str, Any]]:
        """List what environments reported beside the messages."""
        return [message.control_plane_step for message in self.messages if message.control_plane_step]


for _model, _name in ((CompatMessage, "Message"), (CompatStatus, "Status")):  # their names in users' code
    _model.__name__ = _model.__qualname__ = _name

PUBLIC: dict[str, Any] = {
    "ChatCompletionContentPartParam": ChatCompletionContentPartParam,
    **{
        model.__name__: model
        for model in (
            FunctionCall,
            ChatCompletionMessageToolCall,
            ChatCompletionContentPartTextParam,
            ChatCompletionContentPartImageParam,
            CompatMessage,
            MetricResult,
            StepOutput,
            EvaluateResult,
            TerminationReason,
            CompatStatus,
            InputMetadata,
            ExecutionMetadata,
            EvaluationRow,
        )
    },
}
