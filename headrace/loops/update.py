"""One optimiser update, shared by all loops: submit, await, count what was skipped."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import NonFiniteError
from headrace.metrics import Max, Mean, Metric, Sum, merge_metrics
from headrace.protocols import TrainBackend
from headrace.types import Adam, Datum, ForwardOut, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    forward: ForwardOut
    metrics: dict[str, Metric]


@dataclass(slots=True, kw_only=True)
class Updater:
    """Owns the count of updates skipped in a row; `adam(step)` gives the update's numbers, learning rate included."""

    backend: TrainBackend
    adam: Callable[[int], Adam]
    max_skips: int
    skips_in_a_row: int = field(default=0)

    async def update(self, step: int, data: Sequence[Datum], loss: LossSpec) -> UpdateResult:
        """forward_backward and optim_step, queued together. Raises NonFiniteError after `max_skips` in a row."""
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
        trained = sum(int((datum.arrays["weights"] != 0).sum()) for datum in data)
        metrics: dict[str, Metric] = {
            "train/grad_norm": Mean(out.grad_norm, 1),
            "train/grad_norm_max": Max(out.grad_norm),
            "train/learning_rate": Mean(adam.learning_rate, 1),
            "train/skipped_updates": Sum(int(not out.updated)),
            "train/trained_tokens": Sum(trained),
            "train/computed_tokens": Sum(sum(datum.num_tokens for datum in data)),
        }
        return UpdateResult(
            forward=forward, metrics=merge_metrics(merge_metrics(forward.metrics, out.metrics), metrics)
        )
