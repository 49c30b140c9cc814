"""Held-out evaluation: the same tasks with the same seeds every time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.errors import RolloutError
from headrace.loops.episode_metrics import eval_metrics
from headrace.metrics import Metric
from headrace.process.watchdog import watching
from headrace.types import Group, Task

MAX_TASKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    groups: tuple[Group, ...]
    metrics: dict[str, Metric]

    @property
    def score(self) -> float:
        """The number that chooses the best checkpoint: pass@1, or the mean reward if nothing defines success."""
        return self.metrics.get("eval/pass@1", self.metrics["eval/reward"]).value()


async def evaluate(tasks: Sequence[Task], play: Callable[[Task, int], Awaitable[Group]]) -> EvalResult:
    """Play every task once (as a group of samples) with the sampler's current weights; groups are in task order.

    Raises RolloutError when not one episode could be played and scored: no score would mean anything.
    """
    assert tasks, "there is nothing to evaluate on"
    slots = asyncio.Semaphore(MAX_TASKS_AT_ONCE)

    async def play_task(index: int, task: Task) -> Group:
        async with slots:
            group = await play(task, index)
            activity.beat()
            return group

    with watching(f"the evaluation on {len(tasks)} tasks", has_deadline=True) as activity:
        groups = await asyncio.gather(*(play_task(index, task) for index, task in enumerate(tasks)))
    if not any(group.episodes for group in groups):
        reason = next((failed.reason for group in groups for failed in group.failed), "no episode came back")
        raise RolloutError(f"none of the {len(groups)} held-out tasks could be played and scored; the first: {reason}")
    return EvalResult(groups=tuple(groups), metrics=eval_metrics(groups))
