"""On-policy distillation: the student plays, a teacher says what it would have done at each token, the student follows.

There is no reward and no group: every episode is a sequence of its own, and every task has the teacher of its source.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headrace.algo.datum import SequenceUnit, shift, split_samples
from headrace.algo.loss_weights import reweight
from headrace.errors import RolloutError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import StepTimer
from headrace.loops.evaluate import EvalResult
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, Sum, merge_metrics, metric_values
from headrace.protocols import MetricSink, TrainBackend
from headrace.types import (
    Datum,
    Episode,
    FailedEpisode,
    FloatArray,
    IntArray,
    LossSpec,
    Task,
    WeightsHandle,
    float_array,
)

# the teacher's likeliest tokens at every position that has a weight, and their log-probs: [T, K] each
TopTokens = Callable[[Sequence[Datum], int], Awaitable[Sequence[tuple[IntArray, FloatArray]]]]
LOSS_NAMES = {"reverse": "teacher_kl_reverse", "forward": "teacher_kl_forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """The settings of a distillation."""

    steps: int
    batch_size: int  # episodes of one update
    kl: Literal["reverse", "forward"]
    top_k: int  # of the teacher's tokens at each position
    eval_every: int = 0  # training steps; 0: only after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtTask:
    """A task and the number of its teacher."""

    task: Task
    teacher: int


async def train_distillation(
    c: DistillSettings,
    *,
    next_tasks: Callable[[int], Sequence[TaughtTask]],
    play: Callable[[TaughtTask, int], Awaitable[Episode | FailedEpisode]],  # with the number of the episode
    teachers: Sequence[TopTokens],
    publish: Callable[[WeightsHandle], Awaitable[None]],
    backend: TrainBackend,
    updater: Updater,
    sink: MetricSink,
    checkpointer: Checkpointer,
    evaluate: Callable[[int], Awaitable[EvalResult]] | None = None,
    start: int = 0,
) -> dict[str, float]:
    """Train from step `start` to the end and return the last step's metrics; raises Interrupted on a stop request."""
    values: dict[str, float] = {}
    loss = LossSpec(fn=LOSS_NAMES[c.kl])
    for step in range(start, c.steps):
        timer = StepTimer()
        tasks = next_tasks(c.batch_size)
        playing = asyncio.gather(*(play(taught, step * c.batch_size + i) for i, taught in enumerate(tasks)))
        ended = await checkpointer.run_or_stop(playing)
        timer.lap("rollout")
        played = [(taught, e) for taught, e in zip(tasks, ended, strict=True) if isinstance(e, Episode) and e.steps]
        if not played:
            reason = next((e.reason for e in ended if isinstance(e, FailedEpisode)), "no episode has a sampled token")
            raise RolloutError(f"none of the {len(ended)} episodes of step {step + 1} could be played: {reason}")
        data, metrics = await taught_data(played, teachers, top_k=c.top_k)
        timer.lap("teacher")
        updated = await updater.update(step, data, loss)
        timer.lap("train")
        await publish(await asyncio.wrap_future(backend.export_weights()))
        timer.lap("publish")
        metrics["rollout/failed_episodes"] = Sum(len(ended) - len(played))
        values = metric_values(merge_metrics(metrics, updated.metrics))
        sink.log(step + 1, values | timer.values())
        score = None
        if evaluate is not None and (step + 1 == c.steps or (c.eval_every and (step + 1) % c.eval_every == 0)):
            score = await checkpointer.evaluate_or_save(step + 1, evaluate(step + 1))
        await checkpointer.end_of_step(step + 1, score)
    return values


async def taught_data(
    played: Sequence[tuple[TaughtTask, Episode]], teachers: Sequence[TopTokens], *, top_k: int
) -> tuple[tuple[Datum, ...], dict[str, Metric]]:
    """Make the data of an update: the sampled tokens of all episodes, each with the likeliest tokens of its teacher.

    The loss is the mean over sampled tokens. Each teacher is asked once.
    """
    rows = [(taught.teacher, datum) for taught, episode in played for datum in sampled_data(episode)]
    taught_rows: list[Datum | None] = [None] * len(rows)
    for number, top_tokens in enumerate(teachers):
        places = [place for place, (teacher, _) in enumerate(rows) if teacher == number]
        if not places:
            continue
        answers = await top_tokens([rows[place][1] for place in places], top_k)
        for place, (tokens, logprobs) in zip(places, answers, strict=True):
            datum = rows[place][1]
            taught_rows[place] = replace(
                datum, targets=tokens, arrays={**datum.arrays, "teacher_logprobs": float_array(logprobs)}
            )
    data = reweight([datum for datum in taught_rows if datum is not None], weighting="token_mean")
    lengths = [episode.num_sampled for _, episode in played]
    return data, {
        "rollout/length_mean": Mean(sum(lengths), len(lengths)),
        "rollout/sampled_tokens": Sum(sum(lengths)),
        "rollout/truncated": Mean(sum(episode.truncated for _, episode in played), len(played)),
    }


def sampled_data(episode: Episode) -> list[Datum]:
    """Make data of an episode with weight 1 on its sampled tokens."""
    return [
        shift(sample.tokens, {"weights": (sample.step >= 0).astype(np.float32)}, temperature=episode.temperature)
        for sample in split_samples(episode, SequenceUnit.EPISODE)
    ]
