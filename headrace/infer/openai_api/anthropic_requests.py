"""Parse requests of Anthropic's Messages API, and turn them into the chat requests that a session answers.

A conversation of blocks becomes one of messages: a `tool_result` is a message of the role `tool`, a `tool_use` is a
call of the assistant's message. What cannot be honoured is refused by name, as for chat requests.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
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
    check_stops,
    function_tool,
    parse_body,
)

BETWEEN_BLOCKS = "\n\n"  # blocks of one message are paragraphs of it
ERROR_MARK = "error: "  # before the result of a tool that failed
SUPPORTED = (
    "only blocks of type text, thinking, tool_use and tool_result can be shown to this model: images, documents and "
    "tools that the provider runs cannot"
)
# Claude Code sends it: thinking of earlier turns stays, as it does here.
KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class MessagesBody(ChatBody):
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "citations"}
    )
    neutral: ClassVar[Mapping[str, Any]] = {
        "context_management": KEEP_THINKING,
        "caller": {"type": "direct"},
        "allowed_callers": ["direct"],
    }


class TextBlockIn(MessagesBody):
    type: Literal["text"]
    text: str


class ThinkingBlockIn(MessagesBody):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockIn(MessagesBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceIn(MessagesBody):
    type: Literal["tool_reference"]
    tool_name: str


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else None


BY_KIND = Discriminator(_kind, custom_error_type="unsupported_block", custom_error_message=SUPPORTED)
ResultBlock = Annotated[
    Annotated[TextBlockIn, Tag("text")] | Annotated[ToolReferenceIn, Tag("tool_reference")], BY_KIND
]


class ToolResultBlockIn(MessagesBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        parts = [self.content] if isinstance(self.content, str) else [_result_text(part) for part in self.content or ()]
        return (ERROR_MARK if self.is_error else "") + BETWEEN_BLOCKS.join(parts)


Block = Annotated[
    Annotated[TextBlockIn, Tag("text")]
    | Annotated[ThinkingBlockIn, Tag("thinking")]
    | Annotated[ToolUseBlockIn, Tag("tool_use")]
    | Annotated[ToolResultBlockIn, Tag("tool_result")],
    BY_KIND,
]


class TurnIn(MessagesBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> Sequence[Block]:
        return [TextBlockIn(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class MessagesToolIn(MessagesBody):
    ignored: ClassVar[frozenset[str]] = MessagesBody.ignored | {"eager_input_streaming", "input_examples"}

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # shown to the template; nothing constrains sampling
    defer_loading: bool | None = None  # shown once a tool_reference names it

    def to_tool(self) -> ToolIn:
        return function_tool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


class ThinkingIn(MessagesBody):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # max_tokens limits the whole reply
    display: Literal["summarized", "omitted"] | None = None


class MessagesRequest(MessagesBody):
    """The body of a call, or of a count of its tokens. A null field means the same as a missing one."""

    model: str
    messages: list[TurnIn] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, gt=0)
    system: str | list[TextBlockIn] | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop_sequences: list[str] | None = None
    tools: list[MessagesToolIn] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingIn | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())

    @property
    def thinks(self) -> bool:
        """Tell whether thinking in a reply becomes a block of its own."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def to_chat(self) -> ChatRequest:
        """Write the request as a chat request. Raises ApiError on a block that its role cannot have."""
        system = self.system if isinstance(self.system, str) else _joined(block.text for block in self.system or ())
        messages = [MessageIn(role="system", content=system)] if system else []
        for index, turn in enumerate(self.messages):
            messages += _turn_messages(turn, f"messages[{index}]")
        return ChatRequest(
            model=self.model,
            messages=messages,
            temperature=self.temperature,
            top_p=self.top_p,
            max_completion_tokens=self.max_tokens,
            stop=list(self.stops) or None,
            tools=[tool.to_tool() for tool in self._loaded_tools()] or None,
            tool_choice="none" if (self.tool_choice or {}).get("type") == "none" else None,
        )

    def _loaded_tools(self) -> list[MessagesToolIn]:
        """Return the tools without those that are deferred until a tool_reference of the conversation names them."""
        results = [block for turn in self.messages for block in turn.blocks if isinstance(block, ToolResultBlockIn)]
        named = {
            part.tool_name
            for result in results
            if isinstance(result.content, list)
            for part in result.content
            if isinstance(part, ToolReferenceIn)
        }
        return [tool for tool in self.tools or () if not tool.defer_loading or tool.name in named]


def parse_messages(body: bytes, *, counted: bool = False) -> MessagesRequest:
    """Parse a request; `counted`: for the number of its tokens alone.

    Raises ApiError with the name of the first field that cannot be honoured.
    """
    request = parse_body(body, MessagesRequest)
    if request.max_tokens is None and not counted:
        raise ApiError("max_tokens: Field required", param="max_tokens")
    _check_messages(request)
    _check_tools(request)
    check_stops(request.stops, param="stop_sequences")
    others = set(request.output_config or ()) - {"effort"}  # a hint, which no model here was trained to read
    if any((request.output_config or {})[name] is not None for name in others):
        raise ApiError("output_config: nothing constrains what is sampled: leave it out", param="output_config")
    return request


def sign_thinking(text: str) -> str:
    """Write thinking, its marks included, as the signature of a block: clients return it unchanged.

    >>> read_signature(sign_thinking("<think>hm</think>"))
    '<think>hm</think>'
    """
    return base64.b64encode(text.encode()).decode()


def read_signature(signature: str) -> str:
    """Return the text that was signed. Raises ApiError on a signature of another endpoint."""
    try:
        return base64.b64decode(signature, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as exc:
        raise ApiError(
            "a thinking block has a signature that this endpoint did not write: leave the block out", param="messages"
        ) from exc


def _check_messages(request: MessagesRequest) -> None:
    for index, turn in enumerate(request.messages):
        turn.refuse_unknown(f"messages[{index}].")
        for place, block in enumerate(turn.blocks):
            block.refuse_unknown(f"messages[{index}].content[{place}].")
    if request.messages[-1].role == "assistant":
        raise ApiError(
            "messages: the conversation must end with a user message: a reply cannot be begun for the model",
            param="messages",
        )


def _check_tools(request: MessagesRequest) -> None:
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise ApiError(
                f"tools[{index}]: {tool.type} is a tool that the provider defines: describe a tool of your own by its "
                "input_schema",
                param="tools",
            )
        if tool.input_schema is None:
            raise ApiError(f"tools[{index}].input_schema: Field required", param="tools")
        tool.refuse_unknown(f"tools[{index}].")
    choice = request.tool_choice or {"type": "auto"}
    if choice.get("type") not in ("auto", "none") or choice.get("disable_parallel_tool_use"):
        raise ApiError(
            'tool_choice must be {"type": "auto"} or {"type": "none"}: what is sampled cannot be forced to be a call, '
            "or a single one",
            param="tool_choice",
        )


def _turn_messages(turn: TurnIn, place: str) -> list[MessageIn]:
    if turn.role == "assistant":
        return [_assistant_message(turn, place)]
    messages: list[MessageIn] = []
    texts: list[str] = []
    for block in turn.blocks:
        match block:
            case TextBlockIn():
                texts.append(block.text)
            case ToolResultBlockIn() if turn.role == "user":
                if texts:
                    messages.append(MessageIn(role=turn.role, content=_joined(texts)))
                    texts = []
                messages.append(MessageIn(role="tool", content=block.text, tool_call_id=block.tool_use_id))
            case _:
                raise ApiError(f"{place}: a {turn.role} message cannot have a block of type {block.type}", param=place)
    return [*messages, MessageIn(role=turn.role, content=_joined(texts))] if texts or not messages else messages


def _assistant_message(turn: TurnIn, place: str) -> MessageIn:
    thinking, texts, calls = "", list[str](), list[ToolCallIn]()
    for block in turn.blocks:
        match block:
            case TextBlockIn():
                texts.append(block.text)
            case ThinkingBlockIn():
                thinking += read_signature(block.signature)
            case ToolUseBlockIn():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCallIn(id=block.id, function=FunctionCallIn(name=block.name, arguments=arguments)))
            case _:
                raise ApiError(f"{place}: an assistant message cannot have a block of type tool_result", param=place)
    return MessageIn(role="assistant", content=thinking + _joined(texts), tool_calls=calls or None)


def _result_text(part: TextBlockIn | ToolReferenceIn) -> str:
    return part.text if isinstance(part, TextBlockIn) else f"The tool {part.tool_name} is available now."


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN_BLOCKS.join(texts)
