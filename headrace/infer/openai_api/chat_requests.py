"""Parse chat-completion requests into types, and refuse what cannot be honoured.

A parameter that this endpoint cannot honour is refused by name, never dropped: a program would otherwise be trained on
something else than it asked for. Values without an effect (null, a penalty of 0) pass.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import HeadraceError
from headrace.tool_calls import tool_schemas
from headrace.types import Message, ToolCall

IGNORED = frozenset(  # they change nothing in what is sampled
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "modalities": ["text"],
}
MAX_STOPS = 16
B = TypeVar("B", bound="ChatBody")


class ApiError(HeadraceError):
    """An error reply; `param` is the field that has to change, as OpenAI names it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _says_nothing(value: Any) -> bool:
    """Tell whether a value is null, empty, or an object of nulls, as litellm adds to the messages that it repeats."""
    return value is None or value == [] or (isinstance(value, dict) and all(part is None for part in value.values()))


class ChatBody(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = IGNORED
    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL

    def refuse_unknown(self, place: str = "") -> None:
        for name, value in (self.model_extra or {}).items():
            if _says_nothing(value) or name in self.ignored or (name in self.neutral and value == self.neutral[name]):
                continue
            raise ApiError(
                f"{name} is not supported here: leave it out", param=place + name, code="unsupported_parameter"
            )


class PartIn(ChatBody):
    type: Literal["text"]
    text: str


class FunctionCallIn(ChatBody):
    name: str
    arguments: str


class ToolCallIn(ChatBody):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCallIn


class MessageIn(ChatBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[PartIn] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return Message(
            role="system" if self.role == "developer" else self.role,  # one role under two names
            content=text,
            name=self.name,
            tool_calls=tuple(
                ToolCall(name=call.function.name, arguments=call.function.arguments, id=call.id)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
        )


class FunctionIn(ChatBody):
    name: str = Field(min_length=1)


class ToolIn(ChatBody):
    type: Literal["function"]
    function: FunctionIn


def function_tool(**fields: Any) -> ToolIn:
    """Describe a tool as chat requests do, without the fields that are None."""
    given = {key: value for key, value in fields.items() if value is not None}
    return ToolIn(type="function", function=FunctionIn.model_validate(given))


class StreamOptionsIn(ChatBody):
    include_usage: bool = False
    include_obfuscation: bool = False  # a padding against eavesdroppers, which this endpoint never adds


class ChatRequest(ChatBody):
    """The body of a call. A null field means the same as a missing one."""

    model: str
    messages: list[MessageIn] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    max_completion_tokens: int | None = Field(default=None, gt=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptionsIn | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...] | None:
        """The tools as the program sent them, for the chat template."""
        return tuple(tool.model_dump(exclude_unset=True) for tool in self.tools) if self.tools else None

    @property
    def callable_tools(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the tools whose calls are looked for in the reply, by name."""
        return {} if self.tool_choice == "none" else tool_schemas(self.shown_tools or ())


def parse_request(body: bytes, *, max_n: int = 1, max_tops: int = 0) -> ChatRequest:
    """Parse a request. Raises ApiError with the name of the first field that cannot be honoured.

    `max_n`: most replies to one request; `max_tops`: most alternatives reported for a sampled token.
    """
    request = parse_body(body, ChatRequest)
    _check(request)
    if not 1 <= (1 if request.n is None else request.n) <= max_n:
        allowed = (
            "1: a call is one turn of an episode, so ask again for another" if max_n == 1 else f"from 1 to {max_n}"
        )
        raise ApiError(f"n must be {allowed}", param="n")
    if not 0 <= (request.top_logprobs or 0) <= max_tops:
        allowed = (
            "0: only the log-probability of the sampled token is known" if not max_tops else f"from 0 to {max_tops}"
        )
        raise ApiError(f"top_logprobs must be {allowed}", param="top_logprobs")
    return request


def parse_body(body: bytes, kind: type[B]) -> B:
    """Parse JSON as a request of that kind. Raises ApiError on a malformed or unknown field."""
    try:
        raw = json.loads(body)
        if b"\\u" in body:  # JSON can write half a character, which no tokenizer can read
            json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise ApiError(f"the body is not JSON ({exc})") from exc
    if not isinstance(raw, dict):
        raise ApiError("the body must be a JSON object")
    try:
        request = kind.model_validate(raw)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        first = max(errors, key=lambda error: len(error["loc"]))  # of a union's members, the one that came closest
        param = _param(first["loc"])
        raise ApiError(f"{param}: {first['msg']}", param=param, code="invalid_value") from exc
    request.refuse_unknown()
    return request


def _check(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        message.refuse_unknown(f"messages[{index}].")
    if request.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            'tool_choice must be "auto" or "none": what is sampled cannot be forced to be a call', param="tool_choice"
        )
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise ApiError("max_tokens and max_completion_tokens differ: write one of them", param="max_tokens")
    check_stops(request.stops)
    check_stream(request.stream, request.stream_options)


def check_stops(stops: tuple[str, ...], param: str = "stop") -> None:
    if "" in stops or len(stops) > MAX_STOPS:
        raise ApiError(
            f"{param} must be a text or a list of at most {MAX_STOPS} texts, none of them empty", param=param
        )


def check_stream(stream: bool | None, options: StreamOptionsIn | None) -> None:
    if options is not None:
        options.refuse_unknown("stream_options.")
        if not stream:
            raise ApiError("stream_options are for stream = true only", param="stream_options")


def _param(loc: tuple[int | str, ...]) -> str:
    """Name a field as OpenAI does: messages[0].content. The members of a union are not part of it."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "dict", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or "body"
