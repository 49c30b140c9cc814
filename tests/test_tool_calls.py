"""Tool calls are read in the form that the chat template writes, or as JSON; what is neither stays text, all of it."""

import doctest
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace import tool_calls, types
from headrace.render import Renderer
from headrace.tool_calls import ParsedReply, ToolForm, find_form, parse_reply
from headrace.types import ToolCall

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
TAIL = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ONE = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"
TEMPLATES = {
    "hermes": "{{ m.content }}{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}{{ " + ONE + " }}"
    "{{ '\\n</tool_call>' }}{% endfor %}",
    "thinking": "{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\\n' }}{{ " + ONE + " }}{{ '\\n</tool_call>' }}{% endfor %}",
    "list": "{{ m.content }}{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}{{ " + ONE + " }}"
    "{% endfor %}{{ ']' }}{% endif %}",
    "bare": "{{ m.content }}{% for call in m.tool_calls or [] %}{{ "
    + ONE.replace("'arguments'", "'parameters'")
    + " }}"
    "{% endfor %}",
    "none": "{{ m.content }}",
    "refusing": "{{ m.content }}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}",
    "other": "{{ m.content }}{% for call in m.tool_calls or [] %}{{ '<f=' + call.function.name + '>' }}{% endfor %}",
}
HERMES = ToolForm(opening="<tool_call>", closing="</tool_call>")
ADD = '{"name": "add", "arguments": {"a": 1}}'


def renderer_of(template: str) -> Renderer:
    """One token per byte; `[TOOL_CALLS]` is a special token, which plain decoding leaves out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = HEAD + template + TAIL
    return Renderer(tokenizer)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", HERMES),
        ("thinking", HERMES),
        ("list", ToolForm(opening="[TOOL_CALLS]", closing="")),
        ("bare", None),
        ("none", None),
        ("refusing", None),
        ("other", None),
    ],
)
def test_the_form_is_read_off_the_template(name: str, form: ToolForm | None) -> None:
    assert find_form(renderer_of(TEMPLATES[name])) == form


@pytest.mark.parametrize(
    ("text", "form", "content", "calls"),
    [
        (f"<tool_call>{ADD}</tool_call>", HERMES, "", ['{"a": 1}']),
        (
            f"so:\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call> done",
            HERMES,
            "so:\n\n done",
            ['{"a": 1}'] * 2,
        ),
        (f"[TOOL_CALLS][{ADD}, {ADD}]", ToolForm(opening="[TOOL_CALLS]", closing=""), "", ['{"a": 1}'] * 2),
        (ADD, None, "", ['{"a": 1}']),
        (ADD, HERMES, "", ['{"a": 1}']),
        (f" [{ADD}]\n", None, "", ['{"a": 1}']),
        ('{"name": "add", "parameters": {"a":  [1, {"arguments": 2}]}}', None, "", ['{"a":  [1, {"arguments": 2}]}']),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', None, "", ['{"a": 1}']),
        ('{"tool_calls": [{"type": "function", "function": ' + ADD + "}]}", None, "", ['{"a": 1}']),
        ('{"name": "add"}', None, "", ["{}"]),
    ],
)
def test_calls_are_found_with_the_arguments_as_written(
    text: str, form: ToolForm | None, content: str, calls: list[str]
) -> None:
    made = tuple(ToolCall(name="add", arguments=arguments) for arguments in calls)
    assert parse_reply(text, form, {"add"}) == ParsedReply(content=content, calls=made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "<tool_call>" + ADD,  # cut off
        "<tool_call>" + ADD[:-1] + "</tool_call>",
        f"<tool_call>{ADD}</tool_call><tool_call>nonsense</tool_call>",
        f"<tool_call>{ADD} and more</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ADD + " I think",
        "I think " + ADD,
        '{"a": 1}',
        "[1, 2]",
        "[" * 100_000,
    ],
)
def test_anything_else_is_text_as_it_is(text: str) -> None:
    assert parse_reply(text, HERMES, {"add"}) == ParsedReply(content=text)


def test_half_a_character_in_a_call_makes_it_malformed() -> None:
    """JSON can write it, and then a tool that repeats it, or the template, fails on it: the policy's own mistake."""
    half = ADD.replace("1", '"\\ud83d"')
    whole = ADD.replace("1", '"\\ud83d\\ude00 \\u00e9"')
    for text, form in ((half, None), (f"<tool_call>{half}</tool_call>", HERMES)):
        assert parse_reply(text, form, {"add"}) == ParsedReply(content=text)
    [call] = parse_reply(whole, None, {"add"}).calls
    assert json.loads(call.arguments) == {"a": "\U0001f600 é"}


@given(st.text(), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_what_a_template_writes_is_read_back(said: str, arguments: dict[str, object]) -> None:
    said = said.replace("<tool_call>", "")
    written = f'{said}<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    parsed = parse_reply(written, HERMES, {"f"})
    assert parsed.content == said.strip()
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments]


def test_the_examples_run() -> None:
    results = [doctest.testmod(module) for module in (tool_calls, types)]
    assert [(each.attempted, each.failed) for each in results] == [(4, 0), (1, 0)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_has_not_make_no_call(number: str) -> None:
    """A tool server that got one could not read the message at all."""
    for text in (
        f'{{"name": "add", "arguments": {{"a": {number}}}}}',
        f'{{"name": "add", "arguments": "{{\\"a\\": {number}}}"}}',
        f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>',
    ):
        assert parse_reply(text, HERMES, {"add"}) == ParsedReply(content=text)
        assert parse_reply(text.replace(number, "1"), HERMES, {"add"}).calls
