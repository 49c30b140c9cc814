"""Measure a request: the figures of any forward pass, and those of the rewards, values and returns it brought."""

from collections.abc import Sequence

import numpy as np

from headrace.algo.losses.forward_metrics import deviation, forward_metrics, over_trained
from headrace.metrics import ExplainedVariance, Max, Mean, Metric, Min
from headrace.types import Datum, FloatArray, LossSpec


def request_metrics(loss: LossSpec, data: Sequence[Datum], outputs: Sequence[FloatArray]) -> dict[str, Metric]:
    """Return the figures of one request; `outputs` are log-probs of the targets, or numbers of a scalar head."""
    metrics = forward_metrics(loss, data, outputs)
    if all("returns" in datum.arrays and "values" in datum.arrays for datum in data):
        trained = [datum.arrays["weights"] != 0 for datum in data]
        returns = over_trained([datum.arrays["returns"] for datum in data], trained)
        values = over_trained([datum.arrays["values"] for datum in data], trained)
        metrics["critic/explained_variance"] = ExplainedVariance(deviation(returns - values), deviation(returns))
        metrics["critic/return_std"] = deviation(returns)
    if all("rewards" in datum.arrays for datum in data):
        rewards_S = np.array([float(datum.arrays["rewards"].sum()) for datum in data])
        metrics["reward/mean"] = Mean(float(rewards_S.sum()), len(rewards_S))
        metrics["reward/min"], metrics["reward/max"] = Min(float(rewards_S.min())), Max(float(rewards_S.max()))
    return metrics
