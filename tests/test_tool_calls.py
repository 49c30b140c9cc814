"""Tool calls are read in the form that the chat template writes, or as JSON; what is neither stays text, all of it."""

import doctest
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace import types
from headrace.render import Renderer
from headrace.tool_calls import (
    ParsedReply,
    ToolForm,
    call_problem,
    channels,
    extended_prompt,
    find_form,
    json_calls,
    parse_reply,
    reasoning,
    reply,
    tool_schemas,
    with_ids,
    xml_calls,
)
from headrace.types import Message, ToolCall

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


def renderer_of(template: str, *, before: str = "", whole: bool = False) -> Renderer:
    """One token per byte; `[TOOL_CALLS]` is a special token, which plain decoding leaves out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|return|>", "<|call|>", "<|message|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|return|>" if whole else "<|im_end|>")
    tokenizer.chat_template = template if whole else before + HEAD + template + TAIL
    return Renderer(tokenizer, eos_tokens=[tokenizer.convert_tokens_to_ids("<|call|>")] if whole else ())


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
    results = [doctest.testmod(module) for module in (reply, json_calls, xml_calls, channels, reasoning, types)]
    assert [each.failed for each in results] == [0] * 6
    assert sum(each.attempted for each in results) == 8


# --- the families -----------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
# the parts of published templates that write an assistant's turn
FAMILIES: dict[str, tuple[str, ToolForm | None]] = {
    "Qwen3": (
        "{% set content = m.content %}{% set thought = '' %}{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{% if thought %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"
        + CALLS
        + "{% if content or not loop.first %}{{ '\\n' }}{% endif %}"
        '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
        "{{ '}\\n</tool_call>' }}{% endfor %}",
        HERMES,
    ),
    "Qwen3.5": (
        "{{ m.content }}" + CALLS + "{% if m.content or not loop.first %}{{ '\\n\\n' }}{% endif %}"
        "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for name, value in f.arguments.items() %}"
        "{{ '<parameter=' + name + '>\\n' }}{{ value | tojson if value is mapping or (value is sequence and value is "
        "not string) else value | string }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
        "{% endfor %}",
        ToolForm(opening="<tool_call>", closing="</tool_call>", kind="function"),
    ),
    "GLM-4.5": (
        "{{ '<think></think>' }}{{ m.content }}"
        + CALLS
        + "{{ '\\n<tool_call>' + f.name }}{% for name, value in f.arguments.items() %}"
        "{{ '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}"
        "{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}",
        ToolForm(opening="<tool_call>", closing="</tool_call>", kind="pairs"),
    ),
    "GLM-4.7": (
        "{{ m.content }}" + CALLS + "{{ '<tool_call>' + f.name }}{% for name, value in f.arguments.items() %}"
        "{{ '<arg_key>' + name + '</arg_key><arg_value>' }}{{ value if value is string else value | tojson }}"
        "{{ '</arg_value>' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}",
        ToolForm(opening="<tool_call>", closing="</tool_call>", kind="pairs"),
    ),
    "Llama 3": (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
        "{% else %}{{ m.content }}{% endif %}",
        None,
    ),
    "Mistral 2024": (
        "{{ m.content }}{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}"
        + CALLS
        + '{{ \'{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
        "{{ ', \"id\": \"' + call.id + '\"}' }}"
        "{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}{% endif %}",
        ToolForm(opening="[TOOL_CALLS]", closing=""),
    ),
    "Mistral 2025": (
        "{{ m.content }}" + CALLS + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}{% endfor %}",
        ToolForm(opening="[TOOL_CALLS]", closing="", kind="named"),
    ),
    "GLM-4": (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ f.name + '\\n' }}{{ f.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}",
        ToolForm(opening="", closing="", kind="name_line"),
    ),
}
ONE_CALL = ("Llama 3", "GLM-4")  # a call is the whole turn
ARGUMENTS = {"city": 'Paris\n17 "é"', "days": 3, "exact": True, "tags": ["a", "<b>"]}


def family_renderer(family: str) -> Renderer:
    return renderer_of(FAMILIES[family][0], before=TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_back_what_its_template_writes(family: str) -> None:
    renderer, form = family_renderer(family), FAMILIES[family][1]
    assert find_form(renderer) == form
    alone = family in ONE_CALL
    calls = tuple(
        ToolCall(name="get_weather", arguments=json.dumps(arguments), id=f"abcdefgh{index}")
        for index, arguments in enumerate([ARGUMENTS] if alone else [ARGUMENTS, {"city": "17"}, {}])
    )
    said = "" if alone else "Let me see."
    question = Message(role="user", content="how is it?")
    turn = Message(role="assistant", content=said, tool_calls=calls)
    (rendered,) = renderer.conversation([question, turn], tools=[WEATHER])
    text = renderer.spoken(rendered.tokens[rendered.trained])
    parsed = parse_reply(text, form, tool_schemas([WEATHER]))
    assert [call.name for call in parsed.calls] == ["get_weather"] * len(calls)
    assert [json.loads(call.arguments) for call in parsed.calls] == [json.loads(call.arguments) for call in calls]
    assert parsed.content.removeprefix("<think></think>") == said
    # the conversation goes on from the sampled tokens
    answer = Message(role="tool", content="sunny", tool_call_id="abcdefgh0")
    again = Message(
        role="assistant",
        content=parsed.content.removeprefix("<think></think>"),
        tool_calls=with_ids(parsed.calls, 0, 0),
    )
    extended = extended_prompt(renderer, rendered.tokens, [question], [again], [answer], [WEATHER])
    if family != "Mistral 2024":  # which writes ids, and these are new
        assert extended is not None
        assert extended[0][: len(rendered.tokens)].tolist() == rendered.tokens.tolist()


@pytest.mark.parametrize("family", [family for family, (_, form) in FAMILIES.items() if form is not None])
@pytest.mark.parametrize("damage", ["cut", "unknown tool", "trailing"])
def test_a_damaged_call_of_a_family_stays_text(family: str, damage: str) -> None:
    renderer, form = family_renderer(family), FAMILIES[family][1]
    assert form is not None
    turn = Message(
        role="assistant", content="", tool_calls=(ToolCall(name="get_weather", arguments='{"city": "b"}', id="a" * 9),)
    )
    (rendered,) = renderer.conversation([Message(role="user", content="a"), turn])
    text = renderer.spoken(rendered.tokens[rendered.trained]).removeprefix("<think></think>")
    schemas = tool_schemas([WEATHER])
    assert parse_reply(text, form, schemas).calls
    if damage == "cut":
        text = text.strip()[:-1] if form.closing else text.strip()[:-2]
    elif damage == "unknown tool":
        text = text.replace("get_weather", "fly")
    elif form.closing:
        text = text.replace(form.closing, f"and more{form.closing}")
    else:
        text = text.replace('"b"', '"b"; ')
    assert parse_reply(text, form, schemas) == ParsedReply(content=text)
    if form.opening:
        assert "get_weather" in str(call_problem(text, form, schemas))


def test_llamas_mark_and_several_calls() -> None:
    one = '{"name": "add", "parameters": {"a": 1}}'
    parsed = parse_reply(f"<|python_tag|>{one}; {one}", None, {"add"})
    assert parsed == ParsedReply(content="", calls=(ToolCall(name="add", arguments='{"a": 1}'),) * 2)
    for text in (f"<|python_tag|>{one};", f"<|python_tag|>{one} {one}", "<|python_tag|>add.call(a=1)"):
        assert parse_reply(text, None, {"add"}) == ParsedReply(content=text)


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"<think>\nso\n</think>\n\n<tool_call>{ADD}</tool_call>", "so", "<think>\nso\n</think>", 1),
        (f"so</think>{ADD}", "so", "so</think>", 1),  # the template has opened the block
        (f"[THINK]so[/THINK]ok <tool_call>{ADD}</tool_call>", "so", "[THINK]so[/THINK]ok", 1),
        (f"<think>maybe <tool_call>{ADD}</tool_call></think>no", f"maybe <tool_call>{ADD}</tool_call>", None, 0),
        (f"<think>cut off <tool_call>{ADD}</tool_call>", f"cut off <tool_call>{ADD}</tool_call>", None, 0),
        ("no thought", "", None, 0),
    ],
)
def test_what_is_thought_is_no_call(text: str, thought: str, content: str | None, calls: int) -> None:
    parsed = parse_reply(text, HERMES, {"add"})
    assert (parsed.reasoning, len(parsed.calls)) == (thought, calls)
    assert parsed.content == (text if content is None else content)
    if not calls:
        assert call_problem(text, HERMES, {"add"}) is None


HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
CHANNELS = ToolForm(opening="to=functions.", closing="", kind="channels")


def test_channels_read_back_what_their_template_writes() -> None:
    renderer = renderer_of(HARMONY, whole=True)
    assert find_form(renderer) == CHANNELS
    call = ToolCall(name="get_weather", arguments=json.dumps(ARGUMENTS), id="abcdefghi")
    question = Message(role="user", content="how is it?")
    turn = Message(role="assistant", content="look it up", tool_calls=(call,))
    (rendered,) = renderer.conversation([question, turn])
    text = renderer.spoken(rendered.tokens[rendered.trained])
    parsed = parse_reply(text, CHANNELS, tool_schemas([WEATHER]))
    assert (parsed.content, parsed.reasoning) == ("look it up", "look it up")
    assert [json.loads(call.arguments) for call in parsed.calls] == [ARGUMENTS]
    again = Message(role="assistant", content=parsed.content, tool_calls=with_ids(parsed.calls, 0, 0))
    answer = Message(role="tool", content="sunny", tool_call_id="abcdefghi")
    extended = extended_prompt(renderer, rendered.tokens, [question], [again], [answer], None)
    assert extended is not None
    assert extended[0][: len(rendered.tokens)].tolist() == rendered.tokens.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>4", ParsedReply(content="4")),
        (
            "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4",
            ParsedReply(content="4", reasoning="2 + 2"),
        ),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
            ParsedReply(content="", calls=(ToolCall(name="add", arguments='{"a": 1}'),)),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}',
            ParsedReply(content="I add.", reasoning="hm", calls=(ToolCall(name="add", arguments='{"a": 1}'),)),
        ),
        *(
            (text, ParsedReply(content=text))
            for text in (
                "4",
                "",
                "<|channel|>commentary to=functions.fly<|message|>{}",
                "<|channel|>commentary to=functions.add<|message|>[1]",
                "<|channel|>commentary to=functions.add",
                '<|channel|>commentary to=functions.add<|message|>{"a": 1',
            )
        ),
    ],
)
def test_channels_are_divided(text: str, expected: ParsedReply) -> None:
    assert parse_reply(text, CHANNELS, {"add"}) == expected


@given(
    st.dictionaries(st.text("abc_", min_size=1), st.text() | st.integers() | st.booleans() | st.lists(st.integers()))
)
def test_arguments_as_text_keep_their_values_under_their_schema(arguments: dict[str, object]) -> None:
    marks = ("</parameter>", "</arg_value>")
    arguments = {name: value for name, value in arguments.items() if not any(mark in str(value) for mark in marks)}
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array"}
    schema = {"properties": {name: {"type": kinds[type(value)]} for name, value in arguments.items()}}

    def written(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    function = "".join(f"<parameter={name}>\n{written(value)}\n</parameter>\n" for name, value in arguments.items())
    pairs = "".join(
        f"<arg_key>{name}</arg_key><arg_value>{written(value)}</arg_value>" for name, value in arguments.items()
    )
    for kind, text in (("function", f"<function=f>\n{function}</function>"), ("pairs", f"f\n{pairs}")):
        form = ToolForm(opening="<tool_call>", closing="</tool_call>", kind=kind)  # type: ignore[arg-type]
        [call] = parse_reply(f"<tool_call>{text}</tool_call>", form, {"f": schema}).calls
        assert json.loads(call.arguments) == arguments


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
