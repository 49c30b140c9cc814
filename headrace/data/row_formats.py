"""Recognise the formats that data come in by their columns: OpenAI messages, ShareGPT, Alpaca, TRL, verl and ours.

A row is recognised by itself, so a file may mix formats; `FormatLog` says once for each what was read and what was not.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.data.picture_columns import PictureColumn, place_pictures, plain_text
from headrace.data.rows import DataRow, is_pictures
from headrace.errors import ConfigError, DataError
from headrace.pictures import PICTURE_MARK, Picture
from headrace.types import Message, ToolCall

logger = logging.getLogger(__name__)

OUR_COLUMNS = ("prompt", "messages", "answer", "id", "images")
PICTURE_PARTS = ("image", "image_url")  # types of the parts of a message's content
CONVERSATIONS = ("conversations", "conversation")  # ShareGPT's columns
REPLIES = {  # the column that a prompt is read from -> those of its reply, the first that is there
    "prompt": ("answer", "completion", "solution", "response"),
    "instruction": ("answer", "output", "response"),
    "question": ("answer", "solution", "response"),
    "problem": ("answer", "solution"),
    "query": ("answer", "response"),
}
ROLES = {  # ShareGPT's `from`
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
MOST_NAMED = 12  # columns in a line of the log
NOT_USED = "not used"
# of rows: nothing to learn; `reward` and `success` are what `headrace demonstrate` writes beside a conversation
LABELS = (
    "id", "idx", "index", "uid", "uuid", "source", "data_source", "dataset", "split", "reward", "success",
    "score", "score_chosen", "score_rejected", "chosen_score", "rejected_score",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognisedRow:
    """The conversation of a row, and the columns that it was read from."""

    form: str  # for the log: "ShareGPT conversations"
    messages: tuple[Message, ...]
    columns: tuple[str, ...]  # that the messages are from
    answer: str | None  # the column of the reply or the right answer, if there is one
    ground_truth: Any = None  # verl: the right answer, which is inside a column


def recognise(row: DataRow, columns: Mapping[str, str]) -> RecognisedRow:
    """Find the prompt or the messages of a row; `columns`, our names to theirs, win over what is recognised.

    Raises DataError that says which columns there are and which are known.
    """
    there = row.columns
    if "prompt" in columns or "messages" in columns:
        column = pick(row, columns, "prompt" if "prompt" in columns else "messages")
        assert column is not None
        return _read(row, columns, "mapped columns", column, REPLIES["prompt"][:1])
    if "messages" in there:
        return _read(row, columns, "OpenAI messages", "messages", ("answer",))
    if (shared := next((name for name in CONVERSATIONS if isinstance(there.get(name), Sequence)), None)) is not None:
        return _read(row, columns, "ShareGPT conversations", shared, ("answer",), system="system")
    if "prompt" in there and isinstance(there.get("reward_model"), Mapping):
        truth = there["reward_model"].get("ground_truth")
        read = _read(row, columns, "verl's RL rows", "prompt", ("answer",))
        return RecognisedRow(
            form=read.form,
            messages=read.messages,
            columns=(*read.columns, "reward_model"),
            answer=read.answer,
            ground_truth=truth if read.answer is None else None,
        )
    if "prompt" in there:
        form = "TRL's prompts and completions" if "completion" in there else "prompts"
        return _read(row, columns, form, "prompt", REPLIES["prompt"])
    if "instruction" in there:
        return _read(row, columns, "Alpaca instructions", "instruction", REPLIES["instruction"], system="system")
    for column in ("question", "problem", "query"):
        if column in there:
            replies = REPLIES[column]
            return _read(row, columns, f"{column}s and {replies[0]}s", column, replies)
    raise DataError(
        f"{row.place}: there is no column prompt or messages, nor those of a known format (conversations; instruction; "
        f"question; problem; query); the columns are {', '.join(there) or 'none'}; "
        'map one of them, columns = {prompt = "..."}'
    )


def _read(
    row: DataRow,
    columns: Mapping[str, str],
    form: str,
    column: str,
    replies: Sequence[str],
    *,
    system: str | None = None,
) -> RecognisedRow:
    """Parse the column of a prompt, with Alpaca's `input` and the system message beside it."""
    there, used = row.columns, [column]
    value = there[column]
    if column == "instruction" and there.get("input"):
        if not isinstance(value, str) or not isinstance(there["input"], str):
            raise DataError(f"{row.place}: instruction and input must be texts")
        value = f"{value}\n\n{there['input']}"
    if column == "instruction" and "input" in there:
        used.append("input")
    pictures = PictureColumn(row, _picture_column(row, columns, value))
    messages = place_pictures(parse_prompt(value, row.place, pictures), pictures)
    if pictures.column is not None and pictures.num_taken:
        used.append(pictures.column)
    if system is not None and isinstance(there.get(system), str):
        used.append(system)
        messages = with_system(messages, there[system] or None)
    answer = pick(row, columns, "answer")
    if answer is None:
        answer = next((name for name in replies if there.get(name) is not None), None)
    return RecognisedRow(form=form, messages=messages, columns=tuple(used), answer=answer)


def _picture_column(row: DataRow, columns: Mapping[str, str], value: Any) -> str | None:
    """Return the column of a row's pictures: `images`, or `image` where that cannot be anything else."""
    if (column := pick(row, columns, "images")) is not None:
        return column
    image = row.columns.get("image")
    return "image" if is_pictures(image) or (image and _asks_for_pictures(value)) else None


def _asks_for_pictures(value: Any) -> bool:
    """Tell whether messages have a part {"type": "image"} that stands for a picture of the column."""
    contents = [item.get("content") for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") == "image" and len(part) == 1 for part in parts)


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


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError if `columns` maps a name that is not ours, or two names of the same thing."""
    for name in columns:
        if name not in OUR_COLUMNS:
            raise ConfigError(f"columns maps {name}, which is not one of {', '.join(OUR_COLUMNS)}")
    if "prompt" in columns and "messages" in columns:
        raise ConfigError("columns maps both prompt and messages: keep the one the task starts from")


# --- messages --------------------------------------------------------------------------------------------------------


def with_system(messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    """Put a system message before a conversation that has none."""
    if system is None or any(message.role == "system" for message in messages):
        return messages
    return (Message(role="system", content=system), *messages)


def parse_prompt(value: Any, place: str, pictures: PictureColumn | None = None) -> tuple[Message, ...]:
    """Parse a prompt: a text is one user message, a list is a conversation in OpenAI's or ShareGPT's format.

    `pictures` reads those in the messages; without it there may be none.
    """
    if isinstance(value, str):
        return (Message(role="user", content=value),)
    if isinstance(value, Sequence) and value:
        return tuple(_parse_message(item, place, pictures) for item in value)
    raise DataError(f"{place}: a prompt must be a text or a list of messages, this is {_shorten(value)}")


def parse_reply(value: Any, place: str, column: str) -> tuple[Message, ...]:
    """Parse a reply: a text is one assistant message, a list is the rest of the conversation."""
    if isinstance(value, str):
        return (Message(role="assistant", content=value),)
    if isinstance(value, Sequence) and value:
        messages = parse_prompt(value, place)
        if messages[-1].role == "assistant":
            return messages
    raise DataError(
        f"{place}: the reply in {column} must be a text, or a list of messages that ends with the assistant's, "
        f"this is {_shorten(value)}"
    )


def _parse_message(value: Any, place: str, pictures: PictureColumn | None) -> Message:
    if isinstance(value, Mapping) and value.get("role") is None and isinstance(value.get("from"), str):
        return _parse_sharegpt(value, place)
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(
            f"{place}: a message must be an object with role and content (or from and value), this is {_shorten(value)}"
        )
    calls = tuple(_parse_call(call, place) for call in value.get("tool_calls") or ())
    content = value.get("content")
    if content is None and calls:
        content = ""
    images: list[Picture] = []
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_parse_part(part, place, pictures, images) for part in content)
    if not isinstance(content, str):
        raise DataError(
            f"{place}: the content of a {value['role']} message must be a text, this is {_shorten(content)}"
        )
    name, call_id = value.get("name"), value.get("tool_call_id")
    return Message(
        role=value["role"],
        content=content,
        name=name,
        tool_calls=calls,
        tool_call_id=call_id,
        images=tuple(images),
    )


def _parse_sharegpt(value: Mapping[str, Any], place: str) -> Message:
    speaker, text = value["from"], value.get("value")
    if speaker not in ROLES:
        raise DataError(f"{place}: a message is from {speaker!r}, which is not one of {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise DataError(f"{place}: the value of a message from {speaker} must be a text, this is {_shorten(text)}")
    if speaker != "function_call":
        return Message(role=ROLES[speaker], content=text)
    try:
        call = json.loads(text)
    except ValueError as exc:
        raise DataError(f"{place}: a function_call must be JSON with name and arguments ({exc})") from exc
    return Message(role="assistant", content="", tool_calls=(_parse_call(call, place),))


def _parse_part(part: Any, place: str, pictures: PictureColumn | None, images: list[Picture]) -> str:
    """Return the text of a part; a picture is put into `images`, and its text is the mark."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return plain_text(part["text"])
    if pictures is not None and isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS:
        images.append(pictures.read_part(part))
        return PICTURE_MARK
    kinds = "text parts" if pictures is None else "parts of type text, image and image_url"
    raise DataError(f"{place}: only {kinds} are supported in a message's content, this is {_shorten(part)}")


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


# --- the log ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _FormatCount:
    rows: int = 0
    used: dict[str, None] = field(default_factory=dict)  # in the order in which they were met
    others: dict[str, None] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)  # of the others, those that hold something


class FormatLog:
    """Counts the rows of a source by format, with the columns that were used and those that were not."""

    def __init__(self, what: str, *, others: str = NOT_USED) -> None:
        self._what, self._others = what, others
        self._counts: dict[str, _FormatCount] = {}

    def add(self, form: str, row: DataRow, used: Iterable[str | None]) -> None:
        count = self._counts.setdefault(form, _FormatCount())
        count.rows += 1
        known = {name for name in used if name is not None}
        count.used.update(dict.fromkeys(name for name in row.columns if name in known))
        others = [name for name in row.columns if name not in known]
        count.others.update(dict.fromkeys(others))
        count.filled.update(name for name in others if row.columns[name] not in (None, "", [], {}))

    def lines(self) -> list[str]:
        """Return "12,000 rows of talks.jsonl read as ShareGPT conversations: columns conversations; not used: id"."""
        lines = []
        for form, count in self._counts.items():
            others = [name for name in count.others if name not in count.used]
            named = ", ".join(others[:MOST_NAMED]) + (", ..." if len(others) > MOST_NAMED else "")
            rest = f"; {self._others}: {named}" if others else ""
            rows = "row" if count.rows == 1 else "rows"
            lines.append(f"{count.rows:,} {rows} of {self._what} read as {form}: columns {', '.join(count.used)}{rest}")
        return lines

    def write(self) -> None:
        """Log the lines; columns that hold something and are left out of the conversations are a warning."""
        for line in self.lines():
            logger.info("%s", line)
        dropped = [
            name
            for count in self._counts.values()
            for name in count.others
            if name in count.filled and name not in count.used and not _is_label(name)
        ]
        if dropped and self._others == NOT_USED:
            logger.warning(
                "%s: nothing is learned from what is in %s, which is not used; `columns` of the source says which "
                "columns are (docs/data.md)",
                self._what,
                ", ".join(list(dict.fromkeys(dropped))[:MOST_NAMED]),
                extra={"about_run": f"columns: {self._what}"},
            )


def _is_label(column: str) -> bool:
    """Tell whether a column only names its row."""
    name = column.lower()
    return name in LABELS or name.endswith("_id")
