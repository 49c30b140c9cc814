"""Render text of models, reward functions, environments and strangers' files so that it cannot act on a terminal or a
log: control characters, direction marks and invisible characters become visible escapes. Standard library only.
"""

import copy
import logging
import re
import traceback
from types import TracebackType

# C0 and C1 controls but newline and tab; soft hyphen; line and paragraph separators; direction marks and overrides;
# zero-width and filler characters; halves of surrogate pairs, which no file can hold; tags and variation selectors.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
MAX_LINE = 2000  # characters of a foreign text on one line
MAX_LOGGED = 8000  # characters of a message of the log


def visible(text: str) -> str:
    r"""Escape characters that act instead of being displayed; newlines and tabs stay.

    >>> visible("a\x1b[31mb\u202ec\n")
    'a\\x1b[31mb\\u202ec\n'
    """
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub(lambda match: _escape(match[0]), text)


def single_line(text: str, limit: int = MAX_LINE) -> str:
    r"""Render a text on one line: newlines and tabs are escaped as well, and what is beyond `limit` is counted.

    >>> single_line("went wrong\n12:00:00 INFO all is well")
    'went wrong\\n12:00:00 INFO all is well'
    >>> single_line("abcdef", 4)
    'abcd… (2 more characters)'
    """
    shown = visible(text[:limit]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def later_lines_indented(text: str) -> str:
    r"""Render a text on several lines, of which only the first begins at the margin.

    >>> later_lines_indented("two problems:\nheadrace: all is well")
    'two problems:\n  headrace: all is well'
    """
    return "\n  ".join(visible(text).split("\n"))


class OneLineFormatter(logging.Formatter):
    """Formats a record of the log: its message on one line of bounded length, and a traceback below it, indented.

    No message can look like a record of its own: only records begin at the margin.
    """

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_text = None  # another formatter may have left its text there
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = single_line(record.message, MAX_LOGGED)
        return super().formatMessage(record)

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return _indented("".join(traceback.format_exception(*ei)))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text.rstrip("\n")).split("\n"))


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
