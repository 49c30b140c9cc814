"""Conversations, tasks and pairs are read in the formats in which they are published, and the log says how."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.data.conversations import ToolConversation, conversations_from_rows, load_conversations, messages_of
from headrace.data.preferences import pairs_from_rows
from headrace.data.rows import DataSource
from headrace.data.task_rows import load_tasks, tasks_from_rows
from headrace.errors import DataError

ASK, REPLY = "What is 2 + 2?", "4"
USER, ASSISTANT = {"role": "user", "content": ASK}, {"role": "assistant", "content": REPLY}


def said(rows: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    [conversation] = conversations_from_rows(rows, **options)
    return [(message.role, message.content) for message in messages_of(conversation)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": REPLY}]},
        {"conversations": [USER, ASSISTANT]},
        {"instruction": ASK, "input": "", "output": REPLY},
        {"instruction": ASK, "output": REPLY},
        {"prompt": ASK, "completion": REPLY},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": ASK, "answer": REPLY},
        {"prompt": [USER], "response": REPLY},
        {"question": ASK, "answer": REPLY},
        {"problem": ASK, "solution": REPLY},
    ],
    ids=lambda row: " ".join(row) + (" of messages" if isinstance(next(iter(row.values())), list) else ""),
)
def test_one_conversation_in_every_format(row: dict[str, Any]) -> None:
    assert said([row]) == [("user", ASK), ("assistant", REPLY)]


def test_the_input_and_the_system_message_of_alpaca_and_sharegpt_are_read() -> None:
    alpaca = {"instruction": "Add the numbers.", "input": "2 and 2", "output": REPLY}
    assert said([alpaca]) == [("user", "Add the numbers.\n\n2 and 2"), ("assistant", REPLY)]
    shared = {
        "conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": REPLY}],
        "system": "Be short.",
    }
    assert said([shared])[0] == ("system", "Be short.")
    assert said([{"conversations": [{"from": "system", "value": "Hm."}, *shared["conversations"]]}])[0] == (  # type: ignore[misc]
        "system",
        "Hm.",
    )


def test_tool_calls_of_sharegpt_are_calls() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})
    row = {
        "conversations": [
            {"from": "human", "value": ASK},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": REPLY},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    [conversation] = conversations_from_rows([row])
    assert isinstance(conversation, ToolConversation)
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1].tool_calls[0].name == "add"
    assert json.loads(conversation.messages[1].tool_calls[0].arguments) == {"a": 2, "b": 2}


def test_columns_win_over_what_is_recognised() -> None:
    row = {"messages": [USER, ASSISTANT], "q": "Another?", "a": "Yes."}
    assert said([row], columns={"prompt": "q", "answer": "a"}) == [("user", "Another?"), ("assistant", "Yes.")]


def test_the_log_says_once_what_was_read_and_what_was_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "talks.jsonl"
    shared = {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": REPLY}], "source": "x"}
    alpaca = {"instruction": ASK, "input": "", "output": REPLY, "text": "all of it"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [shared, shared, alpaca]))
    with caplog.at_level(logging.INFO):
        load_conversations(DataSource(type="jsonl", path=str(file)))
    assert [record.getMessage() for record in caplog.records] == [
        f"2 rows of {file} read as ShareGPT conversations: columns conversations; not used: source",
        f"1 row of {file} read as Alpaca instructions: columns instruction, input, output; not used: text",
        f"{file}: nothing is learned from what is in text, which is not used; `columns` of the source says which "
        "columns are (docs/data.md)",
    ]


def test_a_column_that_holds_something_and_is_dropped_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Alpaca's `input` under another name; empty columns and labels of rows are not worth one."""
    file = tmp_path / "rows.jsonl"
    mapped = DataSource(type="jsonl", path=str(file), columns={"prompt": "order", "answer": "output"})
    row = {"order": ASK, "output": REPLY, "input": "", "id": 7, "prompt_id": "a", "reward": 0.5, "note": None}
    file.write_text(json.dumps(row) + "\n")

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    load_conversations(mapped)
    assert warned() == []
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "input": "1 2"}) + "\n")
    load_conversations(mapped)
    [told] = warned()
    assert f"{file}: nothing is learned from what is in input" in told
    caplog.clear()
    file.write_text(json.dumps({**row, "input": "1 2"}) + "\n")
    load_tasks(mapped)
    assert warned() == [], "rewards get the columns of tasks"


def test_verl_rows_are_tasks_with_their_ground_truth() -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7, "split": "train"},
    }
    [task] = tasks_from_rows([row])
    assert [message.content for message in task.messages] == [ASK]
    assert task.data == {**{key: value for key, value in row.items() if key != "prompt"}, "answer": "4"}


def test_questions_and_alpaca_instructions_are_tasks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        [task] = tasks_from_rows([{"question": ASK, "answer": "#### 4", "level": 1}])
    assert (task.messages[0].content, task.data) == (ASK, {"answer": "#### 4", "level": 1})
    assert "columns question, answer; in the tasks' data, for reward functions: level" in caplog.text
    [task] = tasks_from_rows([{"instruction": "Add.", "input": "2 and 2", "output": "4"}])
    assert (task.messages[0].content, task.data) == ("Add.\n\n2 and 2", {"answer": "4"})


def test_a_completion_beside_a_task_is_not_taken_for_its_answer() -> None:
    [task] = tasks_from_rows([{"prompt": ASK, "completion": "five"}])
    assert task.data == {"completion": "five"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "chosen": REPLY, "rejected": "5"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "5"}]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "5"}]},
        {"prompt": ASK, "chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "5"}]},
        {"question": ASK, "chosen": REPLY, "rejected": "5"},
    ],
)
def test_one_pair_in_every_format(row: dict[str, Any]) -> None:
    [pair] = pairs_from_rows([row])
    assert [(message.role, message.content) for message in pair.chosen] == [("user", ASK), ("assistant", REPLY)]
    assert [(message.role, message.content) for message in pair.rejected] == [("user", ASK), ("assistant", "5")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "all"}, "the columns are text; map one of them, columns = {prompt"),
        ({"conversations": [{"from": "alien", "value": ASK}]}, "from 'alien', which is not one of human, user"),
        ({"conversations": [{"from": "human", "value": 3}]}, "the value of a message from human must be a text"),
        ({"instruction": ASK, "input": ["2"], "output": REPLY}, "instruction and input must be texts"),
        ({"prompt": ASK, "completion": [USER]}, "a list of messages that ends with the assistant's"),
        ({"prompt": ASK, "reply": REPLY}, 'columns are prompt, reply; map the reply\'s, columns = {answer = "..."}'),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "must be JSON with name and arguments"),
    ],
)
def test_a_wrong_row_is_named_with_what_was_expected(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": [USER, ASSISTANT]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError) as failure:
        load_conversations(DataSource(type="jsonl", path=str(file)))
    assert str(failure.value).startswith(f"{file}, line 2: ")
    assert expected in str(failure.value)
