"""The data of a training step, and the arrays its loss asks for beyond those that rollouts bring.

Rollouts bring `weights`, `advantages`, `sampler_logprobs`, `versions` and `next_logprobs` (NaN: not known). What else a
loss names is computed for the whole step before its first update, and only if it is named: log-probs under other
weights by scorers, corrections for stale tokens from those. Knows no model and no configuration.
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

BROUGHT = ("weights", "advantages", "sampler_logprobs", "versions", "next_logprobs")
SCORED = ("proximal_logprobs", "reference_logprobs", "teacher_logprobs")  # by weights other than the sampler's
DERIVED = ("behaviour_weights", "m2_mask", "lags")  # from the arrays above

Score = Callable[[Sequence[Datum]], Awaitable[Sequence[FloatArray]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Which weights stale tokens get and how they are bounded (`algo.correction`), and which `m2po` leaves out."""

    behaviour: BehaviourCorrection = BehaviourCorrection.FULL
    missing: MissingRule = MissingRule.FULL
    bound: BoundRule = BoundRule.MASK
    level: WeightLevel = WeightLevel.TOKEN
    floor: float = 0.0
    cap: float = 5.0
    normalise: bool = False
    m2_threshold: float = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A training step on its way to the trainer; every datum has the id of its group in `group_ids`."""

    episodes: tuple[CreditedEpisode, ...]
    data: tuple[Datum, ...]
    group_ids: tuple[int, ...]
    metrics: Mapping[str, Metric]

    def __post_init__(self) -> None:
        assert len(self.data) == len(self.group_ids)


def step_batch(credited: CreditedBatch, rows: SequenceUnit = SequenceUnit.EPISODE) -> StepBatch:
    """The data of credited episodes, in their order."""
    made = [(episode.group_id, datum) for episode in credited.episodes for datum in to_data([episode], rows)]
    return StepBatch(
        episodes=credited.episodes,
        data=tuple(datum for _, datum in made),
        group_ids=tuple(group_id for group_id, _ in made),
        metrics=credited.health,
    )


# --- what a loss asks for --------------------------------------------------------------------------------------------


def available_arrays(fn: LossFn, *, teacher: bool) -> tuple[str, ...]:
    """Names that training by reinforcement can put into the data of this loss."""
    scored = SCORED if teacher else tuple(name for name in SCORED if name != "teacher_logprobs")
    units = ("units",) if unit_of(fn) is Unit.GROUP else ()
    return (*BROUGHT, *scored, *DERIVED, *units)


def check_objective(fn: LossFn, params: Mapping[str, float], *, available: Collection[str]) -> None:
    """Raises ConfigError for a loss that is not a policy's, one that needs arrays which nothing can provide (all are
    named), or a number that it does not take."""
    if loss_inputs(fn).outputs != ("policy_logprobs",):
        name = getattr(fn, "__name__", "custom")
        raise ConfigError(f"loss {name!r} reads a scalar head: a critic has its own table, [rl.critic]")
    check_inputs(fn, available, params)


def takes_behaviour_weights(fn: LossFn) -> bool:
    inputs = loss_inputs(fn)
    return "behaviour_weights" in (*inputs.required, *inputs.optional)


def required_arrays(fn: LossFn, *, correction: CorrectionSettings | None = None) -> frozenset[str]:
    """What has to be computed for a loss, with what that in turn is computed from.

    A correction that was asked for is computed for every loss; one that does not take it gets it in its weights.
    """
    inputs = loss_inputs(fn)
    wanted = {name for name in (*inputs.required, *inputs.optional) if name in (*SCORED, *DERIVED)}
    if correction is not None:
        wanted.add("behaviour_weights")
    behaviour = (correction or CorrectionSettings()).behaviour
    if "m2_mask" in wanted or ("behaviour_weights" in wanted and behaviour is not BehaviourCorrection.NONE):
        wanted.add("proximal_logprobs")
    return frozenset(wanted)


# --- computing it ----------------------------------------------------------------------------------------------------


async def add_loss_inputs(
    batch: StepBatch, fn: LossFn, scorers: Mapping[str, Score], *, correction: CorrectionSettings | None, version: int
) -> StepBatch:
    """The batch with every array that `fn` asks for; each scorer runs once, on the whole step."""
    wanted = required_arrays(fn, correction=correction)
    settings = correction or CorrectionSettings()
    data, metrics = batch.data, dict(batch.metrics)
    for name, score in scorers.items():
        data = with_array(data, name, await score(data))
    lacking = [name for name in SCORED if name in wanted and name not in scorers]
    assert not lacking, f"nothing computes {lacking}"
    if "lags" in wanted:
        data = with_lags(data, version=version)
    if "m2_mask" in wanted:
        masked = m2_mask(data, threshold=settings.m2_threshold)
        data, metrics = masked.data, merge_metrics(metrics, masked.health)
    if "behaviour_weights" in wanted:
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
    """Whole groups, in order, split as evenly as they divide; each part normalised over itself, for one update each.

    Behaviour weights that the loss does not take go into its weights, after normalisation: rejected tokens count.
    """
    made = []
    for chosen in split_by_group(batch.group_ids, parts):
        data = reweight(
            [batch.data[index] for index in chosen],
            weighting=weighting,
            constant=constant,
            groups=[batch.group_ids[index] for index in chosen],
        )
        if "value_weights" in loss_inputs(fn).required:
            data = with_value_weights(data)
        fold = not takes_behaviour_weights(fn) and any("behaviour_weights" in datum.arrays for datum in data)
        made.append(fold_into_weights(data) if fold else data)
    return made


def with_value_weights(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """`value_weights`: 1 / their number on the positions whose return a critic is to learn (the array `critic`)."""
    count = max(sum(int((datum.arrays["critic"] != 0).sum()) for datum in data), 1)
    shares = [float_array((datum.arrays["critic"] != 0) / count) for datum in data]
    return with_array(data, "value_weights", shares)


def split_by_group(group_ids: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of each part: whole groups, in the order of their ids, as evenly as they divide; no part is empty."""
    ids = sorted(set(group_ids))
    cuts = [set(ids[part * len(ids) // parts : (part + 1) * len(ids) // parts]) for part in range(parts)]
    return [[index for index, group_id in enumerate(group_ids) if group_id in cut] for cut in cuts if cut]


def with_array(data: Sequence[Datum], name: str, arrays: Sequence[FloatArray]) -> tuple[Datum, ...]:
    """`name` written into every datum; NaN, which says that nothing was computed there, becomes 0."""
    return tuple(
        replace(datum, arrays={**datum.arrays, name: float_array(np.where(np.isnan(array), 0.0, array))})
        for datum, array in zip(data, arrays, strict=True)
    )


def backend_scorer(backend: TrainBackend) -> Score:
    """Log-probs under a backend's present weights."""

    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return (await asyncio.wrap_future(backend.forward(data, CROSS_ENTROPY))).logprobs

    return score


def thread_scorer(
    score: Callable[[Sequence[Datum]], Sequence[FloatArray]], submit: Callable[[Callable[[], Any]], "Future[Any]"]
) -> Score:
    """A blocking scorer, off the event loop: `submit` runs it on the thread that computes."""

    async def on_thread(data: Sequence[Datum]) -> Sequence[FloatArray]:
        scores: Sequence[FloatArray] = await asyncio.wrap_future(submit(lambda: score(data)))
        return scores

    return on_thread
