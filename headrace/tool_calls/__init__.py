"""Tool calls and reasoning blocks in a model's text, in the form of its chat template or as plain JSON.

- `reply.py` divides a reply into text, reasoning and calls, and continues a conversation with calls from its tokens.
- `forms.py` is the table of the forms that families of models write calls in; it reads a template's form off it.
- `json_calls.py` parses calls that are JSON: in tags (Qwen3, Hermes), after a mark (Mistral), bare (Llama).
- `xml_calls.py` parses calls whose arguments are XML elements: Qwen3.5's and GLM's.
- `channels.py` parses gpt-oss's channels.
- `reasoning.py` finds the block in which a model thinks.
"""

from headrace.tool_calls.forms import ToolForm, find_form
from headrace.tool_calls.json_calls import is_object
from headrace.tool_calls.reply import (
    ParsedReply,
    call_problem,
    extended_placed_prompt,
    extended_prompt,
    how_to_call,
    parse_reply,
    tool_names,
    tool_schemas,
    with_ids,
)

__all__ = [
    "ParsedReply",
    "ToolForm",
    "call_problem",
    "extended_placed_prompt",
    "extended_prompt",
    "find_form",
    "how_to_call",
    "is_object",
    "parse_reply",
    "tool_names",
    "tool_schemas",
    "with_ids",
]
