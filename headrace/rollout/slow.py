"""Which tasks are too slow for the staleness bound, so that none of them is dropped for ever.

A task whose groups were dropped as stale `DROPS` times in a row is slow: the next publish that would make its running
group too old waits for it. The count starts anew when a group of it ends in time, or when the wait was in vain.
"""

from collections import Counter
from collections.abc import Mapping

DROPS = 2


class SlowTasks:
    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def dropped(self, task_id: str) -> bool:
        """A group of the task was dropped as stale; True: the task should be tried again before others."""
        if self._drops[task_id] >= DROPS:  # it was waited for, and still did not end in time: it takes its turn
            del self._drops[task_id]
            return False
        self._drops[task_id] += 1
        return True

    def ended(self, task_id: str) -> None:
        del self._drops[task_id]

    def __contains__(self, task_id: object) -> bool:
        return self._drops[str(task_id)] >= DROPS

    def state_dict(self) -> dict[str, int]:
        return dict(sorted((task_id, count) for task_id, count in self._drops.items() if count))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._drops = Counter({str(task_id): int(count) for task_id, count in state.items()})
