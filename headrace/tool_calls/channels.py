"""Parse gpt-oss's channels: a turn is messages, each with a channel and perhaps a recipient, which is a tool.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json
<|message|>{"a": 1}` thinks and calls; the channel `final` answers. The recipient may also come before the channel.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from headrace.tool_calls.json_calls import is_object
from headrace.types import ToolCall

RECIPIENT = "to=functions."
_START, _MESSAGE = "<|start|>assistant", "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TOOL = re.compile(r"to=functions\.([\w.-]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTexts:
    """The messages of a turn, by what they are for."""

    reasoning: str
    said: str  # before calls, or the answer
    calls: tuple[ToolCall, ...]


def parse_channels(text: str, tools: Collection[str]) -> ChannelTexts | None:
    """Divide a turn into its channels; None if it has none, or a call is malformed or of an unknown tool.

    >>> parse_channels('<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4', ())
    ChannelTexts(reasoning='hm', said='4', calls=())
    """
    reasoning: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    for part in text.split(_START):
        if not part.strip():
            continue
        header, mark, body = part.partition(_MESSAGE)
        channel = _CHANNEL.search(header)
        if not mark or channel is None:
            return None
        body = _END.sub("", body)
        if (tool := _TOOL.search(header)) is not None:
            if tool.group(1) not in tools or not is_object(body):
                return None
            calls.append(ToolCall(name=tool.group(1), arguments=body.strip()))
        else:
            (reasoning if channel.group(1) == "analysis" else said).append(body)
    return ChannelTexts(reasoning="\n".join(reasoning), said="\n".join(said), calls=tuple(calls))
