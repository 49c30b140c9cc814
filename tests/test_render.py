"""Masks and continuations against the chat template itself, on three templates and on those that rewrite history."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.errors import DataError, ModelError
from headrace.render import Renderer
from headrace.types import IntArray, Message, ToolCall, int_array

TEXT = [
    "the quick brown fox jumps over the lazy dog and asks what is two plus two",
    "user assistant system you are a helpful agent that answers in few words\n",
    "go north, take the key, open the door. Result: yes no 0 1 2 3 4 5 6 7 8 9",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end_header|>", "<|eot|>", "[INST]", "[/INST]"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end_header|>\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{{ '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end_header|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
THINKING = (  # keeps <think> only after the last user message
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPACED = (  # the prompt ends with a space, which byte-level BPE joins to the next word
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "mistral": "</s>"}


def make_tokenizer(template: str | None) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


TURNS = [user("what is two plus two"), assistant("four"), user("and the key?"), assistant("take the key\n\nopen it")]


@pytest.fixture(params=TEMPLATES)
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, make_tokenizer(TEMPLATES[request.param])


def test_the_mask_is_the_one_the_template_marks(named: tuple[str, Any]) -> None:
    _, tokenizer = named
    (rendered,) = Renderer(tokenizer).conversation(TURNS)
    marked = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in TURNS], return_dict=True, return_assistant_tokens_mask=True
    )
    length = len(rendered.tokens)
    assert rendered.tokens.tolist() == marked["input_ids"][:length]
    assert rendered.trained.astype(int).tolist() == marked["assistant_masks"][:length]
    assert sum(marked["assistant_masks"][length:]) == 0, "what was cut off the end is not the assistant's"
    assert rendered.trained[-1], "a sequence ends with its last trained token"


def test_the_mask_covers_content_and_end_of_turn_only(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    (rendered,) = Renderer(tokenizer).conversation(TURNS)
    spans = [
        tokenizer.decode([int(token) for _, token in pairs])
        for trained, pairs in itertools.groupby(zip(rendered.trained, rendered.tokens, strict=True), lambda p: p[0])
        if trained
    ]
    gap = " " if name == "mistral" else ""
    assert spans == [gap + turn.content + END_OF_TURN[name] for turn in (TURNS[1], TURNS[3])]


words = st.text(alphabet="the quick<>|\n\t é漢7", min_size=1, max_size=12).filter(lambda text: text.strip() == text)


@settings(max_examples=30, deadline=None)
@given(st.lists(words, min_size=2, max_size=8), st.sampled_from(sorted(TEMPLATES)))
def test_every_turn_is_what_follows_its_prompt(contents: list[str], name: str) -> None:
    renderer = RENDERERS[name]
    messages = [(assistant if i % 2 else user)(text) for i, text in enumerate(contents)]
    (rendered,) = renderer.conversation(messages)
    expected = np.zeros(len(rendered.tokens), dtype=bool)
    for i in range(1, len(messages), 2):
        start = len(renderer.prompt(messages[:i]))
        ends = np.flatnonzero(np.isin(rendered.tokens, renderer.eos_tokens))
        end = ends[ends >= start][0]
        expected[start : end + 1] = True
        assert rendered.tokens[:start].tolist() == renderer.prompt(messages[:i]).tolist()
        assert renderer.decode(rendered.tokens[start : end + 1]).strip() == messages[i].content
    assert rendered.trained.tolist() == expected.tolist()


RENDERERS = {name: Renderer(make_tokenizer(template)) for name, template in TEMPLATES.items()}


def test_end_of_turn_is_found_in_the_template(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("</s>", END_OF_TURN[name])]
    assert Renderer(tokenizer).eos_tokens == tuple(dict.fromkeys(ends))
    assert Renderer(tokenizer, eos_tokens=(7,)).eos_tokens == (7, *dict.fromkeys(ends))


def test_of_several_end_tokens_in_a_row_only_the_first_can_be_sampled() -> None:
    tokenizer = make_tokenizer(CHATML.replace("'<|im_end|>' }}{% endgen", "'<|im_end|></s>' }}{% endgen"))
    renderer = Renderer(tokenizer)
    (rendered,) = renderer.conversation(TURNS)
    assert tokenizer.decode(rendered.tokens[rendered.trained]) == "four<|im_end|>take the key\n\nopen it<|im_end|>"
    (first,) = renderer.conversation(TURNS[:2])
    following = renderer.continue_prompt(first.tokens, TURNS[:2], TURNS[2:3])
    assert following is not None
    assert following.tolist() == renderer.prompt(TURNS[:3]).tolist()


def test_a_template_that_strips_thinking_gives_one_sequence_per_user_message() -> None:
    renderer = Renderer(make_tokenizer(THINKING))
    turns = [user("two"), assistant("<think>plus</think>four"), user("key"), assistant("<think>door</think>take")]
    first, second = renderer.conversation(turns)
    assert "plus" in renderer.decode(first.tokens)
    assert "plus" not in renderer.decode(second.tokens), "the second turn was prompted without the first's thoughts"
    assert first.tokens.tolist()[: len(renderer.prompt(turns[:1]))] == renderer.prompt(turns[:1]).tolist()
    assert renderer.decode(first.tokens[first.trained]) == turns[1].content
    assert renderer.decode(second.tokens[second.trained]) == turns[3].content
    assert second.tokens[~second.trained].tolist() == renderer.prompt(turns[:3]).tolist()


def test_turns_between_user_messages_stay_in_one_sequence_when_thinking_is_kept_there() -> None:
    renderer = Renderer(make_tokenizer(THINKING))
    tool = Message(role="tool", content="7")
    turns = [user("two"), assistant("<think>a</think>call"), tool, assistant("<think>b</think>seven")]
    (only,) = renderer.conversation(turns)
    assert renderer.decode(only.tokens[only.trained]) == turns[1].content + turns[3].content


def test_a_token_across_the_border_is_split_as_sampling_would() -> None:
    tokenizer = make_tokenizer(SPACED)
    renderer = Renderer(tokenizer)
    turns = [user("go"), assistant("the key"), user("go"), assistant("the door")]
    samples = renderer.conversation(turns)
    assert len(samples) == 2
    for sample, i in zip(samples, (1, 3), strict=True):
        prompt = renderer.prompt(turns[:i]).tolist()
        assert sample.tokens.tolist()[: len(prompt)] == prompt
        assert sample.trained.tolist() == [False] * len(prompt) + [True] * (len(sample.tokens) - len(prompt))
        assert tokenizer.decode(sample.tokens[sample.trained]) == turns[i].content + "</s>"


def test_a_template_whose_turns_do_not_start_like_its_generation_prompt_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}GO{% endif %}"
    with pytest.raises(ModelError, match="generation prompt"):
        Renderer(make_tokenizer(template)).conversation(TURNS)


def test_truncation_is_reported(named: tuple[str, Any]) -> None:
    renderer = Renderer(named[1])
    (whole,) = renderer.conversation(TURNS)
    (same,) = renderer.conversation(TURNS, max_tokens=len(whole.tokens))
    (cut,) = renderer.conversation(TURNS, max_tokens=len(whole.tokens) - 1)
    (nothing,) = renderer.conversation(TURNS, max_tokens=2)
    assert (whole.truncated, same.truncated, cut.truncated, nothing.truncated) == (False, False, True, True)
    assert cut.tokens.tolist() == whole.tokens.tolist()[:-1]
    assert cut.num_trained == whole.num_trained - 1
    assert nothing.num_trained == 0


def test_what_the_template_refuses_is_a_data_error() -> None:
    renderer = RENDERERS["mistral"]
    with pytest.raises(DataError, match=r"\(system, user\).*only user and assistant"):
        renderer.prompt([Message(role="system", content="x"), user("y")])
    with pytest.raises(DataError, match="start with the assistant"):
        renderer.conversation([assistant("y")])


# --- continuing an episode -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(words, min_size=5, max_size=5), st.sampled_from(sorted(TEMPLATES)))
def test_an_episode_of_canonical_tokens_reads_as_the_template_renders_it(contents: list[str], name: str) -> None:
    renderer = RENDERERS[name]
    messages = [(assistant if i % 2 else user)(text) for i, text in enumerate(contents)]
    whole = renderer.conversation(messages[:4])[0]
    tokens = renderer.prompt(messages[:1])
    for i in (1, 3):
        start = len(tokens)
        end = start + int(np.flatnonzero(~whole.trained[start:])[0]) if i == 1 else len(whole.tokens)
        closed = int_array(whole.tokens[:end])
        cut = int_array(whole.tokens[: end - 1])
        assert whole.tokens[end - 1] in renderer.eos_tokens
        following = renderer.continue_prompt(closed, messages[: i + 1], messages[i + 1 : i + 2])
        assert following is not None
        assert following.tolist() == renderer.prompt(messages[: i + 2]).tolist()
        by_length = renderer.continue_prompt(cut, messages[: i + 1], messages[i + 1 : i + 2])
        assert by_length is not None
        assert by_length.tolist() == following.tolist(), "a turn cut by length is closed before the next one"
        tokens = following


def test_sampled_tokens_are_kept_even_if_text_would_be_tokenized_otherwise(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(TURNS[:1]).tolist()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer("the", add_special_tokens=False)["input_ids"] != letters
    so_far = int_array([*prompt, *letters, tokenizer.convert_tokens_to_ids(END_OF_TURN[name])])
    following = renderer.continue_prompt(so_far, [TURNS[0], assistant("the")], [user("go")])
    assert following is not None
    assert following[: len(so_far)].tolist() == so_far.tolist()
    canonical = renderer.prompt([TURNS[0], assistant("the"), user("go")])
    rest = following[len(so_far) :].tolist()
    assert canonical.tolist()[-len(rest) :] == rest


def test_no_continuation_where_the_template_strips_thinking() -> None:
    renderer = Renderer(make_tokenizer(THINKING))
    thought = [user("two"), assistant("<think>plus</think>four")]
    plain = [user("two"), assistant("four")]
    for messages, extends in ((thought, False), (plain, True)):
        (sample,) = renderer.conversation(messages)
        following = renderer.continue_prompt(sample.tokens, messages, [user("key")])
        assert (following is not None) == extends
    (sample,) = renderer.conversation(thought)
    following = renderer.continue_prompt(sample.tokens, thought, [Message(role="tool", content="7")])
    assert following is not None
    assert following.tolist() == renderer.prompt([*thought, Message(role="tool", content="7")]).tolist()


def test_no_continuation_where_every_rendering_strips_thinking() -> None:
    strips = CHATML.replace(
        "m.content + '<|im_end|>' }}{% endgen", "m.content.split('</think>')[-1] + '<|im_end|>' }}{% endgen"
    )
    assert strips != CHATML
    tokenizer = make_tokenizer(strips)
    renderer = Renderer(tokenizer)
    sampled = tokenizer("<think>plus</think>four<|im_end|>", add_special_tokens=False)["input_ids"]
    so_far = int_array([*renderer.prompt([user("two")]).tolist(), *sampled])
    assert renderer.continue_prompt(so_far, [user("two"), assistant("<think>plus</think>four")], [user("key")]) is None


def test_no_continuation_after_another_end_token_than_the_templates() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = Renderer(tokenizer)
    so_far = int_array(
        [*renderer.prompt([user("two")]).tolist(), *tokenizer("four</s>", add_special_tokens=False)["input_ids"]]
    )
    assert renderer.continue_prompt(so_far, [user("two"), assistant("four")], [user("key")]) is None


def test_trimmed_white_space_does_not_break_an_episode() -> None:
    tokenizer = make_tokenizer(LLAMA3)
    renderer = Renderer(tokenizer)
    sampled = tokenizer("four \n<|eot|>", add_special_tokens=False)["input_ids"]
    so_far = int_array([*renderer.prompt([user("two")]).tolist(), *sampled])
    following = renderer.continue_prompt(so_far, [user("two"), assistant("four \n")], [user("key")])
    assert following is not None
    assert tokenizer.decode(following).endswith(
        "four \n<|eot|><|start|>user<|end_header|>\n\nkey<|eot|><|start|>assistant<|end_header|>\n\n"
    )


# --- other tokenizers ------------------------------------------------------------------------------------------------


def test_without_a_chat_template_contents_stand_on_lines_of_their_own() -> None:
    tokenizer = make_tokenizer(None)
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(renderer.prompt(TURNS[:1])) == "what is two plus two\n"
    (rendered,) = renderer.conversation(TURNS)
    assert tokenizer.decode(rendered.tokens) == (
        "what is two plus two\nfour</s>\nand the key?\ntake the key\n\nopen it</s>"
    )
    assert tokenizer.decode(rendered.tokens[rendered.trained]) == "four</s>take the key\n\nopen it</s>"
    assert tokenizer.chat_template is None, "the caller's tokenizer is left as it was"


def test_neither_template_nor_end_of_sequence_is_an_error() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="chat template"):
        Renderer(tokenizer)


def test_word_level_tokenizer_with_unknown_words() -> None:
    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant"])
    }
    words_only = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        unk_token="<unk>",
        eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = CHATML
    renderer = Renderer(tokenizer)
    assert renderer.eos_tokens == (1, 3)
    (rendered,) = renderer.conversation([user("hm"), assistant("user hm")])
    assert rendered.tokens.tolist() == [2, 4, 0, 3, 2, 5, 4, 0, 3]
    assert rendered.trained.tolist() == [False] * 6 + [True] * 3


def test_tool_calls_reach_the_template_as_objects() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}</s>{% endfor %}"
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    call = ToolCall(name="add", arguments='{"a":1}')
    broken = ToolCall(name="add", arguments="{a")
    turns = [user("go"), Message(role="assistant", content="", tool_calls=(call, broken))]
    tokens = Renderer(tokenizer).prompt(turns, tools=[{"name": "add"}])
    assert tokenizer.decode(tokens) == 'go</s>add{"a": 1}add"{a"</s>add'


def test_decode_drops_special_tokens(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    tokens = tokenizer("<s>the key\n[INST] é" + END_OF_TURN[name], add_special_tokens=False)["input_ids"]
    assert Renderer(tokenizer).decode(int_array(tokens)) == "the key\n é"


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with a way of its own."""

    def _decode(self, *given: Any, **options: Any) -> str:
        return super()._decode(*given, **options).upper()


class Broken(Shouting):
    def _decode(self, *given: Any, **options: Any) -> str:
        raise ValueError("no such token")


def own_way(kind: type[PreTrainedTokenizerFast], tokenizer: Any) -> Any:
    return kind(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")


class Counting(Renderer):
    def decode_all(self, sequences: Sequence[IntArray]) -> list[str]:
        self.calls = [*getattr(self, "calls", []), len(sequences)]
        return super().decode_all(sequences)


async def test_many_texts_are_decoded_in_one_call_and_as_one_by_one(named: tuple[str, Any]) -> None:
    _, tokenizer = named
    rng = np.random.default_rng(0)
    sequences = [int_array(rng.integers(0, len(tokenizer), size)) for size in (0, 1, 5, 60)]
    for kind, plain in ((tokenizer, True), (own_way(Shouting, tokenizer), False)):
        renderer = Counting(kind)
        assert renderer._decodes_plainly == plain
        expected = [renderer.decode(tokens) for tokens in sequences]
        assert await asyncio.gather(*map(renderer.decode_soon, sequences)) == expected
        assert renderer.calls == [4]
        left = asyncio.ensure_future(renderer.decode_soon(sequences[3]))
        await asyncio.sleep(0)
        left.cancel()
        assert await renderer.decode_soon(sequences[2]) == expected[2]  # who left holds nobody up
        assert await renderer.decode_soon(sequences[3]) == expected[3]


async def test_what_cannot_be_decoded_is_an_error_for_everyone_who_waits_and_the_next_goes_on() -> None:
    tokenizer = own_way(Broken, make_tokenizer(CHATML))
    renderer = Renderer(make_tokenizer(CHATML))
    renderer._tokenizer, renderer._decodes_plainly = tokenizer, False
    for _ in range(2):
        failed = await asyncio.gather(*(renderer.decode_soon(int_array([5])) for _ in range(2)), return_exceptions=True)
        assert [str(each) for each in failed] == [
            "the tokenizer cannot decode these tokens: ValueError: no such token"
        ] * 2
