"""Share the processes of the chaos suite, and print one table of everything that it tried at the end."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from support.chaos_process import ChaosPool
from support.chaos_table import TABLE


@pytest.fixture(scope="session")
def pool() -> Iterator[ChaosPool]:
    with contextlib.closing(ChaosPool()) as started:
        yield started


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TABLE.cells:
        terminalreporter.section("chaos")
        terminalreporter.write_line(TABLE.text())
        for failure in TABLE.failures:
            terminalreporter.write_line(f"LOST  {failure}")
