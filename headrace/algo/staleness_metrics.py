"""Measure how old the tokens of a training step are, and what their age costs. T tokens of a datum.

A token's lag is the trainer's version minus the version that sampled it. Tokens without a weight are not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.metrics import EffectiveSampleShare, Max, Mean, Metric, Metrics, StdDev, merge_metrics
from headrace.types import Datum, FloatArray

MAX_NAMED_LAG = 16  # older tokens share one name
MAX_LOG_WEIGHT = 20.0

Floats = npt.NDArray[np.float64]


def lag_name(lag: int) -> str:
    """Name a lag in the names of metrics.

    >>> lag_name(2), lag_name(40)
    ('lag_2', 'lag_16_plus')
    """
    return f"lag_{lag}" if lag < MAX_NAMED_LAG else f"lag_{MAX_NAMED_LAG}_plus"


def datum_lags(datum: Datum, *, version: int) -> Floats:
    """Compute version - `versions` at the trained tokens of a datum, in order."""
    lags = version - datum.arrays["versions"][datum.arrays["weights"] != 0].astype(np.float64)
    assert (lags >= 0).all(), "a token was sampled by a version that does not exist yet"
    return np.asarray(lags)


def lag_metrics(data: Sequence[Datum], *, version: int) -> dict[str, Metric]:
    """Measure the lags of a whole step.

    The mean over sequences of the lag of their oldest (head) and newest (tail) token, the share of tokens two or more
    versions old, and the histogram: the share of tokens at each lag that occurs.
    """
    per_datum = [lags for datum in data if len(lags := datum_lags(datum, version=version))]
    lags = np.concatenate(per_datum) if per_datum else np.zeros(0)
    values, counts = np.unique(np.minimum(lags, MAX_NAMED_LAG), return_counts=True)
    histogram = {lag_name(int(lag)): int(count) for lag, count in zip(values, counts, strict=True)}
    return {
        "rollout/lag_head_mean": Mean(sum(float(lags_T.max()) for lags_T in per_datum), len(per_datum)),
        "rollout/lag_tail_mean": Mean(sum(float(lags_T.min()) for lags_T in per_datum), len(per_datum)),
        "rollout/lag_share_2_plus": Mean(int((lags >= 2).sum()), len(lags)),
        **{f"histogram/{name}": Mean(count, len(lags)) for name, count in histogram.items()},
    }


def staleness_metrics(data: Sequence[Datum], logprobs: Iterable[FloatArray], *, version: int) -> dict[str, Metric]:
    """Measure how lag spreads the weights w = exp(proximal - sampler), in one minibatch of a step.

    Mean, deviation and maximum of w, deviation of log w and effective sample size, the last two also for each lag, all
    independent of how the loss treats stale tokens. Data without `proximal_logprobs` are measured by `logprobs`, those
    of the forward pass of their own update, so updates made before it in the step count too.
    """
    merged: dict[str, Metric] = {}
    for datum, scored in zip(data, logprobs, strict=True):
        trained = datum.arrays["weights"] != 0
        proximal = datum.arrays.get("proximal_logprobs", scored)
        log_weights = proximal[trained].astype(np.float64) - datum.arrays["sampler_logprobs"][trained]
        weights = np.exp(_bounded(log_weights))
        figures: dict[str, Metric] = {
            "staleness/weight_mean": Mean(float(weights.sum()), len(weights)),
            "staleness/weight_std": StdDev(float(weights.sum()), float((weights**2).sum()), len(weights)),
            "staleness/weight_max": Max(float(weights.max(initial=0.0))),
            **by_lag("staleness", log_weights, datum_lags(datum, version=version), weights),
        }
        merged = merge_metrics(merged, figures)
    return merged


def by_lag(area: str, log_weights: Floats, lags: Floats, weights: Floats) -> Metrics:
    """Measure `<area>/log_weight_std` and `<area>/effective_share`, over all tokens and for each lag.

    `log_weights` are as computed, NaN where not known; `weights` as used, 0 for rejected tokens.
    """
    assert log_weights.shape == lags.shape == weights.shape
    metrics: dict[str, Metric] = dict(_weights(area, "", log_weights, weights))
    named = np.minimum(lags, MAX_NAMED_LAG)
    for lag in np.unique(named):
        chosen = named == lag
        metrics.update(_weights(area, f"_{lag_name(int(lag))}", log_weights[chosen], weights[chosen]))
    return metrics


def _weights(area: str, suffix: str, log_weights: Floats, weights: Floats) -> Mapping[str, Metric]:
    finite = log_weights[~np.isnan(log_weights)]
    totals = float(weights.sum()), float((weights**2).sum())
    return {
        f"{area}/log_weight_std{suffix}": StdDev(float(finite.sum()), float((finite**2).sum()), len(finite)),
        f"{area}/effective_share{suffix}": EffectiveSampleShare(*totals, len(weights)),
    }


def _bounded(log_weights: npt.NDArray[Any]) -> Floats:
    return np.asarray(np.clip(log_weights, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
