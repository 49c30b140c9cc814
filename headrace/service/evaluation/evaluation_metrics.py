"""Metrics of an evaluation from completions and scores, and paired differences of two policies. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.algo.estimates.intervals import Interval, t_interval, wilson_interval
from headrace.service.evaluation.diversity import distinct_n, self_bleu
from headrace.service.http.evaluation_schemas import Compare, Estimate, Evaluate, Evaluation
from headrace.types import Completion, FloatArray, StopReason

Floats = npt.NDArray[np.float64]
MAX_EXPONENT = 700.0  # e to a larger one overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySamples:
    """The completions and scores of a policy for one request."""

    completions: tuple[tuple[Completion, ...], ...]  # of each prompt
    scores: tuple[FloatArray, ...]  # log-probs of the request's sequences; entry 0 of each is NaN


def sample_metrics(request: Evaluate, samples: PolicySamples) -> dict[str, float]:
    """Compute the perplexity of the request's sequences; number, length and diversity of the completions."""
    metrics: dict[str, float] = {}
    if request.sequences:
        metrics |= _sequence_metrics(request, samples)
    if request.prompts:
        metrics |= _completion_metrics(samples)
        if request.num_samples > 1:
            groups = [_token_lists(group) for group in samples.completions]
            per_prompt = [bleu for bleu in map(self_bleu, groups) if not math.isnan(bleu)]
            metrics["self_bleu_per_prompt"] = mean(np.array(per_prompt))
    return metrics


def _sequence_metrics(request: Evaluate, samples: PolicySamples) -> dict[str, float]:
    weights = _sequence_weights(request)
    total = sum(float(weights_T.sum()) for weights_T in weights)
    nll = sum(_nll(scores, weights_T) for scores, weights_T in zip(samples.scores, weights, strict=True))
    nll_mean = nll / total if total else math.nan
    return {
        "nll": nll_mean,
        "perplexity": math.exp(min(nll_mean, MAX_EXPONENT)) if total else math.nan,
        "sequence_tokens": float(sum(int((weights_T != 0).sum()) for weights_T in weights)),
    }


def _completion_metrics(samples: PolicySamples) -> dict[str, float]:
    completions = [completion for group in samples.completions for completion in group]
    tokens = _token_lists(completions)
    return {
        "completions": float(len(completions)),
        "length_mean": sum(map(len, tokens)) / len(completions),
        "stopped": sum(completion.stop is StopReason.STOP for completion in completions) / len(completions),
        **{f"distinct_{n}": distinct_n(tokens, n) for n in (1, 2, 3)},
        "self_bleu": self_bleu(tokens),
    }


def paired_differences(
    request: Compare, this: tuple[Evaluation, PolicySamples], other: tuple[Evaluation, PolicySamples]
) -> dict[str, Estimate]:
    """Estimate differences, this minus other, over prompts and sequences; samples of a prompt are averaged first."""
    paired: dict[str, Estimate] = {}
    if request.sequences:
        means = [_nll_means(request, samples) for _, samples in (this, other)]
        paired["nll"] = _estimate(t_interval([a - b for a, b in zip(*means, strict=True)]))
    if request.prompts:
        lengths = [_mean_lengths(samples) for _, samples in (this, other)]
        paired["length"] = _estimate(t_interval([a - b for a, b in zip(*lengths, strict=True)]))
    if this[0].rewards is not None and other[0].rewards is not None:
        paired |= _paired_rewards(this[0].rewards, other[0].rewards)
    return {name: estimate for name, estimate in paired.items() if estimate.count}


def _nll_means(request: Evaluate, samples: PolicySamples) -> list[float]:
    """Return the mean over each sequence that has weights."""
    pairs = zip(samples.scores, _sequence_weights(request), strict=True)
    return [_nll(scores, weights_T) / weights_T.sum() for scores, weights_T in pairs if weights_T.sum()]


def _mean_lengths(samples: PolicySamples) -> list[float]:
    return [float(np.mean([len(completion.tokens) for completion in group])) for group in samples.completions]


def _paired_rewards(
    this: Sequence[Sequence[float | None]], other: Sequence[Sequence[float | None]]
) -> dict[str, Estimate]:
    """Estimate the difference of mean rewards, and how often this policy's reward is higher (a tie counts one half)."""
    prompts = [(_drop_failed(mine), _drop_failed(theirs)) for mine, theirs in zip(this, other, strict=True)]
    prompts = [(mine, theirs) for mine, theirs in prompts if mine and theirs]
    differences = [sum(mine) / len(mine) - sum(theirs) / len(theirs) for mine, theirs in prompts]
    wins = [
        sum((x > y) + 0.5 * (x == y) for x in mine for y in theirs) / (len(mine) * len(theirs))
        for mine, theirs in prompts
    ]
    return {
        "reward": _estimate(t_interval(differences)),
        "win_rate": _estimate(wilson_interval(sum(wins) / len(wins) if wins else 0.0, len(wins))),
    }


def mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def only_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out metrics that are NaN or infinite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _sequence_weights(request: Evaluate) -> list[Floats]:
    """Return the weights of all tokens but the first, which has no log-prob."""
    return [
        np.ones(len(sequence.tokens) - 1)
        if sequence.weights is None
        else np.asarray(sequence.weights[1:], dtype=np.float64)
        for sequence in request.sequences
    ]


def _nll(scores: FloatArray, weights: Floats) -> float:
    return -float((scores[1:].astype(np.float64) * weights).sum())


def _token_lists(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def _drop_failed(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _estimate(interval: Interval) -> Estimate:
    """Convert an interval; a single pair has no bounds."""
    has_bounds = math.isfinite(interval.low)
    return Estimate(
        value=interval.value if math.isfinite(interval.value) else 0.0,
        low=interval.low if has_bounds else None,
        high=interval.high if has_bounds else None,
        count=interval.count,
    )
