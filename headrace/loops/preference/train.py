"""Train on preferences: examples -> data with the reference's log-probs -> a loss of pairs or labelled replies."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import find_loss
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import StepTimer
from headrace.loops.evaluate import EvalResult
from headrace.loops.preference.examples import PreferenceExample, Scores, example_data, sequence_data
from headrace.loops.step_batch import with_array
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, merge_metrics, metric_values
from headrace.protocols import MetricSink, TrainBackend
from headrace.types import CROSS_ENTROPY, Datum, LossSpec, float_array

REPORTED = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # of held-out examples: eval/<name>


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSettings:
    """The settings of a training on preferences."""

    steps: int
    batch_size: int
    loss: LossSpec
    eval_every: int = 0  # training steps; 0: only after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredExample:
    """An example and the reference's log-probs of its sequences, those of `other` last; none for a loss without it."""

    example: PreferenceExample
    scores: Scores = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceBatch:
    """The data of an update."""

    data: tuple[Datum, ...]
    metrics: dict[str, Metric]


async def train_on_preferences(
    c: PreferenceSettings,
    *,
    next_batch: Callable[[int], Sequence[ScoredExample]],
    backend: TrainBackend,
    updater: Updater,
    sink: MetricSink,
    checkpointer: Checkpointer,
    held_out: Sequence[ScoredExample] = (),
    evaluate: Callable[[int], Awaitable[EvalResult]] | None = None,
    report: Callable[[Mapping[str, float]], None] = lambda values: None,
    start: int = 0,
) -> dict[str, float]:
    """Train from step `start` to the end and return the last step's metrics; raises Interrupted on a stop request.

    `report` gets the numbers of the held-out examples, before the step is saved.
    """
    values: dict[str, float] = {}
    for step in range(start, c.steps):
        timer = StepTimer()
        batch = await make_batch(next_batch(c.batch_size), backend, c.loss)
        timer.lap("data")
        updated = await updater.update(step, batch.data, c.loss)
        train_s = timer.lap("train")
        metrics = merge_metrics(batch.metrics, updated.metrics)
        rate = metrics["train/computed_tokens"].value() / max(train_s, 1e-9)
        values = _with_margin(metric_values(metrics))
        score = None
        evaluates = step + 1 == c.steps or (c.eval_every > 0 and (step + 1) % c.eval_every == 0)
        if held_out and evaluates:
            judged = await judge(held_out, backend, c.loss)
            score = judged["eval/accuracy"]
            values |= judged
            report(judged)
            timer.lap("eval")
        sink.log(step + 1, values | timer.values() | {"perf/trained_tokens_per_s": rate})
        if evaluate is not None and evaluates:
            score = await checkpointer.evaluate_or_save(step + 1, evaluate(step + 1))
        await checkpointer.end_of_step(step + 1, score)
    return values


async def judge(examples: Sequence[ScoredExample], backend: TrainBackend, loss: LossSpec) -> dict[str, float]:
    """Measure loss, accuracy and rewards of examples under the weights of now."""
    batch = await make_batch(examples, backend, loss)
    out = await asyncio.wrap_future(backend.forward(batch.data, loss))
    values = _with_margin(metric_values(out.metrics))
    return {"eval/loss": out.loss} | {f"eval/{name}": values[f"loss/{name}"] for name in REPORTED}


async def make_batch(examples: Sequence[ScoredExample], backend: TrainBackend, loss: LossSpec) -> PreferenceBatch:
    """Make the data that the loss takes; the KL baseline of KTO is computed under the weights of now."""
    required = loss_inputs(find_loss(loss.fn)).required
    rows = [scored.example for scored in examples]
    data = example_data(
        rows,
        [scored.scores for scored in examples] if "reference_logprobs" in required else None,
        imitates="nll_weights" in required,
    )
    metrics: dict[str, Metric] = {
        "data/tokens_mean": Mean(sum(datum.num_tokens for datum in data), len(data)),
    }
    if "baselines" in required:
        baseline = await kl_baseline(examples, backend)
        data = with_array(data, "baselines", [float_array(np.full(datum.num_tokens, baseline)) for datum in data])
        metrics["loss/kl_baseline"] = Mean(baseline, 1)
    return PreferenceBatch(data=data, metrics=metrics)


async def kl_baseline(examples: Sequence[ScoredExample], backend: TrainBackend) -> float:
    """Estimate the KL to the reference from the replies of other rows: the mean of their log-ratios, at least 0."""
    sequences = [part for scored in examples for part in scored.example.other]
    if not sequences:
        return 0.0
    data = sequence_data(sequences)
    policy = (await asyncio.wrap_future(backend.forward(data, CROSS_ENTROPY))).logprobs
    reference = [values for scored in examples for values in scored.scores[len(scored.example.sequences) :]]
    ratios = [
        float(np.sum(of_policy[datum.arrays["weights"] != 0], dtype=np.float64) - np.sum(values, dtype=np.float64))
        for datum, of_policy, values in zip(data, policy, reference, strict=True)
    ]
    return max(0.0, sum(ratios) / len([scored for scored in examples if scored.example.other]))


def _with_margin(values: dict[str, float]) -> dict[str, float]:
    """Add the margin of labelled replies, which is a difference of means."""
    return {"loss/margin": values["loss/chosen_reward"] - values["loss/rejected_reward"]} | values
