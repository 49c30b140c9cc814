"""Groups that end when the test says so, and an executor that plays them."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.publisher import Publisher
from headrace.types import Group, Task
from support.async_rollouts import tasks
from support.rollout_groups import group


class ScriptedGroups:
    """Play groups that end when the test says so."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.endings: dict[int, asyncio.Future[Group]] = {}

    async def play(self, task: Task, group_id: int) -> Group:
        self.started.append(group_id)
        self.endings[group_id] = asyncio.get_running_loop().create_future()
        return await self.endings[group_id]

    def end(self, id: int, *, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0, num_failed: int = 0) -> None:
        ended = group(id, rewards=rewards, versions=(version, version), num_failed=num_failed)
        self.endings[id].set_result(ended)


def scripted_executor(
    play: Callable[[Task, int], Awaitable[Group]],
    *,
    batch: int = 3,
    eta: int = 0,
    max_running: int | None = None,
    timeout_s: float = 5.0,
    drops: int = 8,
    grace_s: float = 0.5,
    **extra: object,
) -> RolloutExecutor:
    source = tasks()
    arguments: dict[str, object] = {"next_task": lambda: next(source), "publisher": Publisher(), **extra}
    return RolloutExecutor(
        play=play,
        batch_groups=batch,
        settings=AsyncSettings(
            max_staleness=eta,
            max_running=max_running,
            task_timeout_s=timeout_s,
            max_consecutive_drops=drops,
            grace_s=grace_s,
        ),
        **arguments,  # type: ignore[arg-type]
    )
