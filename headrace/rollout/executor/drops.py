"""Track dropped groups: consecutive drops that end the run, tasks that are too slow, and words for errors."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headrace.errors import RolloutError
from headrace.rollout.executor.ledger import GroupEntry
from headrace.types import Group

SLOW_AFTER_DROPS = 2
MAX_DESCRIBED = 8


class ConsecutiveDrops:
    """Count useless groups until a useful one comes; `limit` in a row are too many."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._reasons: Counter[str] = Counter()
        self._last_error = ""

    def add(self, reason: str, text: str) -> RolloutError | None:
        """Count one more, with an error's text if there was one. Returns the error that ends the run at the limit."""
        self._reasons[reason] += 1
        self._last_error = text or self._last_error
        total = self._reasons.total()
        if total < self._limit:
            return None
        counts = ", ".join(f"{reason} {count} times" for reason, count in self._reasons.most_common())
        last = f"; the last error was: {self._last_error}" if self._last_error else ""
        return RolloutError(
            f"{total} groups in a row were of no use ({counts}){last}. "
            "Mend what failed, change the tasks, the reward or the filters, or raise rl.async.max_consecutive_drops"
        )

    def clear(self) -> None:
        """Start counting again: a useful group has come."""
        self._reasons.clear()

    def state_dict(self) -> dict[str, int]:
        return dict(sorted(self._reasons.items()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._reasons = Counter({str(reason): int(count) for reason, count in state.items()})


class SlowTasks:
    """Find tasks that are too slow for the staleness bound, so that no task is dropped for ever.

    A task whose groups were dropped as stale SLOW_AFTER_DROPS times in a row is slow: the next publish that would make
    its running group too old waits for it. The count starts again when one of its groups ends in time, or when the wait
    was in vain.
    """

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def dropped(self, task_id: str) -> bool:
        """Count a stale drop. Returns whether the task should be tried again before others."""
        if self._drops[task_id] >= SLOW_AFTER_DROPS:  # it was waited for, and still did not end in time
            del self._drops[task_id]
            return False
        self._drops[task_id] += 1
        return True

    def ended(self, task_id: str) -> None:
        """Forget the task's drops: one of its groups ended in time."""
        del self._drops[task_id]

    def __contains__(self, task_id: object) -> bool:
        return self._drops[str(task_id)] >= SLOW_AFTER_DROPS

    def state_dict(self) -> dict[str, int]:
        return dict(sorted((task_id, count) for task_id, count in self._drops.items() if count))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._drops = Counter({str(task_id): int(count) for task_id, count in state.items()})


def has_too_few_episodes(group: Group) -> bool:
    """Return whether too few episodes are valid: a group of several needs two to compare, a group of one that one."""
    return len(group.episodes) < min(2, len(group.episodes) + len(group.failed)) or not group.episodes


def why_failed(group: Group) -> str:
    """Return the most frequent reason among the group's failed episodes."""
    reasons = Counter(failed.reason for failed in group.failed)
    return reasons.most_common(1)[0][0] if reasons else f"group {group.id} came back without episodes"


def describe_running(entries: Sequence[GroupEntry], num_sampled: Callable[[int], int]) -> str:
    """Describe the groups that have not ended, for an error or a warning.

    >>> describe_running([GroupEntry(id=3, task_id="t", started_version=1)], lambda id: 12)
    'group 3 of task t (since version 1, 12 tokens sampled)'
    """
    described = ", ".join(
        f"group {entry.id} of task {entry.task_id} (since version {entry.started_version}, "
        f"{num_sampled(entry.id)} tokens sampled)"
        for entry in entries[:MAX_DESCRIBED]
    )
    more = f" and {len(entries) - MAX_DESCRIBED} more" if len(entries) > MAX_DESCRIBED else ""
    return f"{described}{more}" if described else "nothing"
