"""Training and sampling on one thread: each has it for as long as the other had it before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeShare:
    """`sample(seconds, clock)` samples for that long at most, or returns at once when there is nothing to sample.

    What training took is given to sampling before the next request, so no reply waits for it, and between the
    micro-batches of a long request.
    """

    def __init__(self, sample: Callable[[float, Callable[[], float]], None], clock: Callable[[], float]) -> None:
        self._sample, self._clock = sample, clock
        self._owed_s = 0.0
        self._started = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """A request; whether it fails or not, its time counts."""
        self._sample(self._owed_s, self._clock)
        self._started = self._clock()
        try:
            yield
        finally:
            self._owed_s = self._clock() - self._started

    def between(self) -> None:
        """Two micro-batches."""
        self._sample(self._clock() - self._started, self._clock)
        self._started = self._clock()
