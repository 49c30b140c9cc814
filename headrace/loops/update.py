"""Make one optimiser update, as all loops do: submit, await, count skipped updates."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.algo.losses.forward_metrics import forward_metrics
from headrace.errors import NonFiniteError
from headrace.metrics import Max, Mean, Metric, Sum, merge_metrics
from headrace.protocols import TrainBackend
from headrace.types import Adam, Datum, ForwardOut, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The forward pass of an update, and its metrics merged with the optimiser's."""

    forward: ForwardOut
    metrics: dict[str, Metric]


@dataclass(slots=True, kw_only=True)
class Updater:
    """Makes updates, and counts those skipped in a row."""

    backend: TrainBackend
    adam: Callable[[int], Adam]  # learning rate and other numbers of a training step's updates
    max_skips: int  # in a row, which end the run
    skips_in_a_row: int = field(default=0)

    async def update(self, step: int, data: Sequence[Datum], loss: LossSpec) -> UpdateResult:
        """Queue forward_backward and optim_step together. Raises NonFiniteError after `max_skips` skips in a row."""
        adam = self.adam(step)
        forwarding = self.backend.forward_backward(data, loss)
        stepping = self.backend.optim_step(adam)
        forward = await asyncio.wrap_future(forwarding)
        out = await asyncio.wrap_future(stepping)
        self.skips_in_a_row = 0 if out.updated else self.skips_in_a_row + 1
        if self.skips_in_a_row >= self.max_skips:
            raise NonFiniteError(
                f"{self.skips_in_a_row} updates in a row were skipped, the last with a gradient norm of "
                f"{out.grad_norm:g}: lower the learning rate, or look at the data of step {step}"
            )
        measured = {**forward_metrics(loss, data, forward.logprobs), **forward.metrics}
        metrics: dict[str, Metric] = {
            "train/grad_norm": Mean(out.grad_norm, 1),
            "train/grad_norm_max": Max(out.grad_norm),
            "train/learning_rate": Mean(adam.learning_rate, 1),
            "train/skipped_updates": Sum(int(not out.updated)),
            "train/computed_tokens": Sum(sum(datum.num_tokens for datum in data)),
        }
        return UpdateResult(forward=forward, metrics=merge_metrics(merge_metrics(measured, out.metrics), metrics))
