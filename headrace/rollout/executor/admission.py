"""Decide how many groups may start now: the minimum over all limits, so that no limit raises what another allows."""

import math
from collections.abc import Callable

from headrace.algo.staleness import LiveCounts, capacity

Limit = Callable[[LiveCounts], int]  # how many more groups this limit would let start


class Admission:
    """Bound the groups that start by staleness, concurrency and further limits. While paused, none may start."""

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness: int,
        max_running: int | None = None,
        oversampling: float = 1.0,
        limits: tuple[Limit, ...] = (),
    ) -> None:
        self._batch_groups = batch_groups
        self._max_staleness = max_staleness
        self._oversampling = oversampling
        self.max_live = math.ceil((max_staleness + oversampling) * batch_groups)
        self._max_running = max_running if max_running is not None else self.max_live
        self._limits = limits
        self.paused = False

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        """Return how many groups may start now: at most the staleness and concurrency bounds, and never negative.

        `batch_open`: a batch is being collected or trained. `waiting`: a batch is being waited for; only then are more
        groups started than are trained (over-sampling).
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
        return max(0, min([bound, *(limit(counts) for limit in self._limits)]))
