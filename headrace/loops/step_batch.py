"""The data of a training step, and the arrays that its loss takes beyond those of the rollouts.

Rollouts bring `weights`, `advantages`, `sampler_logprobs`, `versions` and `next_logprobs` (NaN: not known). Any other
array that the loss names is computed for the whole step before its first update: log-probs under other weights by
scorers, and from those the corrections for stale tokens. Knows no model and no configuration.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.algo.advantages.credit import CreditedBatch
from headrace.algo.correction import (
    BehaviourCorrection,
    BoundRule,
    MissingRule,
    WeightLevel,
    behaviour_weights,
    fold_into_weights,
    m2_mask,
    normalize_weights,
    with_lags,
)
from headrace.algo.datum import SequenceUnit, to_data
from headrace.algo.loss_signature import LossFn, Unit, check_inputs, loss_inputs, unit_of
from headrace.algo.loss_weights import reweight
from headrace.algo.units import number_units
from headrace.errors import ConfigError
from headrace.metrics import Metric, merge_metrics
from headrace.protocols import TrainBackend
from headrace.types import CROSS_ENTROPY, CreditedEpisode, Datum, FloatArray, float_array

FROM_ROLLOUTS = ("weights", "advantages", "sampler_logprobs", "versions", "next_logprobs")
SCORED = ("proximal_logprobs", "reference_logprobs", "teacher_logprobs")  # by weights other than the sampler's
DERIVED = ("behaviour_weights", "m2_mask", "lags")  # from the arrays above

Score = Callable[[Sequence[Datum]], Awaitable[Sequence[FloatArray]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """The weights of stale tokens and their bounds (see `algo.correction`)."""

    behaviour: BehaviourCorrection = BehaviourCorrection.FULL
    missing: MissingRule = MissingRule.FULL
    bound: BoundRule = BoundRule.MASK
    level: WeightLevel = WeightLevel.TOKEN
    floor: float = 0.0
    cap: float = 5.0
    normalise: bool = False
    m2_threshold: float = 0.04  # m2po masks tokens until the mean M2 of the rest is below


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The episodes of a training step and their data, on the way to the trainer."""

    episodes: tuple[CreditedEpisode, ...]
    data: tuple[Datum, ...]
    group_ids: tuple[int, ...]  # of each datum
    metrics: Mapping[str, Metric]

    def __post_init__(self) -> None:
        assert len(self.data) == len(self.group_ids)


def step_batch(credited: CreditedBatch, rows: SequenceUnit = SequenceUnit.EPISODE) -> StepBatch:
    """Convert credited episodes to data, in their order."""
    labelled = [(episode.group_id, datum) for episode in credited.episodes for datum in to_data([episode], rows)]
    return StepBatch(
        episodes=credited.episodes,
        data=tuple(datum for _, datum in labelled),
        group_ids=tuple(group_id for group_id, _ in labelled),
        metrics=credited.health,
    )


# --- the arrays that a loss takes ------------------------------------------------------------------------------------


def available_arrays(fn: LossFn, *, teacher: bool) -> tuple[str, ...]:
    """Return the names of the arrays that RL training can put into the data of this loss."""
    scored = SCORED if teacher else tuple(name for name in SCORED if name != "teacher_logprobs")
    units = ("units",) if unit_of(fn) is Unit.GROUP else ()
    return (*FROM_ROLLOUTS, *scored, *DERIVED, *units)


def check_objective(fn: LossFn, params: Mapping[str, float], *, available: Collection[str]) -> None:
    """Raise ConfigError for a loss that is not a policy's, one that needs arrays which nothing provides (the message
    names them all), or a parameter that the loss does not take."""
    if loss_inputs(fn).outputs != ("policy_logprobs",):
        name = getattr(fn, "__name__", "custom")
        raise ConfigError(f"loss {name!r} reads a scalar head: a critic has its own table, [rl.critic]")
    check_inputs(fn, available, params)


def takes_behaviour_weights(fn: LossFn) -> bool:
    inputs = loss_inputs(fn)
    return "behaviour_weights" in (*inputs.required, *inputs.optional)


def required_arrays(fn: LossFn, *, correction: CorrectionSettings | None = None) -> frozenset[str]:
    """Return the names of the arrays to compute for a loss, with those that they in turn are computed from.

    A configured correction is computed for every loss; a loss that does not take it gets it in its weights.
    """
    inputs = loss_inputs(fn)
    required = {name for name in (*inputs.required, *inputs.optional) if name in (*SCORED, *DERIVED)}
    if correction is not None:
        required.add("behaviour_weights")
    behaviour = (correction or CorrectionSettings()).behaviour
    if "m2_mask" in required or ("behaviour_weights" in required and behaviour is not BehaviourCorrection.NONE):
        required.add("proximal_logprobs")
    return frozenset(required)


# --- computing them --------------------------------------------------------------------------------------------------


async def add_loss_inputs(
    batch: StepBatch, fn: LossFn, scorers: Mapping[str, Score], *, correction: CorrectionSettings | None, version: int
) -> StepBatch:
    """Return the batch with every array that `fn` takes; each scorer runs once, on the whole step."""
    required = required_arrays(fn, correction=correction)
    settings = correction or CorrectionSettings()
    data, metrics = batch.data, dict(batch.metrics)
    for name, score in scorers.items():
        data = with_array(data, name, await score(data))
    missing = [name for name in SCORED if name in required and name not in scorers]
    assert not missing, f"nothing computes {missing}"
    if "lags" in required:
        data = with_lags(data, version=version)
    if "m2_mask" in required:
        masked = m2_mask(data, threshold=settings.m2_threshold)
        data, metrics = masked.data, merge_metrics(metrics, masked.health)
    if "behaviour_weights" in required:
        corrected = behaviour_weights(
            data,
            version=version,
            behaviour=settings.behaviour,
            missing=settings.missing,
            bound=settings.bound,
            level=settings.level,
            floor=settings.floor,
            cap=settings.cap,
        )
        data, metrics = corrected.data, merge_metrics(metrics, corrected.health)
        if settings.normalise:
            data = normalize_weights(data)
    if unit_of(fn) is Unit.GROUP:
        units = zip(data, batch.group_ids, strict=True)
        data = number_units([replace(datum, unit=group_id) for datum, group_id in units])
    return replace(batch, data=data, metrics=metrics)


def minibatches(
    batch: StepBatch, parts: int, fn: LossFn, *, weighting: str, constant: float
) -> list[tuple[Datum, ...]]:
    """Split the step into parts of whole groups, in order and as even as possible: one update each, each normalised
    over itself.

    Behaviour weights that the loss does not take go into its weights, after normalisation: rejected tokens count.
    """
    split = []
    for indices in split_by_group(batch.group_ids, parts):
        data = reweight(
            [batch.data[index] for index in indices],
            weighting=weighting,
            constant=constant,
            groups=[batch.group_ids[index] for index in indices],
        )
        if "value_weights" in loss_inputs(fn).required:
            data = with_value_weights(data)
        fold = not takes_behaviour_weights(fn) and any("behaviour_weights" in datum.arrays for datum in data)
        split.append(fold_into_weights(data) if fold else data)
    return split


def with_value_weights(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Add `value_weights`: 1 / n on the n positions whose return a critic is to learn (nonzero in `critic`)."""
    count = max(sum(int((datum.arrays["critic"] != 0).sum()) for datum in data), 1)
    shares = [float_array((datum.arrays["critic"] != 0) / count) for datum in data]
    return with_array(data, "value_weights", shares)


def split_by_group(group_ids: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of each part: whole groups in the order of their ids, as even as possible, no part empty."""
    ids = sorted(set(group_ids))
    cuts = [set(ids[part * len(ids) // parts : (part + 1) * len(ids) // parts]) for part in range(parts)]
    return [[index for index, group_id in enumerate(group_ids) if group_id in cut] for cut in cuts if cut]


def with_array(data: Sequence[Datum], name: str, arrays: Sequence[FloatArray]) -> tuple[Datum, ...]:
    """Add the array `name` to every datum; NaN, which marks positions not computed, becomes 0."""
    return tuple(
        replace(datum, arrays={**datum.arrays, name: float_array(np.where(np.isnan(array), 0.0, array))})
        for datum, array in zip(data, arrays, strict=True)
    )


def backend_scorer(backend: TrainBackend) -> Score:
    """Return a scorer of log-probs under a backend's current weights."""

    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return (await asyncio.wrap_future(backend.forward(data, CROSS_ENTROPY))).logprobs

    return score


def thread_scorer(
    score: Callable[[Sequence[Datum]], Sequence[FloatArray]], submit: Callable[[Callable[[], Any]], "Future[Any]"]
) -> Score:
    """Return an awaitable scorer that runs the blocking `score` on the compute thread, through `submit`."""

    async def on_thread(data: Sequence[Datum]) -> Sequence[FloatArray]:
        scores: Sequence[FloatArray] = await asyncio.wrap_future(submit(lambda: score(data)))
        return scores

    return on_thread
