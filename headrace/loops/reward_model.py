"""Reward modelling: pairs of a chosen and a rejected conversation -> scores of their last tokens -> Bradley-Terry."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.algo.datum import scored_datum
from headrace.algo.loss_weights import reweight
from headrace.algo.units import as_pairs
from headrace.data.preferences import PreferencePair
from headrace.errors import DataError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import StepTimer
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, Sum, merge_metrics, metric_values
from headrace.protocols import MetricSink, TrainBackend
from headrace.render import Renderer
from headrace.types import Datum, IntArray, LossSpec, Message, float_array


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings:
    """The settings of a reward model's training."""

    steps: int
    batch_size: int
    max_tokens: int
    center_coef: float = 0.0  # pulls the two scores of a pair towards a sum of 0
    eval_every: int = 0  # training steps; 0: only after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """The data of some pairs, and the number of pairs left out because a side is too long."""

    data: tuple[Datum, ...]
    metrics: dict[str, Metric]


async def train_reward_model(
    c: RewardModelSettings,
    *,
    next_batch: Callable[[int], Sequence[PreferencePair]],
    renderer: Renderer,
    backend: TrainBackend,
    updater: Updater,
    sink: MetricSink,
    checkpointer: Checkpointer,
    held_out: Sequence[PreferencePair] = (),
    start: int = 0,
) -> dict[str, float]:
    """Train from step `start` to the end and return the last step's metrics; raises Interrupted on a stop request."""
    values: dict[str, float] = {}
    loss = LossSpec(fn="bradley_terry", params={"center_coef": c.center_coef})
    unseen = pair_batch(held_out, renderer, max_tokens=c.max_tokens) if held_out else None
    for step in range(start, c.steps):
        timer = StepTimer()
        batch = pair_batch(next_batch(c.batch_size), renderer, max_tokens=c.max_tokens)
        timer.lap("data")
        updated = await updater.update(step, batch.data, loss)
        train_s = timer.lap("train")
        metrics = merge_metrics(batch.metrics, updated.metrics)
        rate = metrics["train/computed_tokens"].value() / max(train_s, 1e-9)
        values = metric_values(metrics)
        score = None
        if unseen is not None and (step + 1 == c.steps or (c.eval_every and (step + 1) % c.eval_every == 0)):
            judged = await asyncio.wrap_future(backend.forward(unseen.data, loss))
            score = judged.metrics["loss/accuracy"].value()
            values |= {"eval/accuracy": score, "eval/loss": judged.loss}
            timer.lap("eval")
        sink.log(step + 1, values | timer.values() | {"perf/trained_tokens_per_s": rate})
        await checkpointer.end_of_step(step + 1, score)
    return values


def pair_batch(pairs: Sequence[PreferencePair], renderer: Renderer, *, max_tokens: int) -> PairBatch:
    """Render both sides of every pair that fits, weighted so that the loss is the mean over pairs.

    Raises DataError when no pair fits, or the two sides of a pair are the same tokens.
    """
    tokens = [(_tokens(pair.chosen, renderer), _tokens(pair.rejected, renderer), pair.margin) for pair in pairs]
    fitting = [sides for sides in tokens if max(len(sides[0]), len(sides[1])) <= max_tokens]
    if not fitting:
        longest = max(len(side) for chosen, rejected, _ in tokens for side in (chosen, rejected))
        raise DataError(
            f"none of {len(pairs)} pairs fits into {max_tokens} tokens (the longest side has {longest}): "
            "raise reward_model.max_tokens"
        )
    if any(np.array_equal(chosen, rejected) for chosen, rejected, _ in fitting):
        raise DataError("both sides of a pair are the same tokens: the tokenizer or the template hides the difference")
    paired = as_pairs(
        [scored_datum(chosen) for chosen, _, _ in fitting], [scored_datum(rejected) for _, rejected, _ in fitting]
    )
    margins = [margin for _, _, margin in fitting for _ in range(2)]
    data = [
        replace(datum, arrays={**datum.arrays, "margins": float_array(np.full(datum.num_tokens, margin))})
        for datum, margin in zip(paired, margins, strict=True)
    ]
    return PairBatch(
        data=reweight(data, weighting="unit_mean"),
        metrics={
            "data/too_long": Sum(len(tokens) - len(fitting)),
            "data/tokens_mean": Mean(sum(datum.num_tokens for datum in data), len(data)),
        },
    )


def _tokens(messages: Sequence[Message], renderer: Renderer) -> IntArray:
    """Render the conversation up to the end of its last turn, as an engine would see it."""
    return renderer.conversation(messages)[-1].tokens
