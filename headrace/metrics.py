"""Metrics that carry their reduction, so that parts of a step merge into the same number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# --- metrics: every one carries its reduction, so that chunks, micro-batches and ranks merge -------------------------


@dataclass(frozen=True, slots=True)
class Sum:
    """Values may be floats or 0-d tensors; `float()` happens once, when they are read."""

    total: Any

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Mean:
    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class Max:
    top: Any

    def merge(self, other: "Max") -> "Max":
        return Max(max(float(self.top), float(other.top)))

    def value(self) -> float:
        return float(self.top)


@dataclass(frozen=True, slots=True)
class Min:
    bottom: Any

    def merge(self, other: "Min") -> "Min":
        return Min(min(float(self.bottom), float(other.bottom)))

    def value(self) -> float:
        return float(self.bottom)


@dataclass(frozen=True, slots=True)
class StdDev:
    """Standard deviation of `count` values, from their sum and the sum of their squares."""

    total: Any
    squares: Any
    count: Any

    def merge(self, other: "StdDev") -> "StdDev":
        return StdDev(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        mean = float(self.total) / count if count else 0.0
        return max(float(self.squares) / count - mean * mean, 0.0) ** 0.5 if count else 0.0


@dataclass(frozen=True, slots=True)
class EffectiveSampleShare:
    """Effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number: 1 when all are equal."""

    total: Any
    squares: Any
    count: Any

    def merge(self, other: "EffectiveSampleShare") -> "EffectiveSampleShare":
        return EffectiveSampleShare(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        below = float(self.squares) * float(self.count)
        return float(self.total) ** 2 / below if below else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(error) / Var(target); NaN where all targets are equal, because nothing is to be explained."""

    error: StdDev
    target: StdDev

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(self.error.merge(other.error), self.target.merge(other.target))

    def value(self) -> float:
        spread = self.target.value()
        return 1.0 - (self.error.value() / spread) ** 2 if spread > 0 else float("nan")


Metric = Sum | Mean | Max | Min | StdDev | EffectiveSampleShare | ExplainedVariance
Metrics = Mapping[str, Metric]


def merge_metrics(left: Metrics, right: Metrics) -> dict[str, Metric]:
    """Union of both; a name in both is merged by its reduction (which must be the same kind)."""
    merged: dict[str, Metric] = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value() for name, metric in metrics.items()}
