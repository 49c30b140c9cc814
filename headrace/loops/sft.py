"""Supervised fine-tuning: conversation -> tokens and mask -> datum -> forward_backward -> optim_step."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.datum import conversation_datum, shift
from headrace.algo.loss_weights import reweight
from headrace.data.conversations import Conversation, ToolConversation, messages_of
from headrace.errors import DataError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import StepTimer
from headrace.loops.evaluate import EvalResult
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, Sum, merge_metrics, metric_values
from headrace.protocols import MetricSink, TrainBackend
from headrace.render import Rendered, Renderer
from headrace.types import CROSS_ENTROPY, Datum, float_array


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """The settings of supervised fine-tuning."""

    steps: int
    batch_size: int
    max_tokens: int
    eval_every: int = 0  # training steps; 0: only after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The data of some conversations, and the number of those truncated or without a token to train on."""

    data: tuple[Datum, ...]
    metrics: dict[str, Metric]


async def train_sft(
    c: SftSettings,
    *,
    next_batch: Callable[[int], Sequence[Conversation]],
    renderer: Renderer,
    backend: TrainBackend,
    updater: Updater,
    sink: MetricSink,
    checkpointer: Checkpointer,
    held_out: Sequence[Conversation] = (),
    evaluate: Callable[[int], Awaitable[EvalResult]] | None = None,
    start: int = 0,
) -> dict[str, float]:
    """Train from step `start` to the end and return the last step's metrics; raises Interrupted on a stop request."""
    values: dict[str, float] = {}
    unseen = render_batch(held_out, renderer, max_tokens=c.max_tokens).data if held_out else ()
    for step in range(start, c.steps):
        timer = StepTimer()
        batch = render_batch(next_batch(c.batch_size), renderer, max_tokens=c.max_tokens)
        timer.lap("data")
        updated = await updater.update(step, batch.data, CROSS_ENTROPY)
        train_s = timer.lap("train")
        metrics = merge_metrics(batch.metrics, updated.metrics)
        rate = metrics["train/computed_tokens"].value() / max(train_s, 1e-9)
        values = metric_values(metrics)
        score = None
        if step + 1 == c.steps or (c.eval_every and (step + 1) % c.eval_every == 0):
            if unseen:  # the loss is a mean, by the weights
                values["eval/loss"] = (await asyncio.wrap_future(backend.forward(unseen, CROSS_ENTROPY))).loss
                score = -values["eval/loss"]
            timer.lap("eval")
        sink.log(step + 1, values | timer.values() | {"perf/trained_tokens_per_s": rate})
        if evaluate is not None and (step + 1 == c.steps or (c.eval_every and (step + 1) % c.eval_every == 0)):
            score = await checkpointer.evaluate_or_save(step + 1, evaluate(step + 1))
        await checkpointer.end_of_step(step + 1, score)
    return values


def render_batch(conversations: Sequence[Conversation], renderer: Renderer, *, max_tokens: int) -> Batch:
    """Render conversations with weight 1 / (trained tokens of the batch) on the assistant's tokens.

    Where messages have weights, these tokens have theirs, divided by the sum of all weights of the batch.
    Counts the conversations that are truncated or have no such token.
    """
    rendered = [
        part
        for conversation in conversations
        for part in renderer.conversation(
            messages_of(conversation),
            tools=(conversation.tools or None) if isinstance(conversation, ToolConversation) else None,
            max_tokens=max_tokens,
            weights=conversation.weights if isinstance(conversation, ToolConversation) else (),
        )
    ]
    useful = [part for part in rendered if part.num_trained and len(part.tokens) > 1]
    if not useful:
        raise DataError(
            f"none of {len(conversations)} conversations has an assistant's token within {max_tokens} tokens: "
            "raise sft.max_tokens, or look at the data"
        )
    data = _weighted(useful)
    return Batch(
        data=data,
        metrics={
            "data/truncated": Sum(sum(part.truncated for part in rendered)),
            "data/without_target": Sum(len(rendered) - len(useful)),
            "data/tokens_mean": Mean(sum(len(part.tokens) for part in useful), len(useful)),
        },
    )


def _weighted(parts: Sequence[Rendered]) -> tuple[Datum, ...]:
    """Make data whose loss is the mean over trained tokens, by the weights of their messages if there are any."""
    if all(part.weights is None for part in parts):
        return reweight(
            [conversation_datum(part.tokens, part.trained, images=part.images) for part in parts],
            weighting="token_mean",
        )
    weights = [part.trained.astype(np.float64) if part.weights is None else part.weights for part in parts]
    total = float(sum(array[1:].sum(dtype=np.float64) for array in weights))
    return tuple(
        shift(part.tokens, {"weights": float_array(array / total)}, images=part.images)
        for part, array in zip(parts, weights, strict=True)
    )
