"""Measure what the data of a forward pass and the model's answer say of each other, besides what the loss reports.

Each figure is there where it is defined for the loss (docs/metrics.md has the table), and computed in numpy from what
the backend has returned: no further pass. S sequences, P pairs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import find_loss
from headrace.metrics import Max, Mean, Metric, Min, StdDev, Sum
from headrace.types import Datum, FloatArray, LossSpec

Floats = npt.NDArray[np.float64]
Masks = Sequence[npt.NDArray[np.bool_]]


def forward_metrics(loss: LossSpec, data: Sequence[Datum], outputs: Sequence[FloatArray]) -> dict[str, Metric]:
    """Return the figures of one forward pass; `outputs` are log-probs of the targets, or numbers of a scalar head."""
    read = loss_inputs(find_loss(loss.fn))
    trained = [datum.arrays["weights"] != 0 for datum in data]
    metrics: dict[str, Metric] = {"train/trained_tokens": Sum(float(sum(int(mask.sum()) for mask in trained)))}
    if "policy_logprobs" in read.outputs and all(array.ndim == 1 for array in outputs):
        logprobs = over_trained(outputs, trained)
        metrics["loss/nll"] = Mean(-float(logprobs.sum()), len(logprobs))
    elif "scores" in read.outputs and all("preferences" in datum.arrays for datum in data):
        metrics |= _scores(data, outputs, trained)
    if "advantages" in (*read.required, *read.optional) and all("advantages" in datum.arrays for datum in data):
        advantages = over_trained([datum.arrays["advantages"] for datum in data], trained)
        if len(advantages):
            metrics["loss/advantage_min"] = Min(float(advantages.min()))
            metrics["loss/advantage_max"] = Max(float(advantages.max()))
    return metrics


def over_trained(arrays: Sequence[FloatArray], trained: Masks) -> Floats:
    """Lay the arrays end to end, at trained positions only."""
    kept = [array[mask] for array, mask in zip(arrays, trained, strict=True)]
    return np.concatenate([np.zeros(0), *kept], dtype=np.float64)


def deviation(values: Floats) -> StdDev:
    """Make the standard deviation of values a metric that merges."""
    return StdDev(float(values.sum()), float((values * values).sum()), len(values))


def _scores(data: Sequence[Datum], outputs: Sequence[FloatArray], trained: Masks) -> dict[str, Metric]:
    """Measure the scores of sequences, and the margins of pairs that have both sides."""
    scored = [index for index, mask in enumerate(trained) if mask.any()]
    scores_S = np.array([float(outputs[index][trained[index]].mean()) for index in scored])
    if not len(scores_S):
        return {}
    sides: dict[int | None, dict[bool, list[float]]] = {}
    for index, score in zip(scored, scores_S, strict=True):
        preferred = bool(data[index].arrays["preferences"][trained[index]][0] > 0)
        sides.setdefault(data[index].unit, {}).setdefault(preferred, []).append(float(score))
    margins_P = np.array(
        [
            np.mean(pair[True]) - np.mean(pair[False])
            for unit, pair in sides.items()
            if unit is not None and len(pair) > 1
        ]
    )
    metrics: dict[str, Metric] = {
        "loss/score_mean": Mean(float(scores_S.sum()), len(scores_S)),
        "loss/score_std": deviation(scores_S),
        "loss/score_min": Min(float(scores_S.min())),
        "loss/score_max": Max(float(scores_S.max())),
        "loss/pairs": Sum(float(len(margins_P))),
    }
    if len(margins_P):
        metrics["loss/margin_std"] = deviation(margins_P)
        metrics["loss/margin_min"] = Min(float(margins_P.min()))
        metrics["loss/win_probability"] = Mean(float((1.0 / (1.0 + np.exp(-margins_P))).sum()), len(margins_P))
    return metrics
