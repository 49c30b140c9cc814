"""The report while a run lasts: written again now and then, never in the way of training."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import FolderLockedError, RunFolderError
from headrace.observe.report.report_process import finish_report
from headrace.observe.report.report_sink import ReportSink


def written(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


def test_the_report_is_written_when_it_is_due(synthetic_run: Callable[..., Path]) -> None:
    folder = synthetic_run()
    report = folder / "report.html"
    now_s = [0.0]
    sink = ReportSink(folder, every_s=60.0, clock=lambda: now_s[0])
    sink.log(1, {})
    sink.close()
    assert not report.exists(), "nothing is due yet"
    now_s[0] = 61.0
    sink.log(2, {})
    assert written(report)
    sink.close()
    report.unlink()
    now_s[0] = 100.0
    sink.log(3, {})
    sink.close()
    assert not report.exists(), "a minute after the last one"


def test_a_folder_of_another_process_is_left_alone(synthetic_run: Callable[..., Path]) -> None:
    def taken() -> None:
        raise FolderLockedError("taken over")

    sink = ReportSink(synthetic_run(), check_owner=taken, every_s=0.0)
    with pytest.raises(FolderLockedError):
        sink.log(1, {})


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in place of a folder")
    sink = ReportSink(tmp_path / "file", every_s=0.0)
    with caplog.at_level(logging.WARNING):
        sink.log(1, {})
        sink.close()
    assert "cannot write" in caplog.text


def test_it_is_drawn_in_another_process_whose_warnings_are_told_here(
    synthetic_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(**_: object) -> None:
        raise AssertionError("what all steps of a run take is not this process's")

    monkeypatch.setattr("headrace.observe.report.run_report.render", never)
    folder = synthetic_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    sink = ReportSink(folder, every_s=0.0)
    with caplog.at_level(logging.WARNING):
        sink.log(1, {})
        sink.close()
    assert (folder / "report.html").exists()
    assert [text for text in caplog.messages if "the report leaves out a line of metrics.jsonl" in text]


def test_the_end_of_a_run_does_not_wait_for_ever_for_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    endless = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr("headrace.observe.report.report_sink.start_report", lambda folder: endless)
    monkeypatch.setattr("headrace.observe.report.report_sink.CLOSE_S", 0.05)
    sink = ReportSink(tmp_path, every_s=0.0)
    sink.log(1, {})
    sink.close()
    assert "is not written after 0.05 s" in caplog.text
    assert endless.wait(50) != 0, "the process is ended with the run"


def test_a_report_that_takes_too_long_is_ended_with_what_it_has_started() -> None:
    began = time.monotonic()
    command = ["sh", "-c", "sleep 100 & sleep 100"]
    endless = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with pytest.raises(RunFolderError, match=r"longer than 0\.2 s"):
        finish_report(endless, limit_s=0.2)
    assert time.monotonic() - began < 9.0, "the pipes are closed"


def test_a_report_that_takes_too_long_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    endless = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pytest.raises(RunFolderError, match=r"longer than 0\.05 s"):
        finish_report(endless, limit_s=0.05)
    assert endless.returncode is not None
