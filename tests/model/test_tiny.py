"""The model and tokenizer made on the spot."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headrace.errors import ConfigError
from headrace.model.tiny import END_ID, make_model, make_tokenizer, save_tiny
from headrace.render import Renderer
from headrace.types import Message, int_array

WORDS = ("red", "green", "blue", "go", "on")
SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context": 32}


def test_a_turn_is_its_role_its_words_and_an_end() -> None:
    tokenizer = make_tokenizer(WORDS)
    talk = [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "go"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert text == "<|begin|><|user|>red blue<|end|><|assistant|>go<|end|>"
    # <|pad|> <|begin|> <|end|> <|unknown|> <|system|> <|user|> <|assistant|> <|tool|> are 0 to 7, the words follow
    assert tokenizer(text)["input_ids"] == [1, 5, 8, 10, 2, 6, 11, 2]
    assert tokenizer("red sky")["input_ids"] == [8, 3]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (END_ID, 0, 1)


def test_the_template_marks_the_assistants_tokens() -> None:
    tokenizer = make_tokenizer(WORDS)
    talk = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "go on"}]
    out = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert out["input_ids"] == [1, 5, 8, 2, 6, 11, 12, 2]
    assert out["assistant_masks"] == [0, 0, 0, 0, 0, 1, 1, 1]


@settings(max_examples=30, deadline=None)
@given(lists(lists(sampled_from(WORDS), min_size=1, max_size=3).map(" ".join), min_size=2, max_size=7))
def test_a_conversation_extends_token_for_token(contents: list[str]) -> None:
    renderer = Renderer(make_tokenizer(WORDS))
    messages = [
        Message(role="assistant" if turn % 2 else "user", content=content) for turn, content in enumerate(contents)
    ]
    told = messages[: len(messages) - len(messages) % 2]  # ends with the assistant
    [sequence] = renderer.conversation(told)
    assert renderer.continue_prompt(sequence.tokens, told, messages[len(told) :]) is not None
    assert renderer.decode(sequence.tokens) == " ".join(message.content for message in told)
    seen = renderer.prompt(messages[:1]).tolist()
    for turn in range(1, len(messages), 2):
        seen += [*make_tokenizer(WORDS)(messages[turn].content)["input_ids"], END_ID]
        following = messages[turn + 1 : turn + 2]
        if not following:
            break
        extended = renderer.continue_prompt(int_array(seen), messages[: turn + 1], following)
        assert extended is not None
        assert extended.tolist() == renderer.prompt(messages[: turn + 2]).tolist()
        seen = extended.tolist()


@settings(max_examples=5, deadline=None)
@given(integers(0, 2**62))
def test_weights_follow_from_the_seed_and_the_callers_random_state_is_left_alone(seed: int) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = make_model(vocab_size=20, seed=seed, **SHAPE)
    assert torch.equal(torch.rand(3), expected)
    second = make_model(vocab_size=20, seed=seed, **SHAPE)
    other = make_model(vocab_size=20, seed=seed + 1, **SHAPE)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_model_is_a_small_tied_float32_llama_that_stops_at_the_end_token() -> None:
    model = make_model(vocab_size=20, seed=0, **SHAPE)
    # embedding 20 * 16; a layer: q 16 * 16, k and v 16 * 8 each, o 16 * 16, MLP 3 * 16 * 64, 2 norms; the last norm
    assert sum(parameter.numel() for parameter in model.parameters()) == 320 + 256 + 256 + 256 + 3072 + 32 + 16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == END_ID
    assert not model.training
    assert model.lm_head.weight.std().item() == pytest.approx(16**-0.5, rel=0.15)


def test_a_saved_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", words=WORDS, seed=3, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    made = make_model(vocab_size=len(make_tokenizer(WORDS)), seed=3, **SHAPE)
    for name, value in made.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    talk = [{"role": "user", "content": "red blue"}]
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"] == [1, 5, 8, 10, 2, 6]
    assert GenerationConfig.from_pretrained(tmp_path / "tiny").eos_token_id == END_ID


@pytest.mark.parametrize("words", [("red", "red"), ("",), ("two words",), ("<|end|>",)])
def test_a_word_that_cannot_be_a_token_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be in the vocabulary"):
        make_tokenizer(words)


def test_a_shape_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        make_model(vocab_size=20, width=16, layers=1, heads=3, kv_heads=1, context=8, seed=0)
