"""`.ci/run` with a `make` that only pretends: which suites run, what the table says, how it ends."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

SCRIPT = ROOT / ".ci/run"
MAKE = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *"$ENDLESS") sleep 60 ;; esac
for target in "$@"; do
    case " $FAILING " in *" $target "*)
        echo "FAILED tests/test_a.py::test_b - assert"
        echo "1 failed, 2 passed in 3.21s"
        exit 2 ;;
    esac
done
case "$*" in
    demo | test-wheel) echo "no tests of pytest" ;;
    *check*) echo "1503 passed, 4 skipped in 412.05s (0:06:52)" ;;
    *) echo "============ 12 passed, 1500 deselected in 300.00s (0:05:00) ============" ;;
esac
"""
LONG = {  # minutes
    "test-ranks": 15, "test-cookbook": 12, "test-chaos": 17, "test-ray": 18, "test-vllm": 30, "test-site": 18,
    "test-sandbox": 15, "test-harnesses": 15,
}  # fmt: skip
ALL = ["demo", "-k check test", "test-wheel", *(f"-k {name}" for name in ("test-slow", *LONG))]
AGAIN = " PYTEST_ARGS=--last-failed --last-failed-no-failures=none"


class Ended:
    """How the script ended: status, calls of make, rows of the table by suite, last line."""

    def __init__(self, status: int, calls: list[str], output: str) -> None:
        self.status, self.calls = status, calls
        self.lines = lines = output.splitlines()
        self.last = lines[-1]
        table = lines[next(i for i, line in enumerate(lines) if line.startswith("suite ")) + 1 :]
        self.rows = {line.split()[0]: line for line in table[: table.index("")]}


def ci_run(
    folder: Path,
    *,
    script: Path = SCRIPT,
    failing: str = "",
    endless: str = "no target",
    budget_s: int = 5100,
    make: str = MAKE,
) -> Ended:
    pretended = folder / "make"
    pretended.write_text(make)
    pretended.chmod(0o755)
    calls = folder / "calls.txt"
    calls.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILING": failing,
        "ENDLESS": endless,
        "CI_BUDGET_S": str(budget_s),
    }
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return Ended(done.returncode, calls.read_text().splitlines(), done.stdout)


def test_every_suite_runs_and_the_last_line_is_that_of_make_test(tmp_path: Path) -> None:
    ended = ci_run(tmp_path)
    assert (ended.status, ended.calls) == (0, ALL)
    assert ended.last == "1503 passed, 4 skipped in 412.05s (0:06:52)"
    ran = [call.split()[-1] for call in ALL]
    assert list(ended.rows) == ran
    assert all(" passed " in ended.rows[name] for name in ran)
    assert "12 passed, 1500 deselected" in ended.rows["test-slow"]


@pytest.mark.parametrize("target", ["demo", "test-wheel"])
def test_a_failed_suite_hides_no_other_and_fails_the_whole(tmp_path: Path, target: str) -> None:
    ended = ci_run(tmp_path, failing=target)
    assert (ended.status, ended.calls) == (1, ALL)
    row = ended.rows[target]
    assert " failed " in row
    assert row.endswith("1 failed, 2 passed in 3.21s")


def test_what_no_longer_fits_is_left_out(tmp_path: Path) -> None:
    ended = ci_run(tmp_path, budget_s=30 * 60 - 1)  # less than test-slow and test-vllm may take, more than the others
    assert ended.calls == [name for name in ALL if name not in ("-k test-slow", "-k test-vllm")]
    assert " left out " in ended.rows["test-slow"]
    assert "required; its limit is 30:00 min" in ended.rows["test-slow"]
    assert ended.status == 1
    assert ended.last == "1503 passed, 4 skipped in 412.05s (0:06:52)"


def test_an_optional_suite_may_be_left_out(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert "suite test-slow 30 required" in text
    changed = tmp_path / "ci/run"
    changed.parent.mkdir()
    changed.write_text(text.replace("suite test-slow 30 required", "suite test-slow 30 optional"))
    ended = ci_run(tmp_path, script=changed, budget_s=30 * 60 - 1)
    assert " left out " in ended.rows["test-slow"]
    assert ended.status == 0


@pytest.mark.parametrize("target", ["test", "test-slow", "test-ray"])
def test_what_failed_runs_once_more(tmp_path: Path, target: str) -> None:
    ended = ci_run(tmp_path, failing=target)
    assert ended.calls == [
        each for name in ALL for each in ((name, name + AGAIN) if name.split()[-1] == target else (name,))
    ]
    assert " failed " in ended.rows[target]
    assert ended.status == 1
    (tmp_path / "second").mkdir()
    once = ci_run(
        tmp_path / "second", failing=target, make=MAKE.replace("exit 2", 'case "$*" in *--last*) ;; *) exit 2 ;; esac')
    )
    assert " passed " in once.rows[target]
    assert once.status == 0
    assert once.lines[once.lines.index("failed at least once:") + 1] == "tests/test_a.py::test_b"


def test_an_optional_suite_that_reaches_its_limit_is_cut_off(tmp_path: Path) -> None:
    changed = tmp_path / "ci/run"
    changed.parent.mkdir()
    changed.write_text(SCRIPT.read_text().replace("limit_s=$((limit * 60))", "limit_s=$((limit / 15))"))
    ended = ci_run(tmp_path, script=changed, endless="test-ranks")
    assert re.search(r" cut off .*stopped at its limit of 0:01 min$", ended.rows["test-ranks"])
    assert ended.status == 0


@pytest.mark.parametrize(("name", "limit"), LONG.items())
def test_a_long_suite_is_left_out_in_words_when_time_is_short(tmp_path: Path, name: str, limit: int) -> None:
    text = SCRIPT.read_text().replace("suite test-slow 30 required", "suite test-slow 1 required")
    short = tmp_path / "short/run"
    short.parent.mkdir()
    short.write_text(text)
    ended = ci_run(tmp_path, script=short, budget_s=limit * 60 - 1)
    assert f"-k {name}" not in ended.calls
    assert f"optional; its limit is {limit}:00 min, the budget has" in ended.rows[name]
    assert any(line.startswith(f"== {name} left out: optional; its limit is {limit}:00 min") for line in ended.lines)
    assert ended.status == 0


def test_a_suite_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    ended = ci_run(tmp_path, endless="demo", budget_s=4)
    assert ended.calls == ["demo"]
    assert re.search(r"stopped at its limit of 0:0[1-4] min$", ended.rows["demo"])  # a busy machine starts it late
    assert " left out " in ended.rows["test"]
    assert (ended.status, ended.last) == (1, "the tests did not run to their end")
