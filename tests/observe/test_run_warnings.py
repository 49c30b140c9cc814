"""A warning is shown once and counted; those about the run are kept for the progress line and the report."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.observe.report.run_report import write_report
from headrace.observe.run_warnings import RunWarning, keeping_warnings, read_warnings

logger = logging.getLogger("headrace.test_run_warnings")


class Lines(logging.Handler):
    """Keeps the lines that a handler would write."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Two handlers, as a run has: of the terminal and of log.txt. They must write the same."""
    handlers, package, level = (Lines(), Lines()), logging.getLogger("headrace"), logging.getLogger("headrace").level
    package.setLevel(logging.INFO)
    package.addHandler(handlers[0])
    logging.getLogger().addHandler(handlers[1])
    yield handlers[0].lines
    package.setLevel(level)
    package.removeHandler(handlers[0])
    logging.getLogger().removeHandler(handlers[1])
    assert handlers[0].lines == handlers[1].lines


def test_the_same_warning_is_shown_once_and_counted(tmp_path: Path, lines: list[str]) -> None:
    with keeping_warnings(tmp_path / "warnings.json"):
        for number in range(12):
            logger.warning("it is %s", "late")
            logger.info("step %d", number % 2)
        logger.warning("it is early")
        assert [line for line in lines if not line.startswith("step")] == [
            "it is late",
            "it is late (the same has been warned of 10 times)",
            "it is early",
        ]
        assert sum(line.startswith("step") for line in lines) == 12, "only warnings are counted"
    assert lines[-1] == "this was warned of 12 times: it is late"
    logger.warning("it is late")
    logger.warning("it is late")
    assert lines[-2:] == ["it is late", "it is late"], "after the run nothing is held back"
    assert not (tmp_path / "warnings.json").exists(), "none was about the run"


def test_warnings_that_say_so_are_one_whatever_their_texts(tmp_path: Path, lines: list[str]) -> None:
    with keeping_warnings(tmp_path / "warnings.json"):
        for number in range(5):
            logger.warning("episode %d failed: no tools", number, extra={"repeats": "failed: no tools"})
        assert lines == ["episode 0 failed: no tools"]
    assert lines[1:] == ["this was warned of 5 times: episode 0 failed: no tools"]


def test_warnings_about_the_run_are_kept_and_those_of_an_earlier_process_stay(tmp_path: Path) -> None:
    path = tmp_path / "warnings.json"
    with keeping_warnings(path) as warnings:
        logger.warning("500 are cut", extra={"about_run": "cuts"})
        logger.warning("equal in %d steps", 10, extra={"about_run": "equal"})
        logger.warning("something else")
        logger.error("an error", extra={"about_run": "error"})
        assert warnings.count == 3
    with keeping_warnings(path) as warnings:
        assert warnings.count == 3
        logger.warning("equal in %d steps", 100, extra={"about_run": "equal"})
        assert warnings.count == 3
    assert read_warnings(path)[:2] == (
        RunWarning(name="cuts", text="500 are cut"),
        RunWarning(name="equal", text="equal in 100 steps"),
    )


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]", '[{"name": "a"}]'])
def test_a_damaged_list_is_told_and_written_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "warnings.json"
    path.write_text(text)
    with keeping_warnings(path):
        assert "does not list warnings" in caplog.text
        logger.warning("500 are cut", extra={"about_run": "cuts"})
    assert read_warnings(path) == (RunWarning(name="cuts", text="500 are cut"),)


def test_the_report_begins_with_them(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nname = "mine"\n')
    record = {"stage": "rl", "step": 1, "reward/min": 0.0, "reward/max": 1.0, "credit/dead_groups": 0.97}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with keeping_warnings(tmp_path / "warnings.json"):
        logger.warning("5 <b> are cut", extra={"about_run": "cuts"})
        logger.warning("97 %% of the groups", extra={"about_run": "dead groups"})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    top = page.partition("<main>")[2].partition("The result")[0]
    assert "<li>5 &lt;b&gt; are cut</li>" in top
    assert "97% of the groups were dead" in top
    assert "97 % of the groups" not in page, "the metrics tell it for the whole run"
    (tmp_path / "warnings.json").unlink()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**record, "credit/dead_groups": 0.1}) + "\n")
    assert 'id="warnings"' not in write_report(tmp_path).read_text(encoding="utf-8")
