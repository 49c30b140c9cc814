"""Read preferences: pairs of conversations that start alike, of which the first one is better, and labelled replies."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headrace.data.row_formats import FormatLog, parse_prompt, pick, with_system
from headrace.data.rows import DataRow, DataSource, read_rows, rows_of
from headrace.errors import ConfigError, DataError
from headrace.types import Message

PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin")
LABELLED_COLUMNS = ("prompt", "completion", "label")
PROMPTS = ("question", "instruction", "query")  # what others call the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two whole conversations, prompt included, each ending with the assistant."""

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float = 0.0  # by how much `chosen` is better, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledReply:
    """A prompt, a reply that ends with the assistant, and whether the reply is good."""

    prompt: tuple[Message, ...]
    reply: tuple[Message, ...]
    label: bool


def load_pairs(source: DataSource, *, base: Path | None = None) -> list[PreferencePair]:
    """Load the pairs of a source that has rows: `prompt`, `chosen`, `rejected` and, if there, `margin`."""
    what = source.path or source.name or source.type
    return _pairs(read_rows(source, base=base), columns=source.columns, system=source.system, what=what)


def pairs_from_rows(
    rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, system: str | None = None
) -> list[PreferencePair]:
    """Make pairs from any Python iterable of dicts, with the columns that a file would have."""
    return _pairs(rows_of(rows, "rows"), columns=columns or {}, system=system, what="the iterable")


def load_labelled(source: DataSource, *, base: Path | None = None) -> list[LabelledReply]:
    """Load labelled replies: `prompt`, `completion` and `label`; rows of pairs become two replies each."""
    what = source.path or source.name or source.type
    return _labelled(read_rows(source, base=base), columns=source.columns, system=source.system, what=what)


def labelled_from_rows(
    rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, system: str | None = None
) -> list[LabelledReply]:
    """Make labelled replies from any Python iterable of dicts, with the columns that a file would have."""
    return _labelled(rows_of(rows, "rows"), columns=columns or {}, system=system, what="the iterable")


def first_preference(source: DataSource, *, base: Path | None = None) -> PreferencePair | LabelledReply:
    """Load the pair or the labelled reply of the first row, and read no other."""
    what = source.path or source.name or source.type
    for row in read_rows(source, base=base):
        if pick(row, source.columns, "label") is not None:
            return _to_labelled(row, source.columns, source.system, FormatLog(what))
        return _to_pair(row, source.columns, source.system, FormatLog(what))
    raise DataError(f"{what} has no rows: there is nothing to train on")


def unpaired(pairs: Sequence[PreferencePair]) -> list[LabelledReply]:
    """Make a good and a bad reply of every pair: first all good ones, then all bad ones."""
    sides = [(pair.chosen, True, num_shared(pair)) for pair in pairs]
    sides += [(pair.rejected, False, num_shared(pair)) for pair in pairs]
    return [
        LabelledReply(prompt=messages[:shared], reply=messages[shared:], label=label)
        for messages, label, shared in sides
    ]


def num_shared(pair: PreferencePair) -> int:
    """Count the messages with which both sides of a pair begin; the last message of a side is never counted."""
    most = min(len(pair.chosen), len(pair.rejected)) - 1
    sides = zip(pair.chosen[:most], pair.rejected[:most], strict=True)
    return next((index for index, (left, right) in enumerate(sides) if left != right), most)


def _labelled(
    rows: Iterator[DataRow], *, columns: Mapping[str, str], system: str | None, what: str
) -> list[LabelledReply]:
    first = next(rows, None)
    if first is None:
        raise DataError("the source has no rows: there is nothing to train on")
    rest = chain([first], rows)
    if pick(first, columns, "label") is None and pick(first, columns, "chosen") is not None:
        return unpaired(_pairs(rest, columns=columns, system=system, what=what))
    _check_columns(columns, LABELLED_COLUMNS)
    log = FormatLog(what)
    replies = [_to_labelled(row, columns, system, log) for row in rest]
    log.write()
    return replies


def _to_labelled(row: DataRow, columns: Mapping[str, str], system: str | None, log: FormatLog) -> LabelledReply:
    _refuse_pictures(row)
    prompt, label = _prompt_column(row, columns), pick(row, columns, "label")
    there = ", ".join(row.columns) or "none"
    if prompt is None or label is None:
        raise DataError(
            f"{row.place}: there is no column {'label' if label is None else 'prompt'}; the columns are {there}"
        )
    value = row.columns[label]
    if value not in (True, False):  # 1 and 0 too
        raise DataError(f"{row.place}: the label must be true or false, this is {value!r}")
    start = with_system(parse_prompt(row.columns[prompt], row.place), system)
    reply = _after(start, _side(row, columns, "completion"))
    log.add("labelled replies", row, (prompt, pick(row, columns, "completion"), label))
    if not start or start[-1].role == "assistant":
        raise DataError(f"{row.place}: the prompt must end before the assistant's turn")
    if not reply or reply[-1].role != "assistant":
        raise DataError(f"{row.place}: the completion must end with the assistant's turn")
    return LabelledReply(prompt=start, reply=reply, label=bool(value))


def _after(start: tuple[Message, ...], side: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return what a side adds to the prompt: some data repeat the prompt in each side."""
    spoken = tuple(message for message in start if message.role != "system")
    for beginning in (start, spoken):
        if beginning and side[: len(beginning)] == beginning:
            return side[len(beginning) :]
    return side


def _check_columns(columns: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in columns:
        if name not in known:
            raise ConfigError(f"columns maps {name}, which is not one of {', '.join(known)}")


def _pairs(
    rows: Iterator[DataRow], *, columns: Mapping[str, str], system: str | None, what: str
) -> list[PreferencePair]:
    _check_columns(columns, PAIR_COLUMNS)
    log = FormatLog(what)
    pairs = [_to_pair(row, columns, system, log) for row in rows]
    if not pairs:
        raise DataError("the source has no rows: there is nothing to train on")
    log.write()
    return pairs


def _to_pair(row: DataRow, columns: Mapping[str, str], system: str | None, log: FormatLog) -> PreferencePair:
    """Make a pair of a row. Without a prompt both sides are whole conversations, given as messages; so are sides that
    begin with the messages of the prompt."""
    _refuse_pictures(row)
    prompt = _prompt_column(row, columns)
    start = () if prompt is None else parse_prompt(row.columns[prompt], row.place)
    own, extra = _system_and_input(row, prompt)
    if extra is not None:
        start = (Message(role="user", content=f"{row.columns['instruction']}\n\n{row.columns[extra]}"),)
    start = with_system(start, None if own is None else row.columns[own])
    sides = [
        with_system((*start, *_after(start, _side(row, columns, name))), system) for name in ("chosen", "rejected")
    ]
    log.add(
        "pairs of chosen and rejected" + ("" if prompt is None else " replies"),
        row,
        (prompt, own, extra, *(pick(row, columns, name) for name in ("chosen", "rejected", "margin"))),
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


def _prompt_column(row: DataRow, columns: Mapping[str, str]) -> str | None:
    prompt = pick(row, columns, "prompt")
    return prompt or next((name for name in PROMPTS if isinstance(row.columns.get(name), str)), None)


def _system_and_input(row: DataRow, prompt: str | None) -> tuple[str | None, str | None]:
    """Return the columns of a system message and of Alpaca's input that belong to the prompt, if there is one."""
    held = [name if isinstance(text := row.columns.get(name), str) and text else None for name in ("system", "input")]
    return None if prompt is None else held[0], held[1] if prompt == "instruction" else None


def _refuse_pictures(row: DataRow) -> None:
    if row.columns.get("images"):
        raise DataError(
            f"{row.place}: it has pictures (column images), and preferences are trained on text alone: leave the "
            "column out, or train with [sft] or [rl]"
        )


def _side(row: DataRow, columns: Mapping[str, str], name: str) -> tuple[Message, ...]:
    column = pick(row, columns, name)
    if column is None:
        hint = '; rows with a label are for [dpo] with loss = "kto"' if pick(row, columns, "label") is not None else ""
        there = ", ".join(row.columns) or "none"
        raise DataError(f"{row.place}: there is no column {name}; the columns are {there}{hint}")
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
