"""Parse requests of OpenAI's Responses API, and turn them into the chat requests that a session answers.

A conversation of items becomes one of messages: `function_call` items belong to the assistant's message before them, a
`function_call_output` is a message of the role `tool`. What cannot be honoured is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headrace.infer.openai_api.chat_requests import (
    ApiError,
    ChatBody,
    ChatRequest,
    FunctionCallIn,
    MessageIn,
    ToolCallIn,
    ToolIn,
    function_tool,
    parse_body,
)

ITEM_KINDS = (
    "only items of type message, function_call and function_call_output can be shown to this model: reasoning, "
    "references and items of tools that the provider runs cannot"
)


class ResponsesBody(ChatBody):
    ignored: ClassVar[frozenset[str]] = ChatBody.ignored | {"prompt_cache_options", "status", "id", "phase"}
    neutral: ClassVar[Mapping[str, Any]] = {
        "parallel_tool_calls": True,
        "background": False,
        "truncation": "disabled",
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],  # no reply has any
        "caller": {"type": "direct"},
    }


class TextPartIn(ResponsesBody):
    ignored: ClassVar[frozenset[str]] = ResponsesBody.ignored | {"annotations", "logprobs", "prompt_cache_breakpoint"}

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = str | list[TextPartIn]


class MessageItemIn(ResponsesBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItemIn(ResponsesBody):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItemIn(ResponsesBody):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _item_kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItemIn, Tag("message")]
    | Annotated[FunctionCallItemIn, Tag("function_call")]
    | Annotated[FunctionOutputItemIn, Tag("function_call_output")],
    Discriminator(_item_kind, custom_error_type="unsupported_item", custom_error_message=ITEM_KINDS),
]


class FunctionToolIn(ResponsesBody):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # shown to the template; nothing constrains sampling

    def to_tool(self) -> ToolIn:
        return function_tool(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class ResponsesRequest(ResponsesBody):
    """The body of a call. A null field means the same as a missing one."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[FunctionToolIn] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None  # a hint, which no model here was trained to read
    store: bool | None = None  # false: the reply cannot be named by previous_response_id
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def messages(self) -> list[MessageIn]:
        """The messages of `input`."""
        if isinstance(self.input, str):
            return [MessageIn(role="user", content=self.input)]
        return _item_messages(self.input)

    def to_chat(self, conversation: Sequence[MessageIn]) -> ChatRequest:
        """Write the request as a chat request about a conversation, which the instructions come before."""
        system = [MessageIn(role="system", content=self.instructions)] if self.instructions else []
        return ChatRequest(
            model=self.model,
            messages=[*system, *conversation],
            temperature=self.temperature,
            top_p=self.top_p,
            max_completion_tokens=self.max_output_tokens,
            tools=[tool.to_tool() for tool in self.tools or ()] or None,
            tool_choice=self.tool_choice,
        )


def parse_responses(body: bytes) -> ResponsesRequest:
    """Parse a request. Raises ApiError with the name of the first field that cannot be honoured."""
    request = parse_body(body, ResponsesRequest)
    for index, item in enumerate(request.input if not isinstance(request.input, str) else ()):
        item.refuse_unknown(f"input[{index}].")
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function" or not tool.name:
            raise ApiError(
                f"tools[{index}]: only tools of type function, with a name, can be called: {tool.type} is run by the "
                "provider",
                param=f"tools[{index}].type",
            )
        tool.refuse_unknown(f"tools[{index}].")
    if request.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            'tool_choice must be "auto" or "none": what is sampled cannot be forced to be a call', param="tool_choice"
        )
    if not request.input and request.previous_response_id is None:
        raise ApiError("input is empty: write a text or at least one item", param="input")
    return request


def reply_message(content: str, calls: Sequence[tuple[str, str, str]]) -> MessageIn:
    """Write a reply with its calls (id, name, arguments) as a message."""
    return MessageIn(
        role="assistant",
        content=content,
        tool_calls=[
            ToolCallIn(id=id, function=FunctionCallIn(name=name, arguments=arguments)) for id, name, arguments in calls
        ]
        or None,
    )


def _item_messages(items: Sequence[Item]) -> list[MessageIn]:
    """Gather items into messages: an assistant's text and the calls that follow it were sampled as one turn."""
    messages: list[MessageIn] = []
    content, calls, open = "", list[tuple[str, str, str]](), False
    for item in items:
        if isinstance(item, FunctionCallItemIn):
            calls.append((item.call_id, item.name, item.arguments))
            open = True
            continue
        if open:
            messages.append(reply_message(content, calls))
        content, calls, open = "", [], False
        if isinstance(item, FunctionOutputItemIn):
            messages.append(MessageIn(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif item.role == "assistant":
            content, open = _text(item.content), True
        else:
            messages.append(MessageIn(role=item.role, content=_text(item.content)))
    return [*messages, reply_message(content, calls)] if open else messages


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
