"""How much of the time something is played: the sampler's side of the question who waits for whom.

Wraps what plays groups, so it sees when each begins and ends. Knows no group, no ledger and no sampler.
"""

import time
from collections.abc import Awaitable, Callable

from headrace.types import Group, Task

Play = Callable[[Task, int], Awaitable[Group]]


class Meter:
    """Adds up over time how many groups are in play. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._playing = 0
        self._began_s = self._last_s = clock()
        self._idle_s = 0.0
        self._group_s = 0.0

    def around(self, play: Play) -> Play:
        """`play`, counted from its first moment to its last, however it ends."""

        async def metered(task: Task, id: int) -> Group:
            self._move(1)
            try:
                return await play(task, id)
            finally:
                self._move(-1)

        return metered

    def lap(self) -> dict[str, float]:
        """Since the last call: the share of the time in which nothing was played, and the mean number in play."""
        self._move(0)
        spent_s = self._last_s - self._began_s
        idle_s, group_s = self._idle_s, self._group_s
        self._began_s, self._idle_s, self._group_s = self._last_s, 0.0, 0.0
        return {
            "perf/sampler_idle": idle_s / spent_s if spent_s else 0.0,
            "perf/running_mean": group_s / spent_s if spent_s else 0.0,
        }

    def _move(self, change: int) -> None:
        now_s = self._clock()
        passed_s, self._last_s = now_s - self._last_s, now_s
        self._group_s += passed_s * self._playing
        if not self._playing:
            self._idle_s += passed_s
        self._playing += change
        assert self._playing >= 0
