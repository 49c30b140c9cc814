"""Held-out evaluation: the same tasks with the same seeds every time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.loops.measure import eval_metrics
from headrace.types import Group, Metric, Task

MAX_TASKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    groups: tuple[Group, ...]
    metrics: dict[str, Metric]

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: pass@1, or the mean reward where nothing says what success is."""
        return self.metrics.get("eval/pass@1", self.metrics["eval/reward"]).value()


async def evaluate(tasks: Sequence[Task], play: Callable[[Task, int], Awaitable[Group]]) -> Evaluation:
    """Play every task once (as a group of samples) with the sampler's present weights; groups are in task order."""
    assert tasks, "there is nothing to evaluate on"
    room = asyncio.Semaphore(MAX_TASKS_AT_ONCE)

    async def one(index: int, task: Task) -> Group:
        async with room:
            return await play(task, index)

    groups = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    return Evaluation(groups=tuple(groups), metrics=eval_metrics(groups))
