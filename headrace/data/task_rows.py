"""Turn rows into tasks: read the prompt in any known format, and pass the other columns on to the reward."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.data.picture_columns import LeftOut
from headrace.data.row_formats import FormatLog, check_columns, pick, recognise, with_system
from headrace.data.rows import DataRow, DataSource, is_pictures, json_like, read_rows, rows_of
from headrace.errors import DataError, PictureError
from headrace.types import Task

FOR_REWARDS = "in the tasks' data, for reward functions"


def load_tasks(source: DataSource, *, base: Path | None = None) -> list[Task]:
    """Load the tasks of a source that has rows, in their order there; relative paths start at `base`.

    Raises DataError or ConfigError with the file, the line and the columns there are. A row with a picture that cannot
    be read is left out and logged.
    """
    rows = read_rows(source, base=base)
    return _tasks(rows, columns=source.columns, system=source.system, what=source.path or source.name or source.type)


def first_task(source: DataSource, *, base: Path | None = None) -> Task:
    """Load the task of the first row, and read no other."""
    check_columns(source.columns)
    for row in read_rows(source, base=base):
        return to_task(row, index=0, columns=source.columns, system=source.system)
    raise DataError(f"{source.path or source.name or source.type} has no rows: there is nothing to train on")


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
    log = FormatLog(what, others=FOR_REWARDS)
    tasks: list[Task] = []
    left_out = LeftOut(what)
    for index, row in enumerate(rows):
        try:
            tasks.append(to_task(row, index=index, columns=columns, system=system, log=log))
        except PictureError as exc:
            left_out.add(exc)
    left_out.log(len(tasks))
    if not tasks:
        raise DataError(f"{what} has no rows: there is nothing to train on")
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            raise DataError(f"{what} has two tasks with the id {task.id}: make ids unique, or map id to another column")
        ids.add(task.id)
    log.write()
    return tasks


def to_task(
    row: DataRow, *, index: int, columns: Mapping[str, str], system: str | None, log: FormatLog | None = None
) -> Task:
    """Make a task of a row: prompt or messages are its conversation, all other columns its `data`, with the right
    answer as `answer`."""
    read = recognise(row, columns)
    messages = with_system(read.messages, system)
    if messages[-1].role == "assistant":
        raise DataError(
            f"{row.place}: the prompt ends with the assistant's turn; leave the answer out of {read.columns[0]}"
        )
    id_column = pick(row, columns, "id")
    name = None if id_column is None else row.columns[id_column]
    answer = read.answer
    if read.columns[0] == "prompt" and answer in ("completion", "response") and "answer" not in columns:
        answer = None  # somebody's reply, not the right answer
    gone = {*(column for column in read.columns if column != "reward_model"), id_column, answer}
    if "answer" not in columns:
        gone.discard("solution")  # reward functions written for TRL ask for it by this name
    others = {key: value for key, value in row.columns.items() if key not in gone}
    data = {key: json_like(value) if is_pictures(value) else value for key, value in others.items()}
    if answer is not None:
        data["answer"] = row.columns[answer]
    elif read.ground_truth is not None:
        data["answer"] = read.ground_truth
    if log is not None:
        log.add(read.form, row, (*read.columns, answer, id_column))
    return Task(id=str(index if name is None else name), messages=messages, data=data)
