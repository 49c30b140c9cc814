"""Define metrics that carry their reduction, so that chunks, micro-batches and ranks merge into the same number.

A value may be a float or a 0-d tensor; `float()` is called once, when the metric is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of values."""

    total: Any

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of `count` values, from their sum; 0 if there are none."""

    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of values."""

    top: Any

    def merge(self, other: "Max") -> "Max":
        return Max(max(float(self.top), float(other.top)))

    def value(self) -> float:
        return float(self.top)


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of values."""

    bottom: Any

    def merge(self, other: "Min") -> "Min":
        return Min(min(float(self.bottom), float(other.bottom)))

    def value(self) -> float:
        return float(self.bottom)


@dataclass(frozen=True, slots=True)
class StdDev:
    """The standard deviation of `count` values, from their sum and the sum of their squares."""

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
    """The effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number: 1 when all are equal."""

    total: Any  # sum w
    squares: Any  # sum w^2
    count: Any

    def merge(self, other: "EffectiveSampleShare") -> "EffectiveSampleShare":
        return EffectiveSampleShare(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        denominator = float(self.squares) * float(self.count)
        return float(self.total) ** 2 / denominator if denominator else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(error) / Var(target); NaN if all targets are equal, because there is no variance to explain."""

    error: StdDev
    target: StdDev

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(self.error.merge(other.error), self.target.merge(other.target))

    def value(self) -> float:
        spread = self.target.value()
        return 1.0 - (self.error.value() / spread) ** 2 if spread > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The balance of routers: E x sum over experts of (share of the choices x mean score), averaged over routers.

    It is 1 if all experts get alike. With `idle`, the share of experts that no token chose instead.
    """

    choices: Any  # [routers, E], how often each expert was chosen
    scores: Any  # [routers, E], sums over tokens; those of a token add up to 1
    idle: bool = False

    def merge(self, other: "ExpertLoad") -> "ExpertLoad":
        return ExpertLoad(self.choices + other.choices, self.scores + other.scores, self.idle)

    def value(self) -> float:
        if self.idle:
            return float((self.choices == 0).mean())
        share = self.choices / self.choices.sum(axis=1, keepdims=True)
        score = self.scores / self.scores.sum(axis=1, keepdims=True)
        return float((share * score).sum(axis=1).mean() * self.choices.shape[1])


Metric = Sum | Mean | Max | Min | StdDev | EffectiveSampleShare | ExplainedVariance | ExpertLoad
Metrics = Mapping[str, Metric]


def merge_metrics(left: Metrics, right: Metrics) -> dict[str, Metric]:
    """Unite two sets of metrics; a name in both is merged by its reduction, which must be of the same kind."""
    merged: dict[str, Metric] = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Read every metric as a float."""
    return {name: metric.value() for name, metric in metrics.items()}
