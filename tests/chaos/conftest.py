"""Print one table of everything that the chaos suite tried, at the end."""

from typing import Any

from support.chaos_table import TABLE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TABLE.cells:
        terminalreporter.section("chaos")
        terminalreporter.write_line(TABLE.text())
        for failure in TABLE.failures:
            terminalreporter.write_line(f"LOST  {failure}")
