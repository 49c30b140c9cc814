"""The chat template of a run: the tokenizer's, the configured one, or the plain one, which is told and saved."""

import logging
from pathlib import Path

import pytest

from headrace.config import LoraConfig, ModelConfig
from headrace.data.conversations import conversations_from_rows
from headrace.model.tiny import make_tokenizer
from headrace.render import Renderer
from headrace.types import Message
from headrace.wiring.build.chat_template import set_template, unread_options
from headrace.wiring.build.data import warn_of_cuts

WORDS = ("one", "two", "thinking")
ASK = (Message(role="user", content="one"),)


def test_a_tokenizer_without_a_template_gets_the_plain_one_and_says_so(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(WORDS)
    assert set_template(tokenizer, ModelConfig()) is None
    tokenizer.chat_template = None
    before = Renderer(tokenizer).prompt(ASK).tolist()
    sentence = set_template(tokenizer, ModelConfig())
    assert sentence is not None
    assert "there is no chat template, so every message is put on a line of its own" in sentence
    assert Renderer(tokenizer).prompt(ASK).tolist() == before
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file()


def test_a_configured_template_is_a_file_or_a_text_and_takes_options(tmp_path: Path) -> None:
    text = "{% if enable_thinking %}thinking {% endif %}{{ messages[0]['content'] }}"
    (tmp_path / "chat.jinja").write_text(text)
    for written in (text, str(tmp_path / "chat.jinja")):
        tokenizer = make_tokenizer(WORDS)
        assert set_template(tokenizer, ModelConfig(chat_template=written)) is None
        plain = Renderer(tokenizer, options={"enable_thinking": False})
        thinking = Renderer(tokenizer, options={"enable_thinking": True})
        assert plain.decode(plain.prompt(ASK)).split() == ["one"]
        assert thinking.decode(thinking.prompt(ASK)).split() == ["thinking", "one"]


def test_options_that_no_template_reads_are_named() -> None:
    tokenizer = make_tokenizer(WORDS)
    options = {"enable_thinking": False, "thinking_budget": 3}
    assert unread_options(tokenizer, ModelConfig(template_options=options)) == ["enable_thinking", "thinking_budget"]
    tokenizer.chat_template = "{% if enable_thinking %}thinking{% endif %}{{ messages[0]['content'] }}"
    assert unread_options(tokenizer, ModelConfig(template_options=options)) == ["thinking_budget"]


def test_conversations_that_are_cut_are_counted_before_training(caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer(make_tokenizer(WORDS))
    rows = [{"prompt": "one", "answer": answer} for answer in ("two", "two two two two")]
    talks = conversations_from_rows(rows)
    lengths = [len(renderer.conversation(talk)[0].tokens) for talk in talks]  # type: ignore[arg-type]
    caplog.clear()  # of the line about the rows
    with caplog.at_level(logging.WARNING):
        warn_of_cuts(talks, renderer, max_tokens=lengths[1])
        assert not caplog.records
        warn_of_cuts(talks, renderer, max_tokens=lengths[0])
    [record] = caplog.records
    assert record.getMessage() == (
        f"1 of 2 conversations are longer than sft.max_tokens = {lengths[0]} and are cut at the end; "
        f"the longest has {lengths[1]} tokens"
    )


def test_lora_may_scale_by_the_root_of_the_rank_and_adapt_all_linear_layers() -> None:
    lora = LoraConfig(rank=16, alpha=8.0, rslora=True, targets="all-linear")
    assert lora.scaled_alpha / lora.rank == pytest.approx(8.0 / 16**0.5)
    assert lora.layers == LoraConfig().layers
    assert LoraConfig(rank=16, alpha=8.0).scaled_alpha == 8.0
