"""Run groups as asyncio tasks and turn every ending into an outcome: a value, an error, a timeout, a cancellation.

Knows nothing of rewards, versions or counts. Every spawned id yields exactly one outcome, also when its task is
cancelled before it ran at all, so no slot can leak.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from headrace.errors import EpisodeError, HeadraceError, RolloutError, boundary
from headrace.rollout.executor.ledger import Drop
from headrace.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """Report a group that was played and scored."""

    id: int
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """Report a group that raised, timed out or was cancelled."""

    id: int
    reason: Drop
    text: str
    ends_run: bool = False  # playing other groups would not help


Outcome = GroupDone | GroupFailed


class TaskRunner:
    """Own the running tasks. Outcomes are kept until the next call of `outcomes`; at most one for each spawned id."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        self._outcomes: list[Outcome] = []
        self._arrived = asyncio.Event()

    def spawn(self, id: int, play: Callable[[], Awaitable[Group]]) -> None:
        """Start a task that plays group `id`."""
        assert id not in self._tasks, f"group {id} is already running"
        task = asyncio.create_task(self._run(id, play), name=f"group-{id}")
        self._tasks[id] = task
        # a callback and not a `finally` in the task: a task cancelled before its first step never enters its body
        task.add_done_callback(partial(self._finished, id))

    def cancel(self, id: int) -> None:
        """Cancel a running group; its outcome arrives when its task has ended."""
        if id in self._tasks:
            self._tasks[id].cancel()

    async def outcomes(self) -> tuple[Outcome, ...]:
        """Return what has ended since the last call, in order of ending; waits for the first. The caller sets the
        deadline."""
        await self._arrived.wait()
        self._arrived.clear()
        arrived, self._outcomes = tuple(self._outcomes), []
        return arrived

    async def close(self, *, timeout_s: float) -> tuple[int, ...]:
        """Cancel all tasks and wait for them. Returns the ids of those that have not ended after `timeout_s`."""
        tasks = dict(self._tasks)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        return tuple(id for id, task in tasks.items() if not task.done())

    async def _run(self, id: int, play: Callable[[], Awaitable[Group]]) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                with boundary(EpisodeError, f"group {id}"):
                    return GroupDone(id=id, group=await play())
        except HeadraceError as exc:
            return GroupFailed(id=id, reason=Drop.FAILED, text=str(exc), ends_run=isinstance(exc, RolloutError))
        except TimeoutError:
            return GroupFailed(
                id=id, reason=Drop.TIMEOUT, text=f"group {id} was not played and scored in {self._timeout_s:g} s"
            )

    def _finished(self, id: int, task: "asyncio.Task[Outcome]") -> None:
        """Store the outcome of a task that has ended, and wake `outcomes`."""
        del self._tasks[id]
        if task.cancelled():
            outcome: Outcome = GroupFailed(id=id, reason=Drop.CANCELLED, text=f"group {id} was cancelled")
        elif (exc := task.exception()) is not None:  # KeyboardInterrupt and its like: asyncio raises it as well
            outcome = GroupFailed(id=id, reason=Drop.FAILED, text=f"group {id}: {type(exc).__name__}: {exc}")
        else:
            outcome = task.result()
        self._outcomes.append(outcome)
        self._arrived.set()
