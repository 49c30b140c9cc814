"""Every kind of source gives the same tasks, and a wrong row or setting is named where it stands."""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.data.rows import DataSource, rows_of
from headrace.data.task_rows import load_tasks, tasks_from_rows
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Task, ToolCall

ROWS: list[dict[str, Any]] = [
    {"question": "two plus two?", "solution": "4", "key": "a", "level": 1},
    {"question": "two plus three?", "solution": "5", "key": "b", "level": 2},
]
COLUMNS = {"prompt": "question", "answer": "solution", "id": "key"}
TASKS = [
    Task(id="a", messages=(Message(role="user", content="two plus two?"),), data={"level": 1, "answer": "4"}),
    Task(id="b", messages=(Message(role="user", content="two plus three?"),), data={"level": 2, "answer": "5"}),
]


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_source(kind: str, folder: Path) -> DataSource:
    """The same rows as a source of each kind, its path relative to `folder`."""
    if kind == "jsonl":
        write_jsonl(folder / "tasks.jsonl", ROWS)
        return DataSource(type="jsonl", path="tasks.jsonl", columns=COLUMNS)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "tasks.parquet")
        return DataSource(type="parquet", path="tasks.parquet", columns=COLUMNS)
    if kind == "dataset":
        pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
        return DataSource(type="dataset", path="saved", columns=COLUMNS)
    assert kind == "python"
    (folder / "mine.py").write_text(f"def rows(first=0):\n    yield from {ROWS!r}[first:]\n")
    return DataSource(type="python", path="mine.py:rows", columns=COLUMNS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "python"])
def test_the_same_rows_give_the_same_tasks(kind: str, tmp_path: Path) -> None:
    assert load_tasks(make_source(kind, tmp_path), base=tmp_path) == TASKS


def test_a_python_iterable_gives_them_too() -> None:
    assert tasks_from_rows(iter(ROWS), columns=COLUMNS) == TASKS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "python"])
def test_a_column_that_is_not_there_lists_those_that_are(kind: str, tmp_path: Path) -> None:
    source = make_source(kind, tmp_path)
    wrong = DataSource(type=source.type, path=source.path, columns={**COLUMNS, "answer": "reply"})
    with pytest.raises(DataError, match=r"no column reply .*the columns are question, solution, key, level"):
        load_tasks(wrong, base=tmp_path)
    unmapped = DataSource(type=source.type, path=source.path)
    assert load_tasks(unmapped, base=tmp_path)[0].data["answer"] == "4"  # question and solution are known names


def test_columns_of_no_known_format_are_listed(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"text": "2 + 2 =", "level": 1}\n')
    with pytest.raises(DataError, match=r"no column prompt or messages, nor .*; the columns are text, level; map one"):
        load_tasks(DataSource(type="jsonl", path="tasks.jsonl"), base=tmp_path)


def test_the_usual_column_names_need_no_mapping_and_ids_default_to_the_place() -> None:
    tasks = tasks_from_rows([{"prompt": "go", "answer": 3}, {"prompt": "stay", "id": None}])
    assert [(task.id, task.messages[0].content, dict(task.data)) for task in tasks] == [
        ("0", "go", {"answer": 3}),
        ("1", "stay", {}),
    ]


def test_system_is_put_before_prompts_that_have_none() -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "go"}]
    tasks = tasks_from_rows([{"prompt": "go"}, {"messages": own}], system="be brief")
    assert [task.messages[0] for task in tasks] == [
        Message(role="system", content="be brief"),
        Message(role="system", content="own"),
    ]


def test_messages_in_the_chat_completions_format() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add "}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "tool_calls": None},
    ]
    (task,) = tasks_from_rows([{"messages": messages}])
    assert task.messages == (
        Message(role="user", content="add one"),
        Message(role="assistant", content="", tool_calls=(ToolCall(name="add", arguments='{"a": 1}', id="c1"),)),
        Message(role="tool", content="2", tool_call_id="c1"),
    )


def test_values_without_a_json_type_become_text() -> None:
    (task,) = tasks_from_rows([{"prompt": "go", "when": datetime.date(2024, 2, 29), "pair": (1, {2: b"x"})}])
    assert dict(task.data) == {"when": "2024-02-29", "pair": [1, {"2": "b'x'"}]}
    json.dumps(task.data)


BAD_ROWS: list[tuple[Any, str]] = [
    ({"prompt": 3}, "a prompt must be a text or a list of messages, this is 3"),
    ({"messages": []}, "must be a text or a list of messages"),
    ({"messages": ["go"]}, "an object with role and content .*, this is 'go'"),
    ({"messages": [{"role": "user", "content": 1}]}, "content of a user message must be a text, this is 1"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "only parts of type text, image"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "a function with a name"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "ends with the assistant's turn"),
    ([1, 2], "a row must be a JSON object, this is a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(row: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"tasks.jsonl, line 3: .*{message}"):
        load_tasks(DataSource(type="jsonl", path="tasks.jsonl"), base=tmp_path)


def test_a_line_that_is_not_json_or_not_utf8_is_named(tmp_path: Path) -> None:
    for bad in (b'{"prompt": ', b'{"prompt": "\xff"}'):
        (tmp_path / "tasks.jsonl").write_bytes(b'{"prompt": "a"}\n' + bad + b"\n")
        with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: not JSON in UTF-8"):
            load_tasks(DataSource(type="jsonl", path="tasks.jsonl"), base=tmp_path)


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    tasks = load_tasks(DataSource(type="jsonl", path=str(tmp_path)))
    assert [task.messages[0].content for task in tasks] == ["a", "b"]


def test_sources_that_cannot_be_read_say_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.parquet").write_text("no")
    write_jsonl(tmp_path / "twice.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}])
    cases: list[tuple[DataSource, type[Exception], str]] = [
        (DataSource(type="jsonl", path="absent.jsonl"), DataError, "there is no .*absent.jsonl"),
        (DataSource(type="jsonl"), ConfigError, 'type = "jsonl" needs a path'),
        (DataSource(type="jsonl", path="empty.jsonl"), DataError, "empty.jsonl has no rows"),
        (DataSource(type="jsonl", path="twice.jsonl"), DataError, "two tasks with the id 1"),
        (
            DataSource(type="jsonl", path="twice.jsonl", columns={"text": "x"}),
            ConfigError,
            "maps text, which is not one",
        ),
        (DataSource(type="jsonl", path="twice.jsonl", options={"split": "x"}), ConfigError, "no option split"),
        (DataSource(type="parquet", path="broken.parquet"), DataError, "broken.parquet cannot be read"),
        (DataSource(type="parquet", path="."), DataError, r"broken|cannot be read"),
        (DataSource(type="dataset", path="."), DataError, "not a folder written by datasets.save_to_disk"),
        (DataSource(type="reasoning_gym"), ConfigError, "needs a name"),
        (DataSource(type="reasoning_gym", name="no_such"), DataError, "cannot make the dataset no_such"),
        (DataSource(type="python"), ConfigError, "file.py:function"),
    ]
    for source, error, message in cases:
        with pytest.raises(error, match=message):
            load_tasks(source, base=tmp_path)


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"splits train, test: set options\.split"):
        load_tasks(DataSource(type="dataset", path="saved"), base=tmp_path)
    (task,) = load_tasks(DataSource(type="dataset", path="saved", options={"split": "test"}), base=tmp_path)
    assert task.messages[0].content == "test"


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("parquet", "pyarrow.parquet", "parquet"),
        ("dataset", "datasets", "datasets"),
        ("reasoning_gym", "reasoning_gym", "envs"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_command(
    kind: Any, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    with pytest.raises(ConfigError, match=rf"pip install 'headrace\[{extra}\]'"):
        load_tasks(DataSource(type=kind, path=str(tmp_path), name="chain_sum"))


def test_reasoning_gym_entries_can_be_scored() -> None:
    gym = pytest.importorskip("reasoning_gym")
    source = DataSource(type="reasoning_gym", name="chain_sum", size=4, seed=7, options={"max_terms": 3}, system="add")
    tasks = load_tasks(source)
    assert [task.id for task in tasks] == [f"chain_sum-7-{i}" for i in range(4)]
    assert load_tasks(source) == tasks
    score = gym.get_score_answer_fn(tasks[0].data["dataset"])
    for task in tasks:
        assert task.messages[0] == Message(role="system", content="add")
        assert task.messages[1].content == task.data["entry"]["question"]
        assert score(task.data["answer"], task.data["entry"]) == 1.0
        assert score("no number", task.data["entry"]) < 1.0


def test_a_python_source_takes_options_and_its_failures_are_data_errors(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def rows(n):\n    for i in range(n):\n        yield {'prompt': str(1 // (2 - i))}\n\n"
        "def number():\n    return 3\n\ndef words():\n    return ['a']\n"
    )
    tasks = load_tasks(DataSource(type="python", path="mine.py:rows", options={"n": 2}), base=tmp_path)
    assert [task.messages[0].content for task in tasks] == ["0", "1"]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("rows", {"n": 3}, "ZeroDivisionError"),
        ("rows", {"m": 3}, "TypeError"),
        ("number", {}, "must return an iterable of dicts, not a int"),
        ("words", {}, "a row must be a dict, this is a str"),
    ]
    for name, options, message in cases:
        with pytest.raises(DataError, match=message):
            load_tasks(DataSource(type="python", path=f"mine.py:{name}", options=options), base=tmp_path)


def test_an_endless_iterable_ends_with_an_error() -> None:
    def endless() -> Any:
        while True:
            yield {"prompt": "go"}

    with pytest.raises(DataError, match="more than 10 rows"):
        list(rows_of(endless(), "mine", max_rows=10))
    assert len(list(rows_of([{}] * 10, "mine", max_rows=10))) == 10


@pytest.mark.parametrize("prompt", [{"prompt": [{"role": "user", "content": "2 + 2 ="}]}, {"problem": "2 + 2 ="}])
def test_a_solution_is_the_answer_and_keeps_its_name_for_functions_that_ask_for_it(prompt: dict[str, Any]) -> None:
    [task] = tasks_from_rows([{**prompt, "solution": "$4$"}])
    assert (task.messages[0].content, task.data) == ("2 + 2 =", {"answer": "$4$", "solution": "$4$"})
