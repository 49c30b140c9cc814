"""Read preference pairs: two conversations that start alike, of which the first one is better."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.row_formats import FormatLog, parse_prompt, pick, with_system
from headrace.data.rows import DataRow, DataSource, read_rows, rows_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message

PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin")
PROMPTS = ("question", "instruction", "query")  # what others call the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two whole conversations, prompt included, each ending with the assistant."""

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float = 0.0  # by how much `chosen` is better, at least


def load_pairs(source: DataSource, *, base: Path | None = None) -> list[PreferencePair]:
    """Load the pairs of a source that has rows: `prompt`, `chosen`, `rejected` and, if there, `margin`."""
    what = source.path or source.name or source.type
    return _pairs(read_rows(source, base=base), columns=source.columns, system=source.system, what=what)


def pairs_from_rows(
    rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, system: str | None = None
) -> list[PreferencePair]:
    """Make pairs from any Python iterable of dicts, with the columns that a file would have."""
    return _pairs(rows_of(rows, "rows"), columns=columns or {}, system=system, what="the iterable")


def _pairs(
    rows: Iterator[DataRow], *, columns: Mapping[str, str], system: str | None, what: str
) -> list[PreferencePair]:
    for name in columns:
        if name not in PAIR_COLUMNS:
            raise ConfigError(f"columns maps {name}, which is not one of {', '.join(PAIR_COLUMNS)}")
    log = FormatLog(what)
    pairs = [_to_pair(row, columns, system, log) for row in rows]
    if not pairs:
        raise DataError("the source has no rows: there is nothing to train on")
    log.write()
    return pairs


def _to_pair(row: DataRow, columns: Mapping[str, str], system: str | None, log: FormatLog) -> PreferencePair:
    """Make a pair of a row. Without a prompt both sides are whole conversations, given as messages; so are sides that
    begin with the messages of the prompt."""
    prompt = pick(row, columns, "prompt")
    if prompt is None:
        prompt = next((name for name in PROMPTS if isinstance(row.columns.get(name), str)), None)
    start = () if prompt is None else parse_prompt(row.columns[prompt], row.place)
    read = [_side(row, columns, name) for name in ("chosen", "rejected")]
    repeats = bool(start) and all(messages[: len(start)] == start and len(messages) > len(start) for messages in read)
    sides = [with_system(messages if repeats else (*start, *messages), system) for messages in read]
    log.add(
        "pairs of chosen and rejected" + ("" if prompt is None else " replies"),
        row,
        (prompt, *(pick(row, columns, name) for name in ("chosen", "rejected", "margin"))),
    )
    for messages in sides:
        first = next((message for message in messages if message.role != "system"), None)
        if first is None or first.role == "assistant":
            raise DataError(f"{row.place}: there is no prompt: add the column, or give both sides as whole messages")
        if messages[-1].role != "assistant":
            raise DataError(f"{row.place}: both sides must end with the assistant's turn")
    if sides[0] == sides[1]:
        raise DataError(f"{row.place}: chosen and rejected are the same, so neither is better: leave the row out")
    return PreferencePair(chosen=sides[0], rejected=sides[1], margin=_margin(row, columns))


def _side(row: DataRow, columns: Mapping[str, str], name: str) -> tuple[Message, ...]:
    column = pick(row, columns, name)
    if column is None:
        raise DataError(f"{row.place}: there is no column {name}; the columns are {', '.join(row.columns) or 'none'}")
    value = row.columns[column]
    if isinstance(value, str):
        return (Message(role="assistant", content=value),)
    return parse_prompt(value, row.place)


def _margin(row: DataRow, columns: Mapping[str, str]) -> float:
    column = pick(row, columns, "margin")
    value = 0.0 if column is None or row.columns[column] is None else row.columns[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.place}: the margin must be a finite number, this is {value!r}")
    return float(value)
