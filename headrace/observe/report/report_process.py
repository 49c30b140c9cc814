"""Write the report of a run in a process of its own: `python -m headrace.observe.report.report_process FOLDER`.

A report is drawn from all steps of a run, so what it takes grows with the run: memory, and time of Python's lock. A
training process has neither to spare, and would keep the holes that such memory leaves between its own.
"""

import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from headrace.errors import RunFolderError
from headrace.observe.report.run_report import write_report
from headrace.printable import single_line

logger = logging.getLogger(__name__)

LIMIT_S, KILL_S = 600.0, 10.0  # that one report may take, and the end of a process that was killed
MAX_WORDS = 1000  # characters of a line that the process says
NOT_WRITTEN = 2  # the status of a process whose last line says why there is no report


def start_report(folder: Path) -> "subprocess.Popen[str]":
    """Start a process that writes the report of a run folder; Ctrl-C on the terminal does not reach it."""
    packages = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.observe.report.report_process", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish_report(process: "subprocess.Popen[str]", *, limit_s: float = LIMIT_S) -> None:
    """Wait for the process of `start_report` and log its warnings here.

    Raises RunFolderError if it wrote no report. After `limit_s` it is killed.
    """
    try:
        told, failed = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(ProcessLookupError):  # what it has started holds its pipes
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a disk does not let go of it
            process.communicate(timeout=KILL_S)
        raise RunFolderError(f"it took longer than {limit_s:g} s") from None
    lines = [single_line(line, MAX_WORDS) for line in told.splitlines() if line.strip()]
    if process.returncode != 0:
        why = lines if process.returncode == NOT_WRITTEN else failed.strip().splitlines()
        raise RunFolderError(why[-1] if why else f"its process ended with status {process.returncode}")
    for line in lines:
        logger.warning("%s", line)


def main() -> None:
    """Write the report, and print a line for each warning and for the reason why it cannot be written."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    try:
        write_report(Path(sys.argv[1]))
    except RunFolderError as exc:
        logger.error("%s", exc)
        sys.exit(NOT_WRITTEN)


if __name__ == "__main__":
    main()
