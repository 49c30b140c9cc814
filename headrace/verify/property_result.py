"""The result of a check: measured figures beside their bounds, and the table of them. Pure; knows no measurement."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = (36, 46, 11, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured number, never negative, that must not exceed its bound; an infinite bound promises nothing."""

    label: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # false for NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyResult:
    """A property of this machine with this model, and whether it holds."""

    name: str
    figures: tuple[Figure, ...]
    detail: str  # what was measured

    def __post_init__(self) -> None:
        assert self.figures, "a check measures something"

    @property
    def ok(self) -> bool:
        return all(figure.ok for figure in self.figures)


def property_failed_to_run(name: str, reason: str) -> PropertyResult:
    """Return a failed result for a check that could not be carried out."""
    return PropertyResult(
        name=name, figures=(Figure(label="could not be measured", value=math.nan, bound=0.0),), detail=reason
    )


def failures(results: Sequence[PropertyResult]) -> tuple[str, ...]:
    """Return the names of the properties that do not hold."""
    return tuple(result.name for result in results if not result.ok)


def heading() -> str:
    return _row("property", "figure", "measured", "bound") + "verdict"


def rows(result: PropertyResult) -> str:
    """Format a line for each figure; a failed result also says what was measured."""
    names = (result.name, *[""] * (len(result.figures) - 1))
    lines = [
        _row(name, figure.label, _number(figure.value), "none" if math.isinf(figure.bound) else _number(figure.bound))
        + _verdict(figure)
        for name, figure in zip(names, result.figures, strict=True)
    ]
    return "\n".join(lines if result.ok else [*lines, f"    {result.detail}"])


def _row(*cells: str) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, COLUMNS, strict=True))


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == round(value) else f"{value:.1e}"


def _verdict(figure: Figure) -> str:
    if not figure.ok:
        return "FAILED"
    return "not promised" if math.isinf(figure.bound) else "ok"
