"""Bound how far one update moves a policy from the one that sampled its data, as conservative PPO does.

The KL is measured on the data of the update, before and after it; an update that goes too far is taken back, whole or
in part. Works on any host through two functions: one that updates, one that scores.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.algo.kl_control import MAX_TRIES, SAFETY, kl_scale, mean_kl
from headrace.metrics import Max, Metric, Min, Sum
from headrace.types import Adam, Datum, DiscardGradient, FloatArray, ScaleUpdate, UpdateOut

logger = logging.getLogger(__name__)
SAMPLER = "sampler_logprobs"

Update = Callable[[Adam | DiscardGradient | ScaleUpdate], UpdateOut]
Score = Callable[[Sequence[Datum]], Sequence[FloatArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KlBound:
    """A hard limit of the mean KL(sampler || policy) per trained token, and what happens to an update beyond it."""

    limit: float
    action: Literal["discard", "scale_back"] = "discard"  # take the update back, or the part of it that is too much

    def __post_init__(self) -> None:  # the edge has already raised; this catches us
        assert self.limit > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedData:
    """The data of one `forward_backward` whose update is bounded."""

    bound: KlBound
    data: tuple[Datum, ...]


def bounded_data(bound: KlBound, data: Sequence[Datum]) -> BoundedData:
    """Keep what the measurement needs of the data: tokens, weights and the sampler's log-probs."""
    kept = tuple(
        replace(datum, arrays={name: datum.arrays[name] for name in ("weights", SAMPLER)}, unit=None) for datum in data
    )
    return BoundedData(bound=bound, data=kept)


def bounded_step(bounded: Sequence[BoundedData], update: Adam, *, apply: Update, score: Score) -> UpdateOut:
    """Update the weights so that the KL on all of the data stays within the smallest of the limits.

    A policy that is beyond the limit before the update is not updated at all. Otherwise the update is made, measured,
    and taken back if it went too far: whole if any of the bounds says "discard", else the part that is too much.
    """
    limit = min(part.bound.limit for part in bounded)
    data = [datum for part in bounded for datum in part.data]
    kl = mean_kl(data, score(data), other=SAMPLER)
    if not kl <= limit:  # a KL that is not a number is beyond any limit
        logger.warning("the policy is a KL of %.3g from the sampler before the update, the limit is %g", kl, limit)
        return replace(apply(DiscardGradient()), metrics=_metrics(kl, kl, share=0.0, exceeded=True))
    out = apply(replace(update, reversible=True))
    if not out.updated:
        return replace(out, metrics={**out.metrics, **_metrics(kl, kl, share=0.0, exceeded=False)})
    tries = 0 if any(part.bound.action == "discard" for part in bounded) else MAX_TRIES
    try:
        kl = kept = mean_kl(data, score(data), other=SAMPLER)
        share, exceeded = 1.0, not kl <= limit
        if exceeded:
            share, kept = _take_back(data, limit, kl, tries=tries, apply=apply, score=score)
    except BaseException:  # out of memory, say: an update that fails leaves the weights as they were
        apply(ScaleUpdate(share=0.0))
        raise
    if exceeded:
        logger.warning(
            "an update moved the policy to a KL of %.3g from the sampler, the limit is %g: %.3g of it is kept",
            kl,
            limit,
            share,
        )
    return replace(out, metrics={**out.metrics, **_metrics(kl, kept, share=share, exceeded=exceeded)})


def _take_back(
    data: Sequence[Datum], limit: float, kl: float, *, tries: int, apply: Update, score: Score
) -> tuple[float, float]:
    """Scale the update back until it meets the limit, to 0 after `tries`; returns the share that is kept, and its KL.

    The KL of a share is guessed from its square, so it is measured.
    """
    share = 1.0
    for _ in range(tries):
        part = kl_scale(kl, limit=SAFETY * limit)
        share *= part
        apply(ScaleUpdate(share=part))
        kl = mean_kl(data, score(data), other=SAMPLER)
        if kl <= limit:
            return share, kl
    apply(ScaleUpdate(share=0.0))
    return 0.0, mean_kl(data, score(data), other=SAMPLER)


def _metrics(kl: float, kept: float, *, share: float, exceeded: bool) -> dict[str, Metric]:
    return {
        "train/step_kl": Max(kl),
        "train/kl_limit_exceeded": Sum(int(exceeded)),
        "train/kept_share": Min(share),
        "train/kept_kl": Max(kept),
    }
