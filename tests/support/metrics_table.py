"""The table of docs/metrics.md that says which figures each loss has."""

import re

from support.paths import DOCS


def figures_by_loss() -> dict[str, dict[str, str]]:
    """Read the table "by loss": for each column, the cell of each row."""
    text = (DOCS / "metrics.md").read_text().split("### By loss")[1].split("\n### ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, *body = [row for row in rows if not set("".join(row)) <= {"-", " "}]
    return {name: {row[0]: row[place] for row in body} for place, name in enumerate(header) if place}


def promised(column: str) -> set[str]:
    """Return the metrics that a column names, but for those of a term that a cell says to add."""
    cells = figures_by_loss()[column].values()
    plain = [re.sub(r"and `[^`]+` with `[^`]+`", "", cell) for cell in cells]
    return {name for cell in plain for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", cell)}
