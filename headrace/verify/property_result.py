"""What a proof says: measured figures beside their bounds. Pure; how figures are measured is in the modules beside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = (36, 46, 11, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number, never negative, which must not exceed its bound; an infinite bound promises nothing."""

    label: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # NaN is not


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyResult:
    """A property of this machine with this model. `detail` says what was looked at."""

    name: str
    figures: tuple[Figure, ...]
    detail: str

    def __post_init__(self) -> None:
        assert self.figures, "a proof measures something"

    @property
    def ok(self) -> bool:
        return all(figure.ok for figure in self.figures)


def property_failed_to_run(name: str, reason: str) -> PropertyResult:
    """A proof that could not be carried out has failed."""
    return PropertyResult(
        name=name, figures=(Figure(label="could not be measured", value=math.nan, bound=0.0),), detail=reason
    )


def failures(proofs: Sequence[PropertyResult]) -> tuple[str, ...]:
    """Names of the properties that do not hold."""
    return tuple(proof.name for proof in proofs if not proof.ok)


def heading() -> str:
    return _row("property", "figure", "measured", "bound") + "verdict"


def rows(proof: PropertyResult) -> str:
    """A line for each figure; a failed proof also says what was looked at."""
    names = (proof.name, *[""] * (len(proof.figures) - 1))
    lines = [
        _row(name, figure.label, _number(figure.value), "none" if math.isinf(figure.bound) else _number(figure.bound))
        + _verdict(figure)
        for name, figure in zip(names, proof.figures, strict=True)
    ]
    return "\n".join(lines if proof.ok else [*lines, f"    {proof.detail}"])


def _row(*cells: str) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, COLUMNS, strict=True))


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == round(value) else f"{value:.1e}"


def _verdict(figure: Figure) -> str:
    if not figure.ok:
        return "FAILED"
    return "not promised" if math.isinf(figure.bound) else "ok"
