"""Conversations to imitate, and mixtures whose proportions hold exactly."""

import json
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.conversations import (
    ConversationMixture,
    ToolConversation,
    conversations_from_rows,
    load_conversations,
    prompt_of,
)
from headrace.data.rows import DataSource
from headrace.data.shuffle import fingerprint
from headrace.errors import CheckpointError, DataError
from headrace.types import Message


def test_messages_or_prompt_and_answer(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "going"}]
    rows = [{"messages": turns, "answer": "ignored"}, {"prompt": "go", "answer": "gone"}, {"prompt": turns}]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = DataSource(type="jsonl", path="talk.jsonl", system="act")
    system = Message(role="system", content="act")
    going = (system, Message(role="user", content="go"), Message(role="assistant", content="going"))
    gone = (system, Message(role="user", content="go"), Message(role="assistant", content="gone"))
    assert load_conversations(source, base=tmp_path) == [going, gone, going]


def test_rows_without_a_reply_are_named() -> None:
    with pytest.raises(DataError, match="row 1: there is no assistant message"):
        conversations_from_rows([{"prompt": "go", "answer": "a"}, {"prompt": "go"}])
    with pytest.raises(DataError, match="row 0: the conversation starts with the assistant"):
        conversations_from_rows([{"messages": [{"role": "assistant", "content": "hi"}]}])
    with pytest.raises(DataError, match="the reply in solution must be a text"):
        conversations_from_rows([{"prompt": "go", "solution": 4}], columns={"answer": "solution"})
    with pytest.raises(DataError, match="no rows"):
        conversations_from_rows([])


def test_reasoning_gym_answers_are_replies() -> None:
    pytest.importorskip("reasoning_gym")
    (talk,) = load_conversations(DataSource(type="reasoning_gym", name="chain_sum", size=1))
    assert [message.role for message in talk] == ["user", "assistant"]
    assert int(talk[1].content) == eval(talk[0].content.rstrip("= ").split(":")[-1])


weights = st.lists(st.sampled_from([0.1, 0.25, 1 / 3, 1.0, 2.0, 7.5]), min_size=1, max_size=5)


@given(weights, st.integers(0, 300), st.integers(0, 9))
def test_proportions_hold_at_every_moment(shares: list[float], draws: int, seed: int) -> None:
    mixture = ConversationMixture([([part], share) for part, share in enumerate(shares)], seed)
    drawn = Counter(mixture.next_batch(draws))
    total = sum(Fraction(str(share)) for share in shares)
    for part, share in enumerate(shares):
        deficit = Fraction(str(share)) / total * draws - drawn[part]
        assert -1 < deficit < max(1, len(shares) - 1)


def test_weights_are_met_exactly_after_a_whole_round() -> None:
    # shares 0.1 : 0.2 : 0.7 come out even after 10 draws, hence after 10,000
    mixture = ConversationMixture([("a", 0.1), ("b", 0.2), ("c", 0.7)], seed=0)
    for _ in range(1000):
        mixture.next_batch(10)
    assert mixture.counts == (1000, 2000, 7000)
    # by hand, shares 1 : 2: deficits (1/3, 2/3) -> b; (2/3, 1/3) -> a; (0, 1) -> b
    assert "".join(ConversationMixture([("a", 1.0), ("b", 2.0)], seed=0).next_batch(6)) == "babbab"


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_each_part_is_a_permutation_per_epoch_of_its_own(left: int, right: int, seed: int) -> None:
    parts = ([("left", i) for i in range(left)], [("right", i) for i in range(right)])
    drawn = ConversationMixture([(parts[0], 1.0), (parts[1], 3.0)], seed).next_batch(120)
    for part in parts:
        own = [item for item in drawn if item[0] == part[0][0]]
        for start in range(0, len(own) - len(part) + 1, len(part)):
            assert sorted(own[start : start + len(part)]) == part


@given(weights, st.integers(0, 60), st.integers(0, 40), st.integers(0, 9))
def test_resuming_from_any_cursor_gives_the_same_sequence(
    shares: list[float], before: int, after: int, seed: int
) -> None:
    parts = [([(part, i) for i in range(part + 3)], share) for part, share in enumerate(shares)]
    whole = ConversationMixture(parts, seed).next_batch(before + after)
    first, second = ConversationMixture(parts, seed), ConversationMixture(parts, seed)
    first.next_batch(before)
    second.next_batch(7)  # whatever it did before, the cursor decides
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next_batch(after) == whole[before:]


def test_seeds_give_other_orders() -> None:
    orders = {tuple(ConversationMixture([(range(20), 1.0)], seed).next_batch(20)) for seed in range(5)}
    assert len(orders) == 5
    drawn = ConversationMixture([(range(20), 1.0), (range(20), 1.0)], 0).next_batch(40)
    assert drawn[0::2] != drawn[1::2], "parts are not shuffled alike"
    epochs = ConversationMixture([(range(20), 1.0)], 0)
    assert epochs.next_batch(20) != epochs.next_batch(20)


def test_a_cursor_of_another_mixture_is_refused() -> None:
    state = ConversationMixture([("ab", 1.0), ("cd", 2.0)], seed=1).state_dict()
    for parts in ([("ab", 1.0), ("ce", 2.0)], [("ab", 1.0), ("cd", 3.0)], [("abcd", 3.0)]):
        with pytest.raises(CheckpointError, match="not those of the checkpoint"):
            ConversationMixture(parts, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed 1, not 2"):
        ConversationMixture([("ab", 1.0), ("cd", 2.0)], seed=2).load_state_dict(state)


def test_impossible_mixtures_are_refused() -> None:
    for parts, message in (([], "at least one part"), ([("", 1.0)], "none may be empty"), ([("a", 0.0)], "positive")):
        with pytest.raises(DataError, match=message):
            ConversationMixture(parts, seed=0)


def test_tools_of_a_row_come_with_its_conversation_and_malformed_ones_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    row = {"prompt": "1 + 2", "answer": "3", "tools": [tool]}
    [talk] = conversations_from_rows([row], system="be brief")
    assert isinstance(talk, ToolConversation)
    assert [message.role for message in talk.messages] == ["system", "user", "assistant"]
    assert talk.tools == (tool,)
    assert prompt_of(talk) == talk.messages[:2]
    assert not isinstance(conversations_from_rows([{**row, "tools": []}])[0], ToolConversation)
    for wrong in ("add", [{"name": "add"}], [3]):
        with pytest.raises(DataError, match="row 0: tools must be a list of"):
            conversations_from_rows([{**row, "tools": wrong}])


def test_a_message_may_have_a_weight() -> None:
    turns = [
        {"role": "user", "content": "hi", "weight": 0},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "yes", "weight": 0.5},
    ]
    [talk] = conversations_from_rows([{"messages": turns}], system="be kind")
    assert isinstance(talk, ToolConversation)
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.weights == (1.0, 0.0, 0.0, 1.0, 0.5)
    split = {"prompt": turns[:1], "completion": [{**turns[1], "weight": 1}, *turns[2:]]}
    [talk] = conversations_from_rows([split])
    assert isinstance(talk, ToolConversation)
    assert talk.weights == (0.0, 1.0, 1.0, 0.5)
    [plain] = conversations_from_rows([{"messages": [{"role": "user", "content": "a"}, turns[1] | {"weight": None}]}])
    assert isinstance(plain, tuple)


@pytest.mark.parametrize(
    ("role", "weight", "sentence"),
    [
        ("assistant", -1, r"row 0: the weight of message 1 \(assistant\) must be a number of 0 or more, this is -1"),
        ("assistant", "1", "must be a number of 0 or more, this is '1'"),
        ("assistant", True, "must be a number of 0 or more, this is True"),
        ("assistant", float("nan"), "must be a number of 0 or more, this is nan"),
        ("assistant", 0, "every assistant message has weight 0: nothing to learn from"),
        ("user", 1, r"the weight of message 0 \(user\) is 1, but only the assistant's are trained: write 0"),
    ],
)
def test_a_wrong_weight_is_told_with_its_row(role: str, weight: object, sentence: str) -> None:
    turns: list[dict[str, object]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns[role == "assistant"]["weight"] = weight
    with pytest.raises(DataError, match=sentence):
        conversations_from_rows([{"messages": turns}])


def test_fingerprints_of_conversations_without_weights_are_those_of_earlier_checkpoints() -> None:
    @dataclass(frozen=True, kw_only=True)
    class ToolTalk:  # as it was
        messages: tuple[Message, ...]
        tools: tuple[dict[str, object], ...]

    messages, tools = (Message(role="user", content="a"), Message(role="assistant", content="b")), ({"type": "x"},)
    before = fingerprint([ToolTalk(messages=messages, tools=tools)])
    assert fingerprint([ToolConversation(messages=messages, tools=tools)]) == before
    assert fingerprint([ToolConversation(messages=messages, tools=tools, weights=(0.0, 1.0))]) != before
