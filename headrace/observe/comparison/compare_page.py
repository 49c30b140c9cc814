"""Write a comparison as one self-contained page, in the report's style and under the same rules."""

from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from headrace.observe.comparison.compared import ArmComparison
from headrace.observe.comparison.comparison_tables import (
    PAIRED_COLUMNS,
    figure_cells,
    paired_rows,
    score_text,
    sentences,
)
from headrace.observe.comparison.overlay import arm_style, other_overlays, overlaid_charts
from headrace.observe.json_lines import write_whole
from headrace.observe.report.html_page import page_environment, report_parts


def write_comparison(path: Path, title: str, comparison: ArmComparison, *, arms: str = "runs") -> Path:
    """Write the page and return its path; `arms` is the word for what is compared. Raises RunFolderError."""
    write_whole(path, comparison_page(title, comparison, arms=arms))
    return path


def comparison_page(title: str, comparison: ArmComparison, *, arms: str = "runs") -> str:
    """Render the page; pure but for reading the template beside this file."""
    package = files("headrace.observe.comparison")
    parts = report_parts()
    style = parts.pop("style") + Markup((package / "compare.css").read_text(encoding="utf-8"))
    held_out = comparison.held_out
    template = (package / "compare.html").read_text(encoding="utf-8")
    return (
        page_environment()
        .from_string(template)
        .render(
            title=title,
            what=arms,
            arms=[(arm_style(index), arm.label, len(arm.runs)) for index, arm in enumerate(comparison.arms)],
            several_runs=any(len(arm.runs) > 1 for arm in comparison.arms),
            scores=[(row.name, [score_text(row.name, one) for one in row.arms]) for row in held_out.rows],
            tasks=tuple(dict.fromkeys(held_out.tasks)),
            paired_columns=PAIRED_COLUMNS,
            paired=paired_rows(comparison),
            figures=[(row.name, figure_cells(row.name, row.arms)) for row in comparison.figures],
            differences=[(row.key, row.arms) for row in comparison.differences],
            sentences=sentences(comparison),
            charts=overlaid_charts(comparison.arms),
            others=other_overlays(comparison.arms),
            rows=comparison.rows,
            tally=comparison.tally,
            style=style,
            **parts,
        )
    )
