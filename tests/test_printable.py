"""Foreign text on a terminal and in a log: nothing in it acts, and nothing in it can pass for a record."""

import doctest
import logging
import sys
import unicodedata
from pathlib import Path

import pytest

from headrace import printable
from headrace.cli import main
from headrace.errors import RolloutError
from headrace.printable import MAX_LOGGED, OneLineFormatter, later_lines_indented, single_line, visible
from headrace.wiring.signals import log_to

HOSTILE = "bad\x1b]0;owned\x07\x1b[2J\r\n2026-01-01 00:00:00,000 INFO headrace: all is well\u202e\ud800\u2028\x9b31m"


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(printable)
    assert results.attempted > 3
    assert not results.failed


def test_no_control_or_format_character_is_left() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {unicodedata.category(character) for character in visible(every)}
    assert "Cc" in left  # newline and tab
    assert {character for character in visible(every) if unicodedata.category(character) == "Cc"} == {"\n", "\t"}
    assert not left & {"Cs", "Zl", "Zp"}
    # bidirectional controls, by their property; format characters that some scripts need for their letters stay
    assert not [character for character in visible(every) if unicodedata.bidirectional(character) in BIDI]
    assert "\n" not in single_line(every)
    assert visible("naïve — 漢字 👍 [red]") == "naïve — 漢字 👍 [red]"


BIDI = ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")


def record(message: str, *, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("headrace.x", logging.WARNING, "", 0, "it failed: %s", (message,), exc_info)  # type: ignore[arg-type]


def test_a_message_is_one_line_of_bounded_length() -> None:
    form = OneLineFormatter("%(levelname)s %(message)s")
    assert form.format(record(HOSTILE)).count("\n") == 0
    assert "\x1b" not in form.format(record(HOSTILE))
    long = form.format(record("x" * 10 * MAX_LOGGED))
    assert len(long) < MAX_LOGGED + 100
    assert long.endswith("more characters)")


def test_a_traceback_stays_readable_and_away_from_the_margin() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        failed = record("see below", exc_info=sys.exc_info())
    logging.Formatter().format(failed)  # leaves its own text of the exception in the record
    first, *rest = OneLineFormatter("%(message)s").format(failed).split("\n")
    assert first == "it failed: see below"
    assert rest[0] == "    Traceback (most recent call last):"
    assert any(line.strip().startswith("File ") for line in rest)
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_no_line_of_the_log_file_is_forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", False)  # pytest's own handlers take no surrogates
    with log_to(tmp_path / "log.txt"):
        logging.getLogger("headrace.x").warning("episode %s has no reward: %s", "0/1", HOSTILE)
    [line] = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert "WARNING headrace.x: episode 0/1 has no reward: bad\\x1b]0;owned" in line
    assert line == visible(line)


def test_an_error_on_the_terminal_cannot_look_like_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RolloutError(HOSTILE)

    monkeypatch.setattr("headrace.cli.app", fail)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().err
    assert [line[:2] for line in shown.splitlines()] == ["he", "  "]
    assert "\\x1b]0;owned" in shown
    assert later_lines_indented("one\n two") == "one\n   two"
