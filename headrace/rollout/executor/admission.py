"""Decide how many groups may start now: the minimum over all limits, so that no limit raises what another allows."""

import math
from collections.abc import Callable, Iterable
from numbers import Integral

from headrace.algo.staleness import LiveCounts, capacity
from headrace.errors import RolloutError, boundary

Limit = Callable[[LiveCounts], int]  # how many more groups this limit would let start


def limit_name(limit: Limit) -> str:
    """Return the name of a limit for messages; that of a run's file is "file.py:function"."""
    return str(getattr(limit, "__name__", type(limit).__name__))


def ask_limit(limit: Limit, counts: LiveCounts) -> int:
    """Ask a limit how many more groups may start. Raises RolloutError if it raises, or returns no whole number."""
    what = f"the limit {limit_name(limit)}"
    with boundary(RolloutError, f"{what} failed with {counts.running} groups running"):
        allowed = limit(counts)
    if isinstance(allowed, bool) or not isinstance(allowed, Integral):
        raise RolloutError(f"{what} returned {allowed!r:.80}: return the whole number of groups that may start")
    return int(allowed)


class Admission:
    """Bound the groups that start by staleness, concurrency and further limits. While paused, none may start."""

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness: int,
        max_running: int | None = None,
        oversampling: float = 1.0,
        limits: Iterable[Limit] = (),
    ) -> None:
        self._batch_groups = batch_groups
        self._max_staleness = max_staleness
        self._oversampling = oversampling
        self.max_live = math.ceil((max_staleness + oversampling) * batch_groups)
        self._max_running = max_running if max_running is not None else self.max_live
        self._limits = list(limits)
        self.paused = False

    @property
    def has_limits(self) -> bool:
        """Return whether there are limits besides those of staleness and concurrency."""
        return bool(self._limits)

    def register(self, limit: Limit) -> None:
        """Add a limit, which counts from now on."""
        self._limits.append(limit)

    def closed_by(self, counts: LiveCounts) -> list[str]:
        """Return the names of the limits that let no group start."""
        return [limit_name(limit) for limit in self._limits if ask_limit(limit, counts) <= 0]

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        """Return how many groups may start now: at most the staleness and concurrency bounds, and never negative.

        `batch_open`: a batch is being collected or trained. `waiting`: a batch is being waited for; only then are more
        groups started than are trained (over-sampling). Raises RolloutError when a limit fails.
        """
        if self.paused:
            return 0
        bound = capacity(
            counts,
            batch_groups=self._batch_groups,
            max_staleness=self._max_staleness,
            max_running=self._max_running,
            batch_open=batch_open,
            oversampling=self._oversampling if waiting else 1.0,
        )
        return max(0, min([bound, *(ask_limit(limit, counts) for limit in self._limits)]))
