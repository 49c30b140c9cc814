"""Turn rows into tasks: find the prompt's column, parse messages, and pass the other columns on to the reward."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.data.rows import DataRow, DataSource, read_rows, rows_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message, Task, ToolCall

OUR_COLUMNS = ("prompt", "messages", "answer", "id")


def load_tasks(source: DataSource, *, base: Path | None = None) -> list[Task]:
    """Load the tasks of a source that has rows, in their order there; relative paths start at `base`.

    Raises DataError or ConfigError with the file, the line and the columns there are.
    """
    rows = read_rows(source, base=base)
    return _tasks(rows, columns=source.columns, system=source.system, what=source.path or source.name or source.type)


def tasks_from_rows(
    rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, system: str | None = None
) -> list[Task]:
    """Make tasks from any iterable of dicts with a `prompt` (or `messages`) and, for most rewards, an `answer`.

    `columns` maps these names to those of the rows; every other column is in the task's `data`. `system` is put before
    every conversation that has no system message. Raises DataError that names the row.

    >>> [task] = tasks_from_rows([{"question": "1 + 1 =", "answer": "2"}], columns={"prompt": "question"})
    >>> task.messages[0].content, task.data
    ('1 + 1 =', {'answer': '2'})
    """
    return _tasks(rows_of(rows, "rows"), columns=columns or {}, system=system, what="the iterable")


def _tasks(rows: Iterator[DataRow], *, columns: Mapping[str, str], system: str | None, what: str) -> list[Task]:
    check_columns(columns)
    tasks = [to_task(row, index=index, columns=columns, system=system) for index, row in enumerate(rows)]
    if not tasks:
        raise DataError(f"{what} has no rows: there is nothing to train on")
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            raise DataError(f"{what} has two tasks with the id {task.id}: make ids unique, or map id to another column")
        ids.add(task.id)
    return tasks


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError if `columns` maps a name that is not ours, or two names of the same thing."""
    for name in columns:
        if name not in OUR_COLUMNS:
            raise ConfigError(f"columns maps {name}, which is not one of {', '.join(OUR_COLUMNS)}")
    if "prompt" in columns and "messages" in columns:
        raise ConfigError("columns maps both prompt and messages: keep the one the task starts from")


def to_task(row: DataRow, *, index: int, columns: Mapping[str, str], system: str | None) -> Task:
    """Make a task of a row: prompt or messages are its conversation, all other columns its `data`, with `answer` under
    our name."""
    column = prompt_column(row, columns)
    messages = with_system(parse_prompt(row.columns[column], row.place), system)
    if messages[-1].role == "assistant":
        raise DataError(f"{row.place}: the prompt ends with the assistant's turn; leave the answer out of {column}")
    id_column = pick(row, columns, "id")
    name = None if id_column is None else row.columns[id_column]
    answer_column = pick(row, columns, "answer")
    data = {key: value for key, value in row.columns.items() if key not in (column, id_column, answer_column)}
    if answer_column is not None:
        data["answer"] = row.columns[answer_column]
    return Task(
        id=str(index if name is None else name),
        messages=messages,
        data=data,
    )


def pick(row: DataRow, columns: Mapping[str, str], name: str) -> str | None:
    """Return the row's column for one of our names: the mapped one, which must be there, else the one of that name.

    Returns None if the row has no such column.
    """
    if name in columns:
        if columns[name] not in row.columns:
            raise DataError(
                f"{row.place}: there is no column {columns[name]} (mapped from {name}); "
                f"the columns are {', '.join(row.columns) or 'none'}"
            )
        return columns[name]
    return name if name in row.columns else None


def prompt_column(row: DataRow, columns: Mapping[str, str]) -> str:
    """Return the column that a conversation starts from: a mapped one, else `messages`, else `prompt`."""
    order = ("prompt", "messages") if "prompt" in columns else ("messages", "prompt")
    for name in order:
        column = pick(row, columns, name)
        if column is not None:
            return column
    raise DataError(
        f"{row.place}: there is no column prompt or messages; the columns are {', '.join(row.columns) or 'none'}; "
        'map one of them, columns = {prompt = "..."}'
    )


def with_system(messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    """Put a system message before a conversation that has none."""
    if system is None or any(message.role == "system" for message in messages):
        return messages
    return (Message(role="system", content=system), *messages)


def parse_prompt(value: Any, place: str) -> tuple[Message, ...]:
    """Parse a prompt: a text is one user message, a list is a conversation in the chat-completions format."""
    if isinstance(value, str):
        return (Message(role="user", content=value),)
    if isinstance(value, Sequence) and value:
        return tuple(_parse_message(item, place) for item in value)
    raise DataError(f"{place}: a prompt must be a text or a list of messages, this is {_shorten(value)}")


def _parse_message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(f"{place}: a message must be an object with role and content, this is {_shorten(value)}")
    calls = tuple(_parse_call(call, place) for call in value.get("tool_calls") or ())
    content = value.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_parse_part(part, place) for part in content)
    if not isinstance(content, str):
        raise DataError(
            f"{place}: the content of a {value['role']} message must be a text, this is {_shorten(content)}"
        )
    name, call_id = value.get("name"), value.get("tool_call_id")
    return Message(role=value["role"], content=content, name=name, tool_calls=calls, tool_call_id=call_id)


def _parse_part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(f"{place}: only text parts are supported in a message's content, this is {_shorten(part)}")


def _parse_call(call: Any, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: a tool call must have a function with a name, this is {_shorten(call)}")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return ToolCall(name=function["name"], arguments=text, id=call.get("id") or "")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
