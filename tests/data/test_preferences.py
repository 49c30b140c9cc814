"""Rows with prompt, chosen and rejected become pairs of whole conversations, or one sentence says what is wrong."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.data.preferences import (
    PreferencePair,
    labelled_from_rows,
    load_pairs,
    num_shared,
    pairs_from_rows,
    unpaired,
)
from headrace.data.rows import DataSource
from headrace.envs import environment_pairs
from headrace.errors import ConfigError, DataError
from headrace.types import Message

USER = Message(role="user", content="2 + 2 =")


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_texts_are_answers_to_the_prompt() -> None:
    (pair,) = pairs_from_rows([{"prompt": "2 + 2 =", "chosen": "4", "rejected": "5", "margin": 0.5}])
    assert pair == PreferencePair(chosen=(USER, said("4")), rejected=(USER, said("5")), margin=0.5)


def test_whole_conversations_need_no_prompt_and_get_the_system_message() -> None:
    turns = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]
    row = {"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "22"}]}
    (pair,) = pairs_from_rows([row], system="be right")
    assert pair.chosen == (Message(role="system", content="be right"), USER, said("4"))
    assert pair.rejected[-1] == said("22")
    assert pair.margin == 0.0


def test_a_file_with_other_column_names(tmp_path: Path) -> None:
    rows = [{"q": "2 + 2 =", "good": str(n), "bad": "x"} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    pairs = load_pairs(DataSource(type="jsonl", path="pairs.jsonl", columns=columns), base=tmp_path)
    assert [pair.chosen[-1].content for pair in pairs] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 0: there is no column rejected; the columns are prompt, chosen"),
        ({"prompt": "a", "completion": "b", "label": True}, r'rows with a label are for \[dpo\] with loss = "kto"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "must end with the assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "the margin must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "a prompt must be a text or a list of messages"),
    ],
)
def test_what_is_not_a_pair_is_said(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        pairs_from_rows([row])


def test_unknown_columns_and_no_rows() -> None:
    with pytest.raises(ConfigError, match="columns maps answer"):
        pairs_from_rows([{}], columns={"answer": "x"})
    with pytest.raises(DataError, match="no rows"):
        pairs_from_rows([])


def test_a_world_makes_pairs_of_a_careful_and_a_careless_player() -> None:
    pairs = environment_pairs("add", 60, 1, {"max_number": 49})
    assert 40 < len(pairs) < 60, "a random digit is right one time in ten, and such pairs are left out"
    for chosen, rejected in pairs:
        left, right = chosen[0].content.removesuffix("=").split("+")
        total = int(left.replace(" ", "")) + int(right.replace(" ", ""))
        assert chosen[0] == rejected[0]
        assert chosen[-1].content.replace(" ", "") == str(total)
        assert rejected[-1].content.replace(" ", "") != str(total)


def test_a_world_whose_players_do_the_same_has_no_pairs() -> None:
    with pytest.raises(ConfigError, match="set rejected_mistake_rate above mistake_rate"):
        environment_pairs("add", 5, 1, {"rejected_mistake_rate": 0.0})


def test_a_side_that_repeats_the_prompt_is_not_asked_twice() -> None:
    # as in ultrafeedback_binarized: the prompt is a text, and both sides are whole conversations
    sides = {
        name: [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "4"), ("rejected", "5"))
    }
    (pair,) = pairs_from_rows([{"prompt": "2 + 2 =", **sides}])
    assert pair.chosen == (USER, said("4"))
    (pair,) = pairs_from_rows([{"prompt": "2 + 2 =", **sides}], system="be right")
    assert [message.role for message in pair.chosen] == ["system", "user", "assistant"]


def test_the_input_and_the_system_message_beside_a_prompt_are_read(caplog: pytest.LogCaptureFixture) -> None:
    row = {"system": "Be short.", "instruction": "Add.", "input": "2 and 2", "chosen": "4", "rejected": "5"}
    [pair] = pairs_from_rows([{**row, "score_chosen": 9.0, "score_rejected": 1.0}])
    assert [message.content for message in pair.chosen] == ["Be short.", "Add.\n\n2 and 2", "4"]
    assert [message.role for message in pair.rejected] == ["system", "user", "assistant"]
    assert caplog.records == []


def test_labelled_replies_of_texts_and_messages() -> None:
    rows = [
        {"prompt": "2 + 2 =", "completion": "4", "label": True},
        {
            "prompt": [{"role": "user", "content": "2 + 2 ="}],
            "completion": [{"role": "assistant", "content": "5"}],
            "label": 0,
        },
    ]
    good, bad = labelled_from_rows(rows)
    assert (good.prompt, good.reply, good.label) == ((USER,), (said("4"),), True)
    assert (bad.prompt, bad.reply, bad.label) == ((USER,), (said("5"),), False)


def test_the_log_says_what_of_labelled_replies_was_read_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    row = {"question": "2 + 2 =", "completion": "4", "label": True, "hint": "count", "id": 7}
    with caplog.at_level(logging.INFO):
        [reply] = labelled_from_rows([row])
    assert reply.prompt == (USER,)
    read, dropped = (record.getMessage() for record in caplog.records)
    assert read == (
        "1 row of the iterable read as labelled replies: columns question, completion, label; not used: hint, id"
    )
    assert dropped.startswith("the iterable: nothing is learned from what is in hint, which is not used")


def test_pairs_become_good_replies_and_then_bad_ones() -> None:
    rows = [{"prompt": p, "chosen": "4", "rejected": "5"} for p in ("2 + 2 =", "1 + 3 =")]
    replies = labelled_from_rows(rows)
    assert [(reply.prompt[0].content, reply.reply[0].content, reply.label) for reply in replies] == [
        ("2 + 2 =", "4", True), ("1 + 3 =", "4", True), ("2 + 2 =", "5", False), ("1 + 3 =", "5", False),
    ]  # fmt: skip
    assert replies == unpaired(pairs_from_rows(rows))


def test_the_shared_beginning_of_a_pair_leaves_a_turn_to_each_side() -> None:
    more = (USER, said("4"), Message(role="user", content="sure?"))
    assert num_shared(PreferencePair(chosen=(*more, said("yes")), rejected=(*more, said("no")))) == 3
    assert num_shared(PreferencePair(chosen=(*more, said("yes")), rejected=(USER, said("4")))) == 1


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "completion": "b"}, "there is no column label; the columns are prompt, completion"),
        ({"completion": "b", "label": True}, "there is no column prompt"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "the label must be true or false, this is 'yes'"),
        ({"prompt": "a", "label": True}, "there is no column completion"),
    ],
)
def test_what_is_not_a_labelled_reply_is_said(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        labelled_from_rows([row])
