"""Read conversations for SFT, and mix several sets of them by weight."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.data.picture_columns import LeftOut
from headrace.data.row_formats import FormatLog, check_columns, parse_reply, recognise, with_system
from headrace.data.rows import DataRow, DataSource, read_rows, rows_of
from headrace.data.shuffle import fingerprint, permutation
from headrace.errors import CheckpointError, DataError, PictureError
from headrace.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConversation:
    """A conversation in which tools were offered, which the chat template has to show, or whose turns have weights."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    weights: tuple[float, ...] = ()  # one for each message; none: all assistant turns count alike


Conversation = tuple[Message, ...] | ToolConversation
Item = TypeVar("Item")


def load_conversations(source: DataSource, *, base: Path | None = None) -> list[Conversation]:
    """Load the conversations of a source that has rows, in any of the formats of `row_formats`."""
    what = source.path or source.name or source.type
    return _conversations(read_rows(source, base=base), columns=source.columns, system=source.system, what=what)


def first_conversation(source: DataSource, *, base: Path | None = None) -> Conversation:
    """Load the conversation of the first row, and read no other."""
    what = source.path or source.name or source.type
    check_columns(source.columns)
    for row in read_rows(source, base=base):
        return _to_conversation(row, source.columns, source.system, FormatLog(what))
    raise DataError(f"{what} has no rows: there is nothing to train on")


def conversations_from_rows(
    rows: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str] | None = None, system: str | None = None
) -> list[Conversation]:
    """Make conversations to imitate from any iterable of dicts: `messages`, a `prompt` with the reply in `answer`, or
    the columns of ShareGPT, Alpaca or TRL.

    `columns` maps these names to those of the rows. `system` is put before every conversation that has no system
    message. Raises DataError that names the row.

    >>> [conversation] = conversations_from_rows([{"prompt": "1 + 1 =", "answer": "2"}])
    >>> [(message.role, message.content) for message in conversation]
    [('user', '1 + 1 ='), ('assistant', '2')]
    """
    return _conversations(rows_of(rows, "rows"), columns=columns or {}, system=system, what="the iterable")


def _conversations(
    rows: Iterator[DataRow], *, columns: Mapping[str, str], system: str | None, what: str
) -> list[Conversation]:
    check_columns(columns)
    log = FormatLog(what)
    conversations: list[Conversation] = []
    left_out = LeftOut(what)
    for row in rows:
        try:
            conversations.append(_to_conversation(row, columns, system, log))
        except PictureError as exc:
            left_out.add(exc)
    left_out.log(len(conversations))
    if not conversations:
        raise DataError("the source has no rows: there is nothing to train on")
    log.write()
    return conversations


def _to_conversation(row: DataRow, columns: Mapping[str, str], system: str | None, log: FormatLog) -> Conversation:
    """Make a conversation of a row: a reply in a column of its own is put after messages that do not end with the
    assistant, and a column `tools` has the tools that were offered."""
    read = recognise(row, columns)
    messages, answer = with_system(read.messages, system), read.answer
    written = _written_weights(row.columns[read.columns[0]])
    written = [None] * (len(messages) - len(written)) + written  # a system message was put before them
    if answer is not None and messages[-1].role != "assistant":
        messages = (*messages, *parse_reply(row.columns[answer], row.place, answer))
        written += _written_weights(row.columns[answer])
    else:
        answer = None
    if not any(message.role == "assistant" for message in messages):
        raise DataError(
            f"{row.place}: there is no assistant message and no column with the reply (answer, completion, response, "
            f"output): nothing to learn from; the columns are {', '.join(row.columns)}; map the reply's, "
            'columns = {answer = "..."}'
        )
    if messages[0].role == "assistant":
        raise DataError(f"{row.place}: the conversation starts with the assistant; put a user message before it")
    tools = row.columns.get("tools")
    weights = _weights(messages, written, row.place)
    log.add(read.form, row, (*read.columns, answer, "tools"))
    if not tools and not weights:
        return messages
    return ToolConversation(messages=messages, tools=_tools(tools, row.place) if tools else (), weights=weights)


def _written_weights(value: Any) -> list[Any]:
    """Return what the messages of a column have as `weight`; None for those that have none."""
    if isinstance(value, str):
        return [None]
    return [message.get("weight") if isinstance(message, Mapping) else None for message in value]


def _weights(messages: Sequence[Message], written: Sequence[Any], place: str) -> tuple[float, ...]:
    """Check the weights of a conversation's messages: OpenAI's 0 and 1, or any number from 0 on.

    Returns none if no message has one. Those of other messages than the assistant's may only be 0: they are not
    trained.
    """
    assert len(written) == len(messages)
    if all(weight is None for weight in written):
        return ()
    for number, (message, weight) in enumerate(zip(messages, written, strict=True)):
        if weight is None:
            continue
        where = f"{place}: the weight of message {number} ({message.role})"
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(f"{where} must be a number of 0 or more, this is {weight!r}")
        if weight and message.role != "assistant":
            raise DataError(f"{where} is {weight:g}, but only the assistant's are trained: write 0, or leave it out")
    weights = tuple(1.0 if weight is None else float(weight) for weight in written)
    if not any(weight for message, weight in zip(messages, weights, strict=True) if message.role == "assistant"):
        raise DataError(f"{place}: every assistant message has weight 0: nothing to learn from")
    return weights


def _tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    tools = tuple(value) if isinstance(value, list | tuple) else (None,)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{place}: tools must be a list of {{"type": "function", "function": {{"name": ...}}}}, or not there'
            )
    return tools


def messages_of(conversation: Conversation) -> tuple[Message, ...]:
    """Return the messages of a conversation, with or without tools."""
    return conversation.messages if isinstance(conversation, ToolConversation) else conversation


def with_system_message(conversation: Conversation, system: str | None) -> Conversation:
    """Put a system message before a conversation that has none."""
    messages = with_system(messages_of(conversation), system)
    if not isinstance(conversation, ToolConversation):
        return messages
    put_before = (1.0,) * (len(messages) - len(conversation.messages)) if conversation.weights else ()
    return replace(conversation, messages=messages, weights=(*put_before, *conversation.weights))


def prompt_of(conversation: Conversation) -> tuple[Message, ...]:
    """Return the messages before the first reply."""
    return tuple(takewhile(lambda message: message.role != "assistant", messages_of(conversation)))


class ConversationMixture(Generic[Item]):
    """Draws without end from several sequences by weight, each shuffled anew every epoch of its own.

    >>> mixture = ConversationMixture([(["easy"], 3.0), (["hard"], 1.0)])
    >>> mixture.next_batch(4)
    ('easy', 'easy', 'hard', 'easy')

    Draw t (from 1) goes to the part with the largest deficit w_i t - n_i, n_i its draws so far and w_i its share:
    the deficits add up to 0 and none falls to -1 or below, so none of k > 1 reaches k - 1, however long the run.
    The counts n_i are the whole state: epoch and place of a part are n_i divided by its length.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Item], float]], seed: int = 0) -> None:
        if not parts or any(not items for items, _ in parts):
            raise DataError("a mixture needs at least one part, and none may be empty")
        if any(not (math.isfinite(weight) and weight > 0) for _, weight in parts):
            raise DataError("the weights of a mixture must be positive numbers")
        self._parts = tuple(items for items, _ in parts)
        self._shares = integer_shares([weight for _, weight in parts])
        self._seed = seed
        self._fingerprint = fingerprint([(fingerprint(items), weight) for items, weight in parts])
        self._counts = [0] * len(parts)
        self._orders: list[tuple[int, npt.NDArray[np.int64]]] = [self._order(i, 0) for i in range(len(parts))]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of draws from each part so far."""
        return tuple(self._counts)

    def next(self) -> Item:
        """Draw the next item."""
        part = most_owed(self._shares, self._counts)
        epoch, offset = divmod(self._counts[part], len(self._parts[part]))
        if self._orders[part][0] != epoch:
            self._orders[part] = self._order(part, epoch)
        self._counts[part] += 1
        return self._parts[part][int(self._orders[part][1][offset])]

    def next_batch(self, n: int) -> tuple[Item, ...]:
        """Draw the next n items."""
        assert n >= 0
        return tuple(self.next() for _ in range(n))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self._counts), "seed": self._seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor; raises CheckpointError if it was made from other data, weights or seed."""
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the conversations or their weights are not those of the checkpoint, so its place in them is lost: "
                "resume with the data the run started with, or start a new run with the checkpoint as model.path"
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the conversations were shuffled with seed {state['seed']}, not {self._seed}: resume with it"
            )
        self._counts = [int(count) for count in state["counts"]]

    def _order(self, part: int, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
        return epoch, permutation(len(self._parts[part]), key=(self._seed, part), epoch=epoch)


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in exactly the weights' proportion; 0.1 means a tenth."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * denominator) for fraction in fractions)


def most_owed(shares: Sequence[int], counts: Sequence[int]) -> int:
    """Return the part of a mixture that is farthest behind its share after `counts` draws."""
    turn, total = sum(counts) + 1, sum(shares)
    deficits = [
        share * turn - count * total for share, count in zip(shares, counts, strict=True)
    ]  # whole numbers: no rounding, however long the run
    return deficits.index(max(deficits))
