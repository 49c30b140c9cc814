"""Decides how many groups may start now: the minimum over all limits, so that no limit can raise what another set."""

import math
from collections.abc import Callable

from headrace.algo.staleness import Counts, capacity

Limit = Callable[[Counts], int]  # how many more groups this limit would let start


class Admission:
    """The gate in front of the runner. Pausing is one more limit (nothing may start)."""

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

    def capacity(self, counts: Counts, *, batch_open: bool, waiting: bool = True) -> int:
        """Never more than the staleness and concurrency bounds, whatever the further limits say; never negative.

        `waiting`: a batch is being waited for; only then is there more than one group for each that is trained.
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
