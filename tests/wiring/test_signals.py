"""The log file of a run, on a disk that fails."""

import logging
from pathlib import Path

import pytest

from headrace.errors import RunFolderError
from headrace.wiring.signals import log_to

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a file that is always full")
def test_a_log_on_a_full_disk_is_one_warning_and_no_failure(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"), log_to(FULL):
        logging.getLogger("headrace.x").info("one")
        logging.getLogger("headrace.x").info("two")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "/dev/full cannot be written (No space left on device); lines are missing from it"
    ]
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFolderError, match=r"the log .*log\.txt cannot be written"),
        log_to(tmp_path / "nowhere" / "log.txt"),
    ):
        pass
